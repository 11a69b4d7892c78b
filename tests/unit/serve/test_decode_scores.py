"""Log-probabilities of a prompt's tokens are the model's own, whatever the prompt's length."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.serving import WINDOW, generated, ring, small_stack, spell_byte, taken, text_of

from blocktrain.config import load_config
from blocktrain.config.presets import config_path
from blocktrain.config.settings import Vocabulary
from blocktrain.model.stack import Stack, read_out
from blocktrain.numerics.sampling import Sampling, log_softmax
from blocktrain.serve.ring.activations import Row
from blocktrain.serve.router import decode
from blocktrain.serve.router.decode import (
    AnswerCost,
    Decoding,
    GenerationRequest,
    TraversalCost,
    new_decoding,
)

BOS = 256
SAMPLED = Sampling(1.0, seed=5)


def expected(stack: Stack, text: bytes) -> list[float]:
    """Each byte's log-probability without a cache. A window that is full but for one position
    begins anew with its newer half."""
    begin, result = 0, []
    for at, byte in enumerate(text):
        if at - begin >= WINDOW - 1:
            begin = at - WINDOW // 2
        ids = torch.tensor([[BOS, *text[begin:at]]])
        log_probs = read_out("product", [block[0, -1] for block in stack.log_probs(ids)])
        result.append(float(log_probs[byte]))
    return result


@pytest.mark.parametrize("kind", ["denoise", "cascade", "end_to_end"])
@pytest.mark.parametrize("mode", ["ar", "speculative", "sweep"])
def test_a_prompt_is_scored_in_chunks_and_then_continued(
    kind: str, mode: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(decode, "SCORED_AT_ONCE", 5)
    stack = small_stack(kind)
    prompts = [b"", b"a", b"a prompt", b"one that is longer than two windows of the model"]
    requests = [GenerationRequest(text, 6, mode, 0, sampling=SAMPLED) for text in prompts]
    scored = [replace(each, echo=True, top_log_probs=2) for each in requests]
    plain = [text_of(tokens) for tokens, _ in generated(*ring(stack), requests)]
    for prompt, text, (tokens, cost) in zip(
        prompts, plain, generated(*ring(stack), scored), strict=True
    ):
        assert text_of(tokens) == prompt + text
        log_probs = [token.log_prob for token in tokens[: len(prompt)]]
        assert log_probs == pytest.approx(expected(stack, prompt), abs=1e-5)
        assert all(len(token.top or ()) == 2 for token in tokens)
        assert (cost.prompt_tokens, cost.output_tokens) == (len(prompt), 6)


def test_a_prompt_alone_can_be_scored_or_just_repeated():
    stack = small_stack("cascade")
    scored = GenerationRequest(b"some words", 0, "ar", echo=True, top_log_probs=0)
    repeated = replace(scored, top_log_probs=None)
    (tokens, cost), (same, nothing) = generated(*ring(stack), [scored, repeated])
    assert text_of(tokens) == text_of(same) == b"some words"
    assert [token.log_prob for token in tokens] == pytest.approx(
        expected(stack, b"some words"), abs=1e-5
    )
    assert {token.log_prob for token in same} == {None}
    assert (cost.traversals, nothing.traversals) == (1, 0)
    assert (cost.reason, cost.output_tokens) == ("length", 0)


def decoding_of(prompt: list[int], *, starts_with_bos: bool) -> Decoding:
    config = load_config(config_path("tiny"), ["model.window=32"])
    vocabulary = Vocabulary(
        sha256="digest", size=300, bos=7, starts_with_bos=starts_with_bos, eos=(8,), mask=299
    )
    request = GenerationRequest(prompt, 2, "ar", echo=True, top_log_probs=0)
    return new_decoding(
        request, replace(config, vocab=vocabulary), AnswerCost(), TraversalCost(), spell_byte
    )


@pytest.mark.parametrize(
    ("prompt", "starts_with_bos", "opening", "ids"),
    [
        ([50, 51], True, [], [7, 50, 51]),
        ([7, 50], True, [7], [7, 50]),  # the token that texts begin with is not added twice
        ([50, 51], False, [50], [50, 51]),
        ([], False, [], [7]),  # something has to come before the first token
    ],
)
def test_a_text_begins_as_the_tokenizer_wants_it(
    prompt: list[int], starts_with_bos: bool, opening: list[int], ids: list[int]
):
    decoding = decoding_of(prompt, starts_with_bos=starts_with_bos)
    assert [(token.id, token.log_prob) for token in decoding.opening] == [
        (token, None) for token in opening
    ]
    proposal = decoding.propose()
    assert proposal and proposal.ids.tolist() == ids


def test_an_end_token_ends_an_answer():
    decoding = decoding_of([50], starts_with_bos=False)
    proposal = decoding.propose()
    assert proposal
    logits = np.zeros((1, 300), np.float32)
    logits[0, 8] = 50.0
    row = Row(1, 0, proposal.ids, proposal.read)
    assert taken(decoding, row, log_softmax(logits)) == []
    assert (decoding.cost.reason, decoding.cost.output_tokens) == ("stop", 0)
