"""Drafts of another model change how many traversals an answer takes, and nothing else."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.models import awake_stack
from tests.support.reciting import reciting_tokenizer
from tests.support.serving import generated, of_kind, ring, stage, text_of

from blocktrain.config import load_config
from blocktrain.data.tokenizer import ByteTokenizer
from blocktrain.errors import ConfigError
from blocktrain.model.stack import Stack
from blocktrain.numerics.sampling import Sampling
from blocktrain.serve.router.decode import GenerationRequest
from blocktrain.serve.router.first_block import DraftModel, check_same_tokens

ROOT = Path(__file__).resolve().parents[3]
KINDS = ("denoise", "cascade", "end_to_end", "turns")


@lru_cache
def model(kind: str, window: int = 16) -> Stack:
    tiny = ["model.width=16", "model.heads=2", f"model.window={window}"]
    return awake_stack(of_kind(load_config(ROOT / "configs" / "tiny.toml", tiny), kind))


def draft_of(stack: Stack, readout: str = "product") -> DraftModel:
    return DraftModel(stage(stack, range(len(stack.blocks)), readout))


def readout_of(kind: str) -> str:
    return "final" if kind == "turns" else "product"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft_kind", ["cascade", "turns"])
@pytest.mark.parametrize("window", [8, 24])
@settings(max_examples=3, deadline=None)
@given(
    prompts=st.lists(st.binary(max_size=40), min_size=1, max_size=3),
    count=st.integers(1, 40),
    temperature=st.sampled_from([0.0, 0.8]),
)
def test_answers_are_those_without_drafts(
    kind: str, draft_kind: str, window: int, prompts: list[bytes], count: int, temperature: float
):
    """Several at once, past the windows of both models."""
    stack, draft = model(kind), draft_of(model(draft_kind, window), readout_of(draft_kind))
    sampling = Sampling(temperature, seed=3)
    plain = [GenerationRequest(text, count, "ar", sampling=sampling) for text in prompts]
    expected = [text_of(tokens) for tokens, _ in generated(*ring(stack, readout_of(kind)), plain)]
    for mode in ("speculative", "sweep"):
        requests = [replace(each, mode=mode, passes=0, drafts="model") for each in plain]
        answers = generated(*ring(stack, readout_of(kind)), requests, draft=draft)
        assert [text_of(tokens) for tokens, _ in answers] == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["cascade", "turns"])
def test_a_model_accepts_all_drafts_of_itself(kind: str, temperature: float):
    stack, sampling = model(kind), Sampling(temperature, seed=2)
    request = GenerationRequest(b"ab", 12, drafts="model", sampling=sampling)
    draft = draft_of(stack, readout_of(kind))
    [(_, cost)] = generated(*ring(stack, readout_of(kind)), [request], draft=draft)
    assert cost.accepted == cost.drafted > 8
    assert cost.traversals < 4


@pytest.mark.parametrize("mode", ["speculative", "sweep"])
def test_a_model_without_a_head_in_its_first_block_drafts_from_repetitions(mode: str):
    stack = model("turns", 64)
    for sampling in (Sampling(), Sampling(0.01, seed=4)):
        plain = GenerationRequest(b"abcabcabcabc", 30, "ar", sampling=sampling)
        drafted = replace(plain, mode=mode, passes=0)
        (expected, _), (tokens, cost) = generated(*ring(stack, "final"), [plain, drafted])
        assert text_of(tokens) == text_of(expected)
        if mode == "speculative":
            assert cost.drafted > 0


def test_a_draft_model_with_other_tokens_is_refused_by_name():
    tokenizer = reciting_tokenizer()
    check_same_tokens(tokenizer, reciting_tokenizer(template=None), "runs/small")
    check_same_tokens(ByteTokenizer(), ByteTokenizer(), "runs/small")
    with pytest.raises(ConfigError, match=r"runs/small has another tokenizer \(bytes\) than the"
                       r" model \(320 tokens, [0-9a-f]{12}\)"):  # fmt: skip
        check_same_tokens(tokenizer, ByteTokenizer(), "runs/small")
