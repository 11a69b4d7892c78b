"""Bodies in OpenAI's words: what they become, and what is refused."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.config import Config
from blocktrain.config.settings import Vocabulary
from blocktrain.errors import RequestError
from blocktrain.numerics.sampling import Sampling
from blocktrain.serve.http import openai
from blocktrain.serve.http.openai import CompletionRequest, RequestLimits
from blocktrain.serve.http.served_model import ServedModel
from blocktrain.serve.router.decode import GenerationRequest

LIMITS = RequestLimits(
    prompt_tokens=100, output_tokens=50, default_tokens=20, choices=4, biases=256
)
MODEL = ServedModel("small", Config())
HELLO = [{"role": "user", "content": "Hello"}]


def completion(**fields: Any) -> CompletionRequest:
    return openai.completion(json.dumps({"prompt": "p", **fields}).encode(), MODEL, LIMITS, 7)


def chat(**fields: Any) -> CompletionRequest:
    return openai.chat(json.dumps({"messages": HELLO, **fields}).encode(), MODEL, LIMITS, 7)


def test_defaults_are_openais_with_a_new_seed():
    ask = completion()
    assert ask == CompletionRequest(
        model=None,
        generations=(GenerationRequest([*b"p"], 20, sampling=Sampling(1.0, seed=7)),),
        prompt_tokens=1, stream=False, include_usage=False,
    )  # fmt: skip
    assert completion(seed=None, stop=None, n=None, temperature=None) == ask


def test_all_fields_of_a_request():
    ask = completion(
        model="m", prompt="né", max_tokens=9, temperature=0.5, top_p=0.9, top_k=3, seed=5,
        stop=["a", "é"], stream=True, stream_options={"include_usage": True}, logprobs=2,
        mode="sweep", passes=0, drafts="ngram", user="somebody", echo=True,
        min_p=0.1, presence_penalty=0.2, frequency_penalty=-0.3, logit_bias={"5": -100, "6": 0},
    )  # fmt: skip
    sampling = Sampling(0.5, 3, 0.9, 5, 0.1, 0.2, -0.3, {5: -100.0})
    request = GenerationRequest(
        [*"né".encode()], 9, "sweep", 0, "ngram", sampling, (b"a", "é".encode()), 2, echo=True,
    )  # fmt: skip
    assert ask == CompletionRequest("m", (request,), 3, True, True)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [b"ab"]),
        (["a", "b"], [b"a", b"b"]),
        ([97, 255], [b"a\xff"]),
        ([[97], [98, 99]], [b"a", b"bc"]),
        ("", [b""]),
    ],
)
def test_a_prompt_is_text_or_bytes_one_or_several(prompt: Any, expected: list[bytes]):
    requests = completion(prompt=prompt).generations
    assert [bytes(request.prompt) for request in requests] == expected


def test_tokens_are_those_of_the_vocabulary():
    few = ServedModel("few", replace(Config(), vocab=Vocabulary("a digest", size=100)))
    for fields in ({"prompt": [99]}, {"prompt": "\xff"}, {"prompt": "", "top_k": 100}):
        assert openai.completion(json.dumps(fields).encode(), few, LIMITS, 7)
    for fields in ({"prompt": [100]}, {"prompt": [[1], [100]]}, {"prompt": "", "top_k": 101}):
        with pytest.raises(RequestError, match="100"):
            openai.completion(json.dumps(fields).encode(), few, LIMITS, 7)


def test_a_prompt_longer_than_the_window_is_truncated_or_rejected():
    window = MODEL.config.model.window
    prompts, fields = ["a" * window, "a" * (window + 9), "a"], {"max_tokens": 1}
    roomy = replace(LIMITS, prompt_tokens=10_000)
    body = json.dumps({"prompt": prompts, **fields}).encode()
    # A byte less fits, since texts begin with a token of their own.
    assert openai.completion(body, MODEL, roomy, 7).truncated_tokens == 1 + 10
    strict = replace(roomy, long_prompts="reject")
    with pytest.raises(RequestError, match="10 more than fit into the window of small") as refused:
        openai.completion(body, MODEL, strict, 7)
    assert (refused.value.field, refused.value.code) == ("prompt", "context_length_exceeded")
    fitting = json.dumps({"prompt": "a" * (window - 1), **fields}).encode()
    assert openai.completion(fitting, MODEL, strict, 7).truncated_tokens == 0
    scored = json.dumps({"prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 0}).encode()
    assert openai.completion(scored, MODEL, strict, 7).truncated_tokens == 0  # all of it is read


def test_several_choices_have_seeds_one_after_another():
    ask = completion(prompt=["a", "b"], n=2, seed=2**63 - 1)
    assert [(bytes(each.prompt), each.sampling.seed) for each in ask.generations] == [
        (b"a", 2**63 - 1), (b"a", 0), (b"b", 2**63 - 1), (b"b", 0),
    ]  # fmt: skip
    assert ask.prompt_tokens == 2


@pytest.mark.parametrize("temperature", [0, -0.0, 5e-324, 1e-5])
def test_tiny_temperatures_are_greedy(temperature: float):
    assert completion(temperature=temperature).generations[0].sampling.temperature == 0.0


def test_a_chat_is_a_plain_text_with_speakers():
    turns = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Bye")]
    prompt, stops = MODEL.conversation(turns, {})
    text = b"System: Be brief.\nUser: Hi\nAssistant: Hello\nUser: Bye\nAssistant: "
    assert (bytes(prompt), stops) == (text, (b"\nUser:",))
    ask = chat(stop="x", max_tokens=3, max_completion_tokens=4)
    assert bytes(ask.generations[0].prompt) == b"User: Hello\nAssistant: "
    assert (ask.generations[0].stop, ask.generations[0].max_tokens) == ((b"x", b"\nUser:"), 4)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert (
        chat(messages=[{"role": "user", "content": parts}]).prompt_tokens == len("User: ab\n") + 11
    )


def test_log_probabilities_in_both_dialects():
    assert not chat(logprobs=False).log_probs
    assert chat(logprobs=True).generations[0].top_log_probs == 0
    assert chat(logprobs=True, top_logprobs=20).generations[0].top_log_probs == 20
    zero = completion(logprobs=0)
    assert zero.log_probs and zero.generations[0].top_log_probs == 0


def test_an_answer_of_no_tokens_is_for_scoring_a_prompt():
    ask = completion(max_tokens=0, echo=True, logprobs=1)
    assert ask.generations[0].max_tokens == 0 and ask.generations[0].echo


def test_a_model_without_a_head_in_its_first_block_drafts_from_text_or_by_another_model():
    turns = Config().with_settings(objective__kind="turns")
    for model, wanted, mode, drafts in (
        (ServedModel("m", turns), None, None, ""),
        (ServedModel("m", turns, draft="d"), None, None, "model"),
        (ServedModel("m", turns, draft="d"), None, "sweep", "model"),
        (ServedModel("m", Config(), draft="d"), None, "sweep", ""),
        (ServedModel("m", Config(), draft="d"), "head", None, "head"),
    ):
        assert model.drafts(mode, wanted) == drafts
    with pytest.raises(RequestError, match="use ngram"):
        ServedModel("m", turns).drafts(None, "head")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": 3}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [256]}, "prompt"),
        ({"prompt": "x" * 101}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 51}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": 257}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"n": 5}, "n"),
        ({"n": 3, "prompt": ["a", "b"]}, "n"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"logprobs": 6}, "logprobs"),
        ({"mode": "fast"}, "mode"),
        ({"drafts": "oracle"}, "drafts"),
        ({"passes": -1}, "passes"),
        ({"stream_options": {}}, "stream_options"),
        ({"logit_bias": {"256": 1}}, "logit_bias"),
        ({"logit_bias": {"é": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {str(token): 1 for token in range(256)} | {"0256": 1}}, "logit_bias"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"min_p": 1.1}, "min_p"),
        ({"echo": 1}, "echo"),
        ({"drafts": "model"}, "drafts"),
        ({"best_of": 2}, "best_of"),
    ],
)
def test_what_cannot_be_is_refused_by_the_name_of_its_field(fields: dict[str, Any], param: str):
    with pytest.raises(RequestError) as refused:
        completion(**fields)
    assert refused.value.field == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "text": ""}]}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_what_a_chat_cannot_be(fields: dict[str, Any], param: str):
    with pytest.raises(RequestError) as refused:
        chat(**fields)
    assert refused.value.field == param


def test_neutral_values_of_unsupported_fields_are_accepted():
    completion(logit_bias={}, presence_penalty=0, frequency_penalty=0.0, echo=False, best_of=1)
    chat(tools=[], response_format={"type": "text"}, logit_bias=None)


def test_openais_fields_without_effect_are_accepted():
    completion(user="me")
    chat(user="me", metadata={}, store=False, service_tier="auto", parallel_tool_calls=False)


def test_an_unknown_field_is_refused_by_name():
    for asked in (completion, chat):
        with pytest.raises(
            RequestError, match="unknown field max_token; did you mean max_tokens"
        ) as no:
            asked(max_token=40)
        assert (no.value.field, no.value.code) == ("max_token", "unknown_parameter")


@given(st.binary(max_size=60))
def test_no_body_breaks_the_parser(body: bytes):
    with pytest.raises(RequestError):
        openai.completion(body, MODEL, LIMITS, 0)
