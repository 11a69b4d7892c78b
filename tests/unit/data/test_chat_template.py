"""Chat templates: what those of the hub use works; what harms the server ends with a sentence."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from blocktrain.data.chat_template import ChatTemplate
from blocktrain.errors import DataError, RequestError

TURNS = [("developer", "Be brief."), ("user", "Größe?")]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@contextmanager
def template(source: str, **names: str) -> Iterator[ChatTemplate]:
    made = ChatTemplate(source, names, cpu_seconds=1)
    try:
        yield made
    finally:
        made.close()


def rendered(source: str, options: dict[str, Any] | None = None, **names: str) -> str:
    with template(source, **names) as made:
        return made.render(TURNS, options or {})


def test_what_templates_of_the_hub_use():
    source = """
{%- set state = namespace(count=0) %}{{ bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'nobody' %}{% continue %}{% endif %}
    {%- set state.count = state.count + 1 %}
    {{- '<' + message.role + '>' + message.content.strip() }}
    {%- generation %}.{% endgeneration %}
{%- endfor %}
{%- if add_generation_prompt and not tools and thinking is false %}{{ state.count }}{% endif %}
{{- messages[1] | tojson }}{{ strftime_now('%%') }}"""
    text = rendered(source, {"thinking": False}, bos_token="<s>")
    assert text == '<s><system>Be brief..<user>Größe?.2{"role": "user", "content": "Größe?"}%'


def test_a_refusal_is_the_requests_fault_and_the_next_request_is_served():
    source = "{% if messages|length > 1 %}{{ raise_exception('one at a time') }}{% endif %}fine"
    with template(source) as made:
        with pytest.raises(RequestError, match="refuses these messages: one at a time") as refused:
            made.render(TURNS, {})
        assert refused.value.field == "messages"
        assert made.render(TURNS[:1], {}) == "fine"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for", "TemplateSyntaxError: unexpected 'end of template'"),
        ("{{ messages.nothing.more }}", "has no attribute 'nothing'"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{% set _ = messages.append(1) %}", "SecurityError"),
        ("{{ lipsum.__globals__ }}", "'lipsum' is undefined"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ 'a' * 1000000000 }}", "more than 512 MiB of memory"),
        ("{% for i in range(99) %}{{ 'a' * 99999 }}{% endfor %}", "more than 1048576 characters"),
    ],
)
def test_a_broken_or_hostile_template_is_named_and_ends(source: str, reason: str):
    with pytest.raises(DataError, match="the model's chat template is broken: ") as broken:
        rendered(source)
    assert reason in str(broken.value)


def test_after_a_template_was_ended_the_next_request_is_served():
    with template("{% if messages|length > 1 %}" + LOOP + "{% endif %}fine") as made:
        with pytest.raises(DataError, match="takes too long"):
            made.render(TURNS, {})
        assert made.render(TURNS[:1], {}) == "fine"


def test_a_template_runs_without_the_servers_environment_and_files(monkeypatch: Any):
    monkeypatch.setenv("BLOCKTRAIN_API_KEY", "secret")
    with template("fine") as made:
        made.render(TURNS, {})
        process = made.process
        assert process is not None
        with open(f"/proc/{process.pid}/environ", "rb") as file:
            assert b"secret" not in file.read()
        assert not os.path.exists(f"/proc/{process.pid}/fd/3")


def files(config: dict[str, Any], **more: str) -> dict[str, bytes]:
    texts = {"tokenizer_config.json": json.dumps(config), **more}
    return {name: text.encode() for name, text in texts.items()}


def test_where_a_tokenizer_has_its_template():
    config = {"bos_token": {"content": "<s>"}, "eos_token": None, "chat_template": "{{bos_token}}"}
    several = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    for given, text in (
        (files(config), "<s>"),
        (files({**config, "chat_template": several}), "yes"),
        (files(config) | {"chat_template.jinja": b"{{ bos_token }}!"}, "<s>!"),
    ):
        made = ChatTemplate.of_tokenizer(given)
        assert made is not None and made.render(TURNS, {}) == text
        made.close()
    assert ChatTemplate.of_tokenizer(files({"bos_token": "<s>"})) is None
    assert ChatTemplate.of_tokenizer({}) is None
