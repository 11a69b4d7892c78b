"""`blocktrain serve` of a model with a tokenizer, as OpenAI's client and lm-evaluation-harness use
it."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from openai import OpenAI
from tests.support.processes import Processes, free_port
from tests.support.reciting import (
    ASSISTANT,
    CIRCLE,
    END,
    ROOT,
    START,
    VERSE,
    reciting_config,
    reciting_stack,
    reciting_tokenizer,
    stored,
    successors,
    with_tokenizer,
)

from blocktrain.data.tokenizer import SubwordTokenizer
from blocktrain.model.stack import Stack
from blocktrain.training.evaluate import evaluate

SECONDS = 60.0  # processes that load torch on a busy machine take their time
GREEDY: dict[str, Any] = {"model": "verses", "temperature": 0}
HELLO: Any = [{"role": "developer", "content": "Recite."}, {"role": "user", "content": " Now! "}]
RENDERED = f"{START}<|system|>Recite.{END}<|user|>Now!{END}{ASSISTANT}"


@pytest.fixture(scope="module")
def tokenizer() -> SubwordTokenizer:
    return reciting_tokenizer()


@pytest.fixture(scope="module")
def stack(tokenizer: SubwordTokenizer) -> Stack:
    config = with_tokenizer(reciting_config(), tokenizer)
    return reciting_stack(config, successors(tokenizer))


@pytest.fixture(scope="module")
def address(
    stack: Stack, tokenizer: SubwordTokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    run = stored(tmp_path_factory.mktemp("served") / "verses", stack, tokenizer)
    address = f"127.0.0.1:{free_port()}"
    with Processes(tmp_path_factory.mktemp("server")) as processes:
        server = processes.serve(run, address, "--draft", run)
        processes.wait_for("it serves", lambda: "serving verses" in server.log.read_text(), SECONDS)
        yield f"http://{address}"


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{address}/v1", api_key="-", max_retries=0, timeout=SECONDS) as client:
        yield client


def log_probs(stack: Stack, tokens: list[int]) -> list[float]:
    """Of each token after those before it, and after the token that texts begin with."""
    ids = torch.tensor([[stack.config.vocabulary.bos, *tokens[:-1]]])
    (table,) = stack.log_probs(ids)
    return table[0].gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def test_a_chat_is_rendered_by_the_template_and_ends_with_the_end_token(
    client: OpenAI, tokenizer: SubwordTokenizer
) -> None:
    answer = client.chat.completions.create(**GREEDY, messages=HELLO, max_tokens=30)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == (VERSE, "stop")
    assert answer.usage is not None
    prompt = tokenizer.encode(RENDERED, marks=True)
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(tokenizer.encode(VERSE)) == 6


def test_a_template_may_refuse_messages(client: OpenAI) -> None:
    messages: Any = [{"role": "assistant", "content": "me first"}]
    with pytest.raises(openai.BadRequestError, match="refuses these messages: the user speaks"):
        client.chat.completions.create(**GREEDY, messages=messages)


def test_a_stream_never_splits_a_character_of_several_tokens(client: OpenAI) -> None:
    asked: Any = {**GREEDY, "prompt": "é", "max_tokens": 9, "stream": True}
    asked["extra_body"] = {"mode": "ar"}
    parts = [chunk.choices[0].text for chunk in client.completions.create(**asked)]
    texts = [part for part in parts if part]
    assert texts == ["日", "🎈", "é"]
    *whole, cut = client.completions.create(**{**asked, "max_tokens": 5})
    assert "".join(chunk.choices[0].text for chunk in whole) == "日"
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == ("\ufffd", "length")


@pytest.mark.parametrize("how", ["ar", "speculative head", "speculative model", "sweep head"])
@pytest.mark.parametrize(("stop", "text"), [("at o", " the cat s"), (" mat", " the cat sat on a")])
def test_stop_strings_may_lie_across_tokens(client: OpenAI, how: str, stop: str, text: str) -> None:
    mode, _, drafts = how.partition(" ")
    extra = {"mode": mode, "passes": 0, **({"drafts": drafts} if drafts else {})}
    answer = client.completions.create(
        **GREEDY, prompt=ASSISTANT, stop=[stop, "never"], extra_body=extra
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, "stop")


def test_a_draft_model_writes_the_drafts_where_there_is_one(client: OpenAI) -> None:
    answer = client.completions.create(**GREEDY, prompt="é", max_tokens=30)
    cost = answer.blocktrain  # type: ignore[attr-defined]
    assert cost["accepted"] == cost["drafted"] > 20 and cost["traversals"] < 8


def test_a_prompt_in_text_or_tokens_is_echoed_with_log_probabilities(
    client: OpenAI, stack: Stack, tokenizer: SubwordTokenizer
) -> None:
    text = "é a cat 🎈"
    prompt = tokenizer.encode(text)
    asked: Any = {**GREEDY, "echo": True, "logprobs": 2}
    for given in (text, prompt):
        answer = client.completions.create(**asked, prompt=given, max_tokens=2)
        (choice,) = answer.choices
        told = choice.logprobs
        assert told and told.tokens and told.token_logprobs and told.text_offset
        assert choice.text == text + "é" and answer.usage
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 2)
        assert told.tokens[:4] == ["bytes:\\xc3", "bytes:\\xa9", " a", " cat"]
        assert told.text_offset == [0, 0, 1, 3, 7, 8, 8, 8, 8, 9, 9]
        assert told.token_logprobs[: len(prompt)] == pytest.approx(
            log_probs(stack, prompt), abs=1e-4
        )
        assert told.top_logprobs and [len(top) for top in told.top_logprobs] == [2] * 11
    # Several at once, and nothing but the scores; a text that begins with START has none for it.
    prompts = [prompt, tokenizer.encode(f"{START} a", marks=True)]
    both = client.completions.create(**asked, prompt=prompts, max_tokens=0)
    assert [choice.text for choice in both.choices] == [text, " a"]
    first, second = (choice.logprobs for choice in both.choices)
    assert first and first.token_logprobs == pytest.approx(log_probs(stack, prompt), abs=1e-4)
    assert second and second.tokens == [START, " a"]
    assert second.token_logprobs == [None, pytest.approx(log_probs(stack, prompts[1][1:])[0])]


def test_a_prompt_longer_than_the_window_is_scored_whole(
    client: OpenAI, tokenizer: SubwordTokenizer
) -> None:
    prompt = tokenizer.encode(CIRCLE * 40)
    answer = client.completions.create(**GREEDY, prompt=prompt, echo=True, logprobs=0, max_tokens=1)
    told = answer.choices[0].logprobs
    assert told and told.token_logprobs and len(told.token_logprobs) == len(prompt) + 1
    assert min(told.token_logprobs[1:]) > math.log(0.5)  # it knows what comes next everywhere


def test_log_probabilities_of_a_chat_name_tokens_and_their_bytes(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        **GREEDY, messages=HELLO, max_tokens=2, logprobs=True, top_logprobs=1
    )
    told = answer.choices[0].logprobs
    assert told and told.content
    assert [(row.token, bytes(row.bytes or ())) for row in told.content] == [
        (" the", b" the"), (" cat", b" cat"),
    ]  # fmt: skip
    assert all(row.top_logprobs[0].logprob == row.logprob for row in told.content)


def test_what_is_not_a_token_is_refused(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="320 is not a token"):
        client.completions.create(**GREEDY, prompt=[1, 320])


def test_the_model_is_described(address: str) -> None:
    (card,) = httpx.get(f"{address}/v1/models").json()["data"]
    assert (card["id"], card["context_window"], card["vocabulary_size"]) == ("verses", 64, 320)
    assert (card["chat_template"], card["draft_model"]) == (True, "verses")


def test_text_becomes_tokens_and_text_again(address: str, tokenizer: SubwordTokenizer) -> None:
    with httpx.Client(base_url=address) as http:
        body = {"prompt": f"é{END}", "add_special_tokens": False}
        ids = http.post("/tokenize", json=body).json()
        assert ids == {"tokens": tokenizer.encode(f"é{END}", marks=True), "count": 3,
                       "max_model_len": 64}  # fmt: skip
        with_start = http.post("/tokenize", json={"prompt": "é"}).json()["tokens"]
        assert with_start == tokenizer.encode(f"{START}é", marks=True)
        assert http.post("/detokenize", json={"tokens": with_start}).json() == {"prompt": "é"}
        info = http.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"]) == (START, END) and info["chat_template"]


TASKS = {
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "next-word": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}} the cat",
        "doc_to_choice": ["on", "sat", "mat"],
        "doc_to_target": 1,
        "metric_list": [{"metric": "acc"}],
    },
    "recital": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}" + ASSISTANT,
        "doc_to_target": VERSE.removesuffix(" mat"),
        "generation_kwargs": {"until": [" mat"], "max_gen_toks": 9},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def test_lm_evaluation_harness_scores_as_we_do(
    address: str, stack: Stack, tokenizer: SubwordTokenizer, tmp_path: Path
) -> None:
    """Its own tokenizer is the server's; no network is used."""
    if not importlib.util.find_spec("lm_eval"):
        pytest.skip("lm-evaluation-harness is not installed (pip install 'lm-eval[api]')")
    text = "".join((ROOT / "LICENSE").read_text().split())  # it may strip what ends in spaces
    windows = np.array(tokenizer.encode(text)[:400]).reshape(10, 40)
    texts = [tokenizer.decode(window).decode() for window in windows]
    assert [tokenizer.encode(text) for text in texts] == windows.tolist()
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    data = {"dataset_path": "json", "test_split": "test",
            "dataset_kwargs": {"data_files": {"test": str(tmp_path / "texts.jsonl")}}}  # fmt: skip
    for name, task in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, **data, **task}))
    subprocess.run(
        [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions",
         "--model_args", f"model=verses,base_url={address}/v1/completions,max_length=64",
         "--tasks", ",".join(TASKS), "--include_path", str(tmp_path),
         "--output_path", str(tmp_path / "out.json")],
        check=True, cwd=tmp_path, timeout=200,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
                          "HF_HOME": str(tmp_path), "OPENAI_API_KEY": "-"},
    )  # fmt: skip
    (found,) = tmp_path.glob("out*.json")
    results = json.loads(found.read_text())["results"]
    nats = evaluate(stack, windows).default.ce * windows.size / len("".join(texts).encode())
    measured = results["perplexity"]
    assert measured["bits_per_byte,none"] == pytest.approx(nats / math.log(2), abs=1e-3)
    assert math.log(measured["byte_perplexity,none"]) == pytest.approx(nats, abs=1e-3)
    assert results["next-word"]["acc,none"] == 1.0
    assert results["recital"]["exact_match,none"] == 1.0
