"""OpenAI's API over real sockets: its own client, clients that leave or stall, and any body."""

import json
import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from tests.support.engine import SmallEngine, next_log_probs
from tests.support.models import awake_stack
from tests.support.serving import reference_text
from tests.support.waiting import wait_for
from tests.support.web import listening

from blocktrain.config import Config
from blocktrain.data.chat_template import ChatTemplate
from blocktrain.errors import ConfigError, OverloadedError, UnavailableError
from blocktrain.model.stack import Stack
from blocktrain.numerics.sampling import Sampling
from blocktrain.protocol.addresses import bound_socket
from blocktrain.serve.http.admission import AdmissionQueue
from blocktrain.serve.http.http_server import ApiSettings, create_app, web_server
from blocktrain.serve.http.metrics import ServerMetrics
from blocktrain.serve.http.openai import RequestLimits
from blocktrain.serve.http.served_model import ServedModel
from blocktrain.serve.router.decode import AnswerCost

KEY = "a key for tests"
SETTINGS = ApiSettings(keys=("another", KEY))
SECONDS = 20.0
GREEDY: dict[str, Any] = {"model": "small", "temperature": 0}
HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def stack(config: Config) -> Stack:
    return awake_stack(config)


@pytest.fixture
def engine(stack: Stack) -> SmallEngine:
    return SmallEngine(stack)


def model_of(engine: SmallEngine, template: ChatTemplate | None = None) -> ServedModel:
    return ServedModel("small", engine.stack.config, template=template)


@contextmanager
def served(
    engine: SmallEngine, settings: ApiSettings = SETTINGS, template: ChatTemplate | None = None
) -> Iterator[str]:
    listener = bound_socket("127.0.0.1", 0)
    server = web_server(engine, model_of(engine, template), settings, listener)
    with listening(server, listener) as place:
        yield f"http://{place}"


@contextmanager
def client_of(
    engine: SmallEngine, settings: ApiSettings = SETTINGS, key: str = KEY
) -> Iterator[OpenAI]:
    with (
        served(engine, settings) as address,
        OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=SECONDS) as client,
    ):
        yield client


@pytest.fixture
def client(engine: SmallEngine) -> Iterator[OpenAI]:
    with client_of(engine) as client:
        yield client


def alone(
    stack: Stack, prompt: bytes, count: int, temperature: float = 1.0, seed: int = 0
) -> bytes:
    """What the model says without any server."""
    return reference_text(stack, prompt, count, Sampling(temperature, seed=seed))


# Its own client


def test_a_completion_is_the_models_own_bytes(client: OpenAI, stack: Stack):
    answer = client.completions.create(
        model="small", prompt="Once", max_tokens=20, temperature=1.0, seed=3,
        extra_body={"mode": "ar"},
    )  # fmt: skip
    expected = alone(stack, b"Once", 20, temperature=1.0, seed=3)
    assert answer.choices[0].text == expected.decode("utf-8", "replace")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 20)
    assert (answer.id[:5], answer.object, answer.model) == ("cmpl-", "text_completion", "small")
    assert answer.blocktrain == {  # type: ignore[attr-defined]
        "traversals": 20, "tokens_per_traversal": 1.0, "drafted": 0, "accepted": 0, "replays": 0,
        "network_seconds": 0.0, "stage_seconds": {"here": 0.5},
    }  # fmt: skip


def test_a_stream_has_the_same_text_and_its_cost(client: OpenAI):
    asked: Any = {"model": "small", "prompt": "Once", "max_tokens": 25, "seed": 4}
    whole = client.completions.create(**asked)
    chunks = list(
        client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    *texts, ending, last = chunks
    assert "".join(chunk.choices[0].text for chunk in [*texts, ending]) == whole.choices[0].text
    assert len(texts) > 3 and all(chunk.choices[0].finish_reason is None for chunk in texts)
    assert ending.choices[0].finish_reason == "length"
    assert ending.blocktrain == whole.blocktrain  # type: ignore[attr-defined]
    assert last.choices == [] and last.usage == whole.usage
    assert {chunk.id for chunk in chunks} == {ending.id}


def test_a_chat(client: OpenAI, engine: SmallEngine, stack: Stack):
    messages: Any = [{"role": "system", "content": "S"}, *HELLO]
    answer = client.chat.completions.create(
        **GREEDY, messages=messages, max_completion_tokens=8, extra_body={"mode": "sweep"}
    )
    prompt = b"System: S\nUser: Hello\nAssistant: "
    assert (bytes(engine.asked[0].prompt), engine.asked[0].mode) == (prompt, "sweep")
    text = stream = ""
    for chunk in client.chat.completions.create(
        **GREEDY, messages=messages, max_tokens=8, stream=True
    ):
        delta = chunk.choices[0].delta
        assert (delta.role == "assistant") == (not text and not stream and delta.content == "")
        stream += delta.content or ""
    text = answer.choices[0].message.content or ""
    assert (answer.choices[0].message.role, text) == ("assistant", stream)
    assert engine.finished == 2


def test_a_stop_string_ends_an_answer_and_is_no_part_of_it(client: OpenAI, stack: Stack):
    full = alone(stack, b"", 30, temperature=1.0, seed=1).decode("latin-1")
    at = next(i for i, c in enumerate(full) if i > 3 and c.isascii() and full.index(c) == i)
    answer = client.completions.create(
        model="small", prompt="", seed=1, max_tokens=30, stop=[full[at], "never said"]
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == at


def test_several_choices_are_several_seeds(client: OpenAI):
    asked: Any = {"model": "small", "max_tokens": 10}
    both = client.completions.create(**asked, prompt=["a", "b"], n=2, seed=5)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    for choice, prompt, seed in zip(both.choices, "aabb", (5, 6, 5, 6), strict=True):
        alone = client.completions.create(**asked, prompt=prompt, seed=seed)
        assert alone.choices[0].text == choice.text
    texts = [""] * 4
    for chunk in client.completions.create(**asked, prompt=["a", "b"], n=2, seed=5, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in both.choices]


def test_log_probabilities(client: OpenAI, stack: Stack):
    answer = client.completions.create(**GREEDY, prompt="Once", max_tokens=6, logprobs=3)
    told = answer.choices[0].logprobs
    assert told is not None and told.token_logprobs and told.top_logprobs and told.tokens
    expected = next_log_probs(stack, b"Once")
    assert told.token_logprobs[0] == pytest.approx(float(expected.max()), abs=1e-6)
    assert [len(top) for top in told.top_logprobs] == [3] * 6
    assert [max(top, key=lambda name: top[name]) for top in told.top_logprobs] == told.tokens

    chat = client.chat.completions.create(
        **GREEDY, messages=HELLO, max_tokens=6, logprobs=True, top_logprobs=2, stream=True
    )
    rows = [row for part in chat if part.choices[0].logprobs
            for row in part.choices[0].logprobs.content or ()]  # fmt: skip
    assert len(rows) == 6
    assert all(row.bytes == row.top_logprobs[0].bytes for row in rows)
    assert rows[0].logprob == pytest.approx(
        float(next_log_probs(stack, b"User: Hello\nAssistant: ").max()), abs=1e-6
    )


def test_models(client: OpenAI):
    assert [model.id for model in client.models.list()] == ["small"]
    assert client.models.retrieve("small").owned_by == "blocktrain"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("large")
    with pytest.raises(openai.NotFoundError) as refused:
        client.completions.create(model="large", prompt="")
    assert refused.value.code == "model_not_found"


# Refusals


def test_a_wrong_key(engine: SmallEngine):
    with (
        client_of(engine, key="a key for text") as client,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        client.completions.create(model="small", prompt="")
    assert refused.value.code == "invalid_api_key" and refused.value.request_id
    assert engine.asked == []


def test_without_keys_anyone_may_ask(engine: SmallEngine):
    with client_of(engine, ApiSettings(), key="none") as client:
        assert client.completions.create(model="small", prompt="", max_tokens=1).choices


def test_an_empty_key_is_no_key(engine: SmallEngine):
    with pytest.raises(ConfigError, match="empty"):
        create_app(engine, model_of(engine), ApiSettings(keys=("",)))


def test_unsupported_parameters_are_refused_by_name(client: OpenAI):
    with pytest.raises(openai.BadRequestError, match="cannot fill gaps") as refused:
        client.completions.create(model="small", prompt="", suffix="end")
    assert (refused.value.param, refused.value.code) == ("suffix", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError, match="999 is not a token of small; its tokens are"):
        client.completions.create(model="small", prompt="", logit_bias={"999": 1})
    with pytest.raises(openai.BadRequestError, match="limit is 8192") as refused:
        client.chat.completions.create(model="small", messages=HELLO, max_tokens=10**6)
    assert (refused.value.param, refused.value.type) == ("max_tokens", "invalid_request_error")


def test_a_full_server_refuses_with_retry_after(engine: SmallEngine):
    engine.seconds_per_byte = 0.01
    with client_of(engine, replace(SETTINGS, at_once=1, queue=0)) as client:
        asked: Any = {"model": "small", "prompt": "", "max_tokens": 2000, "stream": True}
        with client.completions.create(**asked) as first:
            next(first)
            with pytest.raises(openai.RateLimitError) as refused:
                client.completions.create(model="small", prompt="")
            assert refused.value.response.headers["retry-after"] == "1"
        wait_for(lambda: engine.under_way == 0)
        assert client.completions.create(model="small", prompt="", max_tokens=1).choices


def test_a_waiting_request_gets_the_next_place(engine: SmallEngine):
    engine.seconds_per_byte = 0.005
    with client_of(engine, replace(SETTINGS, at_once=1)) as client:
        first = client.completions.create(model="small", prompt="", max_tokens=20, stream=True)
        assert client.completions.create(model="small", prompt="", max_tokens=1).choices
        assert engine.finished == 2
        first.close()


@pytest.mark.parametrize(
    ("failure", "kind", "status"),
    [
        (OverloadedError("no memory left for this request", 7.2), openai.RateLimitError, 429),
        (UnavailableError("no stage left for blocks 1-2"), openai.InternalServerError, 503),
        (ConfigError("this model has no such mode"), openai.BadRequestError, 400),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_the_engine_have_their_status(
    engine: SmallEngine, failure: Any, kind: type[openai.APIStatusError], status: int, stream: bool
):
    engine.failure = failure
    with client_of(engine) as client, pytest.raises(kind, match=str(failure)) as refused:
        client.completions.create(model="small", prompt="", stream=stream)
    assert refused.value.status_code == status
    later = {429: "8", 503: "1"}.get(status)
    assert refused.value.response.headers.get("retry-after") == later


def test_a_failure_in_the_middle_of_a_stream_is_its_last_event(engine: SmallEngine):
    engine.failure, engine.fails_at = UnavailableError("no stage left for block 1"), 5
    with client_of(engine) as client:
        stream = client.completions.create(model="small", prompt="", stream=True, n=2)
        with pytest.raises(openai.APIError, match="no stage left for block 1"):
            list(stream)
        wait_for(lambda: engine.under_way == 0)


def test_a_bug_is_an_error_in_the_same_format(engine: SmallEngine):
    engine.failure = RuntimeError("what only the log may tell")  # type: ignore[assignment]
    with served(engine) as address:
        answer = httpx.post(f"{address}/v1/completions", json={"prompt": ""}, headers=BEARER)
    assert answer.status_code == 500 and answer.headers["x-request-id"].startswith("req_")
    assert answer.json()["error"]["code"] == "internal" and "log may" not in answer.text


def test_a_server_announces_itself_once_it_accepts_requests(engine: SmallEngine):
    listener, answered = bound_socket("127.0.0.1", 0), []
    server = web_server(
        engine,
        model_of(engine),
        SETTINGS,
        listener,
        on_start=lambda: answered.append(server.started),
    )
    assert answered == []
    with listening(server, listener):
        assert answered == [True]


def test_a_key_with_many_requests_does_not_delay_another_one(engine: SmallEngine):
    """The place is taken and one key has eight requests in the queue; the other key's request is
    the second that is answered from then on."""
    engine.seconds_per_byte = 0.01
    with served(engine, replace(SETTINGS, at_once=1)) as address, ExitStack() as stack:
        body = {"prompt": "", "max_tokens": 20}
        for _ in range(9):
            stack.enter_context(raw_request(address, body))
        wait_for(lambda: gauge(address, "blocktrain_serve_waiting") == 8)
        other = {"authorization": "Bearer another"}
        answer = httpx.post(f"{address}/v1/completions", json=body, headers=other, timeout=SECONDS)
        assert answer.status_code == 200
        assert engine.finished <= 3
        assert gauge(address, "blocktrain_serve_queue_seconds_count") >= 2


def test_a_server_that_stops_ends_answers_in_progress_with_an_error(engine: SmallEngine):
    engine.seconds_per_byte = 0.01
    listener = bound_socket("127.0.0.1", 0)
    server = web_server(engine, model_of(engine), replace(SETTINGS, at_once=1), listener)
    with (
        listening(server, listener) as place,
        OpenAI(base_url=f"http://{place}/v1", api_key=KEY, max_retries=0) as client,
    ):
        asked: Any = {"model": "small", "prompt": "", "max_tokens": 8000, "stream": True}
        stream = client.completions.create(**asked)
        next(stream)
        with raw_request(f"http://{place}", asked) as waiting:
            wait_for(lambda: gauge(f"http://{place}", "blocktrain_serve_waiting") == 1)
            server.should_exit = True
            with pytest.raises(openai.APIError, match="the server is stopping"):
                list(stream)
            assert waiting.recv(1000).startswith(b"HTTP/1.1 503")
        assert engine.under_way == 0


def test_a_broken_chat_template_is_an_error_that_says_what_to_do(engine: SmallEngine):
    template = ChatTemplate("{% for")
    body = {"messages": HELLO, "max_tokens": 1}
    with served(engine, template=template) as address:
        answer = httpx.post(f"{address}/v1/chat/completions", json=body, headers=BEARER)
    template.close()
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "broken_model")
    assert "chat template is broken: TemplateSyntaxError" in answer.json()["error"]["message"]
    assert engine.asked == []


BEARER = {"authorization": f"Bearer {KEY}"}


def test_bodies_too_long_or_too_slow(engine: SmallEngine):
    with served(engine, replace(SETTINGS, body_bytes=1000, patience=0.2)) as address:
        url = f"{address}/v1/completions"
        long = httpx.post(url, json={"prompt": "x" * 2000}, headers=BEARER)
        assert (long.status_code, long.json()["error"]["code"]) == (413, "too_large")
        with raw_request(address, {"prompt": ""}, promised=500) as connection:
            assert connection.recv(1000).startswith(b"HTTP/1.1 408")


def test_other_paths_and_methods_are_refused_in_the_same_format(engine: SmallEngine):
    with served(engine) as address, httpx.Client(base_url=address, headers=BEARER) as http:
        for answer, status in (
            (http.get("/v1/embeddings"), 404),
            (http.get("/v1/completions"), 405),
        ):
            assert answer.status_code == status
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


# Clients that leave, and clients that do not read


@contextmanager
def raw_request(
    address: str, body: dict[str, Any], promised: int | None = None
) -> Iterator[socket.socket]:
    """A connection of which the test decides what is read, and when it ends."""
    payload = json.dumps(body).encode()
    length = len(payload) if promised is None else promised
    head = (f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
            f"content-length: {length}\r\n\r\n")  # fmt: skip
    host, port = address.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(SECONDS)
        connection.connect((host, int(port)))
        connection.sendall(head.encode() + payload)
        yield connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_request(engine: SmallEngine, stream: bool):
    engine.seconds_per_byte = 0.005
    with served(engine) as address:
        asked = {"prompt": "", "max_tokens": 8000, "stream": stream, "n": 2}
        with raw_request(address, asked):
            wait_for(lambda: engine.under_way == 2)
        wait_for(lambda: engine.under_way == 0, seconds=2)
        assert engine.finished == 0


def test_a_client_that_leaves_the_queue_is_forgotten(engine: SmallEngine):
    engine.seconds_per_byte = 0.005
    with served(engine, replace(SETTINGS, at_once=1)) as address:
        with raw_request(address, {"prompt": "", "max_tokens": 8000}):
            wait_for(lambda: engine.under_way == 1)
            with raw_request(address, {"prompt": "second"}):
                wait_for(lambda: gauge(address, "blocktrain_serve_waiting") == 1)
            wait_for(lambda: gauge(address, "blocktrain_serve_waiting") == 0)
        wait_for(lambda: engine.under_way == 0)
        assert len(engine.asked) == 1


def test_a_client_that_reads_nothing_is_disconnected(engine: SmallEngine):
    with served(engine, replace(SETTINGS, patience=0.5)) as address:
        asked = {"prompt": "", "max_tokens": 8000, "stream": True, "logprobs": 5}
        with raw_request(address, asked) as connection:
            wait_for(lambda: engine.under_way == 1)
            wait_for(lambda: engine.under_way == 0)
            written = engine_tokens(address)
            assert 0 < written < 4000  # not all of it was kept for a client that never reads
            wait_for(lambda: cut_off(connection), seconds=5)
        assert engine.finished == 0


def cut_off(connection: socket.socket) -> bool:
    """After what had been sent comes the end, not the rest."""
    try:
        return connection.recv(1 << 20) == b""
    except ConnectionResetError:
        return True


# What operators see


def samples(address: str) -> dict[str, float]:
    page = httpx.get(f"{address}/metrics").text
    return {
        sample.name + str(sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def gauge(address: str, name: str) -> float:
    return samples(address)[f"{name}[]"]


def engine_tokens(address: str) -> float:
    return gauge(address, "blocktrain_serve_output_tokens_total")


def test_metrics_count_requests_bytes_and_seconds(engine: SmallEngine):
    with served(engine) as address:
        asked = {"prompt": "abc", "max_tokens": 5}
        httpx.post(f"{address}/v1/completions", json=asked, headers=BEARER)
        httpx.get(f"{address}/nowhere/in/particular")
        told = samples(address)
    path = ("path", "/v1/completions")
    assert told[f"blocktrain_serve_requests_total{[path, ('status', '200')]}"] == 1
    assert told["blocktrain_serve_requests_total[('path', 'other'), ('status', '404')]"] == 1
    assert told["blocktrain_serve_prompt_tokens_total[]"] == 3
    assert told["blocktrain_serve_output_tokens_total[]"] == 5
    assert told["blocktrain_serve_traversals_total[]"] == 5
    assert told["blocktrain_serve_stage_seconds_total[('stage', 'here')]"] == 0.5
    assert told["blocktrain_serve_answering[]"] == 0


def test_health_has_more_detail_with_a_key(engine: SmallEngine):
    with served(engine) as address, httpx.Client(base_url=address) as http:
        assert http.get("/health").json() == {"status": "ok", "model": "small"}
        assert http.get("/health", headers=BEARER).json()["engine"]["alive"] is True
        engine.failure = UnavailableError("no stage left")
        assert http.get("/health").status_code == 503


def test_every_answer_has_an_id_the_clients_own_where_it_gave_one(engine: SmallEngine):
    with served(engine) as address, httpx.Client(base_url=address) as http:
        assert http.get("/health").headers["x-request-id"].startswith("req_")
        own = {"x-request-id": "mine-1"}
        assert http.get("/health", headers=own).headers["x-request-id"] == "mine-1"
        odd = {"x-request-id": "a b\tc"}
        assert http.get("/health", headers=odd).headers["x-request-id"].startswith("req_")


def test_the_access_log_has_a_line_for_every_request(
    engine: SmallEngine, caplog: pytest.LogCaptureFixture
):
    with (
        caplog.at_level(logging.INFO, "blocktrain.serve.http.http_server"),
        served(engine) as address,
        httpx.Client(base_url=address, headers=BEARER) as http,
    ):
        whole = {"prompt": "abc", "max_tokens": 5}
        http.post("/v1/completions", json=whole, headers={"x-request-id": "one"})
        http.post("/v1/completions", json={**whole, "stream": True, "n": 2})
        http.get("/line%0Abreak")
    lines = {record.getMessage() for record in caplog.records if record.levelno == logging.INFO}
    expected = [
        r"one POST /v1/completions: 200 in [0-9.]+ s, 5 tokens",
        r"req_[0-9a-f]+ POST /v1/completions: 200 in [0-9.]+ s, 10 tokens",
        r"req_[0-9a-f]+ GET /line%0Abreak: 404 in [0-9.]+ s, 0 tokens",
    ]
    assert len(lines) == len(expected)
    for pattern in expected:
        assert any(re.fullmatch(pattern, line) for line in lines), lines


def test_a_prompt_that_is_cut_is_reported(engine: SmallEngine):
    window = engine.stack.config.model.window
    body = {"prompt": "a" * (window + 4), "max_tokens": 1}
    with served(engine) as address, httpx.Client(base_url=address, headers=BEARER) as http:
        whole = http.post("/v1/completions", json=body)
        usage = whole.json()["usage"]
        assert (usage["prompt_tokens"], usage["truncated_prompt_tokens"]) == (window + 4, 5)
        streamed = http.post("/v1/completions", json={**body, "stream": True})
        headers = [answer.headers["x-truncated-prompt-tokens"] for answer in (whole, streamed)]
        assert headers == ["5", "5"]
        short = http.post("/v1/completions", json={**body, "prompt": "a"})
        assert "x-truncated-prompt-tokens" not in short.headers
        assert "truncated_prompt_tokens" not in short.json()["usage"]


def test_the_request_log_tells_times_and_tokens_but_no_texts(engine: SmallEngine, tmp_path: Path):
    settings = replace(SETTINGS, request_log=tmp_path / "requests.jsonl")
    with served(engine, settings) as address:
        with httpx.Client(base_url=address, headers=BEARER) as http:
            body = {"prompt": "a secret", "max_tokens": 5, "n": 2, "mode": "ar", "temperature": 0}
            http.post("/v1/completions", json=body, headers={"x-request-id": "one"})
        httpx.post(f"{address}/v1/completions", json=body)  # without a key
    text = (tmp_path / "requests.jsonl").read_text()
    first, second = map(json.loads, text.splitlines())
    assert (first["id"], first["path"], first["status"]) == ("one", "/v1/completions", 200)
    assert (first["mode"], first["answers"], first["finish_reasons"]) == ("ar", 2, ["length"] * 2)
    assert (first["prompt_tokens"], first["completion_tokens"], first["traversals"]) == (8, 10, 10)
    assert 0 < first["first_token_seconds"] <= first["seconds"]
    assert 0 <= first["queue_seconds"] < first["seconds"]
    assert first["queue_length"] == 0
    assert (second["status"], "mode" in second) == (401, False)
    assert "secret" not in text and KEY not in text
    with pytest.raises(ConfigError, match="use another file"):
        create_app(engine, model_of(engine), replace(SETTINGS, request_log=tmp_path))


def test_throughput_is_told_while_there_is_work():
    """Nothing is told while nothing happens."""
    now = 100.0
    reports = ServerMetrics(AdmissionQueue(2, 2, 1.0), clock=lambda: now)
    assert reports.throughput() == ""
    reports.wrote(30)
    reports.answered([AnswerCost(prompt_tokens=50, traversals=9, drafted=20, accepted=15)])
    now = 110.0
    assert reports.throughput() == (
        "3.0 tokens/s written, 5.0 tokens/s of prompts read, 1 answers ended in 10 s,"
        " 75% of drafts accepted; 0 in progress, 0 waiting"
    )
    assert reports.throughput() == ""


def test_pages_of_other_sites_need_a_named_origin(engine: SmallEngine):
    origin = {"origin": "https://page.example"}
    preflight = {
        **origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
    }
    for settings_, allowed in (
        (SETTINGS, None),
        (replace(SETTINGS, origins=("https://page.example",)), "https://page.example"),
    ):
        with served(engine, settings_) as address:
            url = f"{address}/v1/completions"
            answer = httpx.options(url, headers=preflight)
            assert answer.headers.get(ALLOW) == allowed
            assert answer.is_success == bool(allowed)
            answer = httpx.get(f"{address}/health", headers=origin)
            assert answer.headers.get(ALLOW) == allowed


ALLOW = "access-control-allow-origin"


def test_the_page_needs_nothing_from_elsewhere(engine: SmallEngine):
    with served(engine) as address, httpx.Client(base_url=address) as http:
        page, script = http.get("/"), http.get("/chat.js")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert 'src="chat.js"' in page.text
    assert "v1/chat/completions" in script.text
    assert not any("://" in text for text in (page.text, script.text))


# Any body at all; `make fuzz` tries more

BODIES = int(os.environ.get("BLOCKTRAIN_FUZZ_CASES", "50"))

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)  # fmt: skip
SENSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.text(max_size=5) | st.lists(st.integers(0, 255), max_size=4),
    "messages": st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant", "tool"]),
                               "content": st.text(max_size=5) | JSON}), max_size=3,
    ),
    "model": st.just("small"),
    "max_tokens": st.integers(0, 6),
    "max_completion_tokens": st.integers(0, 6),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(0, 256),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "n": st.integers(1, 3),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=2), max_size=5),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "logprobs": st.booleans() | st.integers(0, 5),
    "top_logprobs": st.integers(0, 20),
    "mode": st.sampled_from(["ar", "sweep", "speculative"]),
    "passes": st.integers(0, 3),
    "drafts": st.sampled_from(["head", "ngram"]),
    "logit_bias": st.just({}),
    "tools": st.just([]),
}  # fmt: skip


CHAT_ALONE = {"messages", "max_completion_tokens", "top_logprobs", "tools"}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Mostly sensible, with something else in one field or two."""
    is_chat = draw(st.booleans())
    names = sorted(SENSIBLE.keys() - ({"prompt"} if is_chat else CHAT_ALONE))
    fields = draw(st.sets(st.sampled_from(names), max_size=6))
    fields.add("messages" if is_chat else "prompt")
    body = {name: draw(SENSIBLE[name]) for name in sorted(fields)}
    odd = draw(st.dictionaries(st.sampled_from(sorted(SENSIBLE)) | st.text(), JSON, max_size=2))
    return "/v1/chat/completions" if is_chat else "/v1/completions", {**body, **odd}


def test_no_body_breaks_the_server(engine: SmallEngine):
    few = replace(SETTINGS, limits=RequestLimits(prompt_tokens=64, output_tokens=4))
    seen = set()

    with served(engine, few) as address, httpx.Client(base_url=address, headers=BEARER) as http:

        @settings(
            max_examples=BODIES,
            deadline=None,
            suppress_health_check=[*HealthCheck],
        )
        @given(requests())
        def ask(asked: tuple[str, dict[str, Any]]) -> None:
            path, body = asked
            answer = http.post(path, content=json.dumps(body))
            seen.add(answer.status_code)
            assert answer.status_code in (200, 400, 404), answer.text
            if answer.status_code != 200:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            elif body.get("stream"):
                assert answer.text.endswith("data: [DONE]\n\n")
            else:
                assert answer.json()["choices"]

        ask()
        wait_for(lambda: engine.under_way == 0)
    assert seen >= {200, 400}
