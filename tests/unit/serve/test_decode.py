"""Every mode that loses nothing gives the text of the reference without a cache."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.serving import (
    WINDOW,
    answers,
    reference_text,
    ring,
    run_locally,
    small_stack,
    spell_byte,
    stage,
    taken,
    text_of,
)

from blocktrain.config import load_config
from blocktrain.config.presets import config_path
from blocktrain.numerics.sampling import Sampling
from blocktrain.serve.ring.activations import Row
from blocktrain.serve.ring.batch import SlotLimits, predictions
from blocktrain.serve.router.decode import (
    AnswerCost,
    Decoding,
    GenerationRequest,
    TraversalCost,
    new_decoding,
)
from blocktrain.serve.router.first_block import FirstBlock

KINDS = ("denoise", "cascade", "end_to_end")
MODES = 5  # whose text is the sequential one
BOS, MASK = 256, 257  # of a vocabulary of bytes
# Four bytes compete, so that it matters which of them the answer has already.
FEW_BYTES = Sampling(
    bias={97: 9.0, 98: 8.5, 99: 8.0, 100: 7.5}, presence_penalty=1.0, frequency_penalty=0.7
)


def decoding_of(request: GenerationRequest) -> Decoding:
    config = load_config(config_path("tiny"), ["model.window=32"])
    return new_decoding(request, config, AnswerCost(), TraversalCost(), spell_byte)


def exact(prompt: bytes, count: int, sampling: Sampling) -> list[GenerationRequest]:
    """A request in every mode whose text is the sequential one."""
    modes = [("ar", 1, "head"), ("speculative", 1, "head"), ("speculative", 1, "ngram"),
             ("sweep", 0, ""), ("sweep", 0, "head")]  # fmt: skip
    return [
        GenerationRequest(prompt, count, mode, passes, drafts, sampling)
        for mode, passes, drafts in modes
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("readout", ["product", "final"])
@settings(max_examples=4, deadline=None)
@given(
    prompt=st.binary(max_size=3 * WINDOW) | st.sampled_from([b"", b"a", b"ab" * WINDOW]),
    count=st.integers(1, 2 * WINDOW),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_exact_modes_give_the_models_text_without_a_cache(
    kind: str, readout: str, prompt: bytes, count: int, temperature: float, seed: int
):
    """Together in ragged batches; past the window; from no prompt and from one that is too long."""
    stack = small_stack(kind)
    sampling = Sampling(temperature, seed=seed)
    expected = reference_text(stack, prompt, count, sampling, readout)
    requests = exact(prompt, count, sampling)
    assert answers(stack, requests, readout) == [expected] * len(requests)


@pytest.mark.parametrize("kind", ["denoise", "cascade"])
@settings(max_examples=3, deadline=None)
@given(
    prompts=st.lists(st.binary(max_size=40), min_size=2, max_size=4),
    sampling=st.builds(
        Sampling,
        st.sampled_from([0.0, 1.0]),
        top_k=st.integers(0, 20),
        top_p=st.floats(0.1, 1.0),
        seed=st.integers(0, 99),
        min_p=st.sampled_from([0.0, 0.1]),
        presence_penalty=st.floats(-1.0, 2.0),
        frequency_penalty=st.floats(-1.0, 2.0),
        bias=st.dictionaries(st.integers(0, 255), st.floats(-9.0, 3.0), max_size=3),
    ),
)
@example(prompts=[b"aabbcd", b"d" * 9], sampling=FEW_BYTES)
def test_filtered_and_penalized_sampling_is_the_same_in_every_mode_and_company(
    kind: str, prompts: list[bytes], sampling: Sampling
):
    stack, count = small_stack(kind), 2 * WINDOW  # beyond the window, where the text is read anew
    together = [request for prompt in prompts for request in exact(prompt, count, sampling)]
    alone = [reference_text(stack, prompt, count, sampling) for prompt in prompts]
    assert answers(stack, together) == [text for text in alone for _ in range(MODES)]


@pytest.mark.parametrize("kind", ["denoise", "cascade"])
@pytest.mark.parametrize("drafts", ["", "head"])
def test_however_a_sweep_starts_it_ends_the_same(kind: str, drafts: str):
    stack = small_stack(kind)
    sampling = Sampling(1.0, seed=4)
    requests = [
        GenerationRequest(b"abc", 20, mode, 0, drafts, sampling) for mode in ("sweep", "ar")
    ]
    (swept, account), (sequential, _) = run_locally(*ring(stack), requests)
    assert swept == sequential
    assert account.traversals < 20


@pytest.mark.parametrize("kind", ["denoise", "cascade"])
@pytest.mark.parametrize("drafts", ["", "head"])
def test_a_sweep_is_as_many_traversals_as_it_is_asked_for(kind: str, drafts: str):
    stack = small_stack(kind)
    requests = [GenerationRequest(b"abc", 10, "sweep", passes, drafts) for passes in (1, 2, 4)]
    found = run_locally(*ring(stack), requests)
    assert [account.traversals for _, account in found] == [1, 2, 4]
    assert [len(data) for data, _ in found] == [10, 10, 10]
    sequential = answers(stack, [GenerationRequest(b"abc", 10, "ar")])[0]
    for passes, (data, _) in zip((1, 2, 4), found, strict=True):
        assert data[:passes] == sequential[:passes]


def test_a_sweep_keeps_drafts_that_are_likely_behind_the_first_that_is_wrong():
    """The model would say `abcde` after drafts `aXYZ`: Y is likely enough, Z is not."""
    asked = GenerationRequest(b"", 5, "sweep", passes=1, drafts="head")
    decoding = decoding_of(asked)
    step = decoding.propose()
    assert step is not None and (step.drafts, step.refine) == (4, False)
    log_probs = np.full((5, 256), np.log(1e-4), np.float32)
    log_probs[np.arange(5), list(b"abcde")] = np.log(0.5)
    log_probs[np.arange(1, 4), list(b"XYZ")] = np.log([0.3, 0.01, 0.004])
    ids = np.array([*step.ids, *b"aXYZ"], np.uint16)
    assert text_of(taken(decoding, Row(1, 0, ids, 5), log_probs)) == b"abYde"
    assert decoding.finished


def test_a_model_that_agrees_with_its_first_block_takes_all_drafts():
    """With one block, a draft is what the whole model says."""
    [(_, account)] = run_locally(
        *ring(small_stack("end_to_end")), [GenerationRequest(b"", 14, "speculative")]
    )
    assert account.accepted == account.drafted == 12
    assert (account.traversals, account.output_tokens) == (2, 14)


@pytest.mark.parametrize("kind", ["denoise", "cascade"])
def test_a_context_that_a_stage_lost_is_replayed(kind: str):
    """Room for two of three requests: every step of the third drives one out."""
    stack = small_stack(kind)
    requests = [GenerationRequest(text, 6, mode) for text, mode in
                ((b"one", "ar"), (b"twotwo", "speculative"), (b"", "ar"))]  # fmt: skip
    expected = answers(stack, requests)
    front, small = (
        FirstBlock(stage(stack, range(1))),
        stage(
            stack,
            range(1, 3),
            limits=SlotLimits(requests=2, idle_seconds=0.0),
            clock=iter(range(999)).__next__,
        ),
    )
    decodings = {
        n: new_decoding(each, stack.config, AnswerCost(), TraversalCost(), spell_byte)
        for n, each in enumerate(requests)
    }
    found = dict.fromkeys(decodings, b"")
    while going := [n for n in decodings if not decodings[n].finished]:
        for number in going:
            decoding = decodings[number]
            step = decoding.propose()
            if number not in small.requests:
                step = decoding.replay()
            assert step
            if prefills := front.prefills({number: step}):
                small.prefill(prefills)
            [part] = front.step({number: step})
            told = small.step(part).predictions
            found[number] += text_of(decoding.take(part.rows[0], told))
    assert list(found.values()) == expected
    assert decodings[0].cost.replays > 2


def certain(data: bytes) -> np.ndarray:
    """Distributions that leave no doubt about these bytes."""
    logits = torch.zeros(len(data), 256)
    logits[range(len(data)), list(data)] = 50.0
    return logits.log_softmax(dim=1).numpy()


def sent(decoding: Decoding, drafts: bytes = b"") -> Row:
    step = decoding.propose()
    assert step
    ids = np.concatenate([step.ids, np.frombuffer(drafts, np.uint8)])
    return Row(0, step.start, ids, step.read + len(drafts))


def test_steps_carry_on_where_the_answer_left_off():
    decoding = decoding_of(GenerationRequest(b"ab", 9, "speculative"))
    first = sent(decoding, b"cdX")
    assert (first.start, first.ids.tolist(), first.read) == (0, [BOS, *b"abcdX"], 4)
    assert text_of(taken(decoding, first, certain(b"cdef"))) == b"cde"
    second = sent(decoding)
    # d stands at position 4 and was right; X is written over by e.
    assert (second.start, second.ids.tolist(), second.read) == (5, [*b"e"], 1)
    assert text_of(taken(decoding, second, certain(b"f"))) == b"f"
    again = decoding.replay()
    assert again and (again.start, again.ids.tolist(), again.read) == (0, [BOS, *b"abcdef"], 1)


def test_a_sweep_starts_from_masks_and_goes_on_from_guesses():
    decoding = decoding_of(GenerationRequest(b"ab", 4, "sweep", passes=0))
    step = decoding.propose()
    assert step and step.refine
    assert step.ids.tolist() == [BOS, *b"ab", MASK, MASK, MASK]
    assert text_of(taken(decoding, sent(decoding), certain(b"wxyz"))) == b"w"
    step = decoding.propose()
    assert step and not step.refine
    assert (step.start, step.ids.tolist(), step.read) == (3, [*b"wxy"], 3)
    assert text_of(taken(decoding, sent(decoding), certain(b"xyz"))) == b"xyz"
    assert decoding.finished and decoding.propose() is None


def test_a_stop_string_ends_the_answer_wherever_its_bytes_came_from():
    stack = small_stack("denoise")
    whole = answers(stack, [GenerationRequest(b"stop", 30, "ar")])[0]
    stop = whole[11:14]
    end = whole.find(stop)
    stops = (stop, b"\0\0\0\0")
    requests = [replace(request, stop=stops) for request in exact(b"stop", 30, Sampling())]
    for data, account in run_locally(*ring(stack), requests):
        assert data == whole[:end]
        assert (account.reason, account.output_tokens) == ("stop", end)


def test_log_probabilities_come_with_the_bytes():
    decoding = decoding_of(GenerationRequest(b"", 2, "ar", top_log_probs=3))
    row, log_probs = sent(decoding), torch.randn(1, 256).log_softmax(dim=1)
    [token] = decoding.take(row, predictions(log_probs, [row], 3))
    best = int(log_probs.argmax())
    assert (token.id, token.data) == (best, bytes([best]))
    assert token.log_prob == float(log_probs.max())
    assert list(token.top or ()) == log_probs[0].argsort(descending=True)[:3].tolist()
