"""Steps as messages: they arrive as they left, and nothing malformed is accepted."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.config import BYTE_VOCABULARY as VOCABULARY
from blocktrain.config import Vocabulary
from blocktrain.errors import ProtocolError
from blocktrain.numerics.sampling import Sampling
from blocktrain.protocol.framing import FrameDecoder, FrameKind, FrameMessage, encode
from blocktrain.serve.ring.activations import (
    Activations,
    Choice,
    Predictions,
    Row,
    split_rows,
)
from blocktrain.serve.ring.batch import predictions
from blocktrain.serve.ring.envelope import (
    StepEnvelope,
    failure_message,
    prefill_message,
    read_failure,
    read_prefill,
    read_release,
    read_result,
    read_step,
    release_message,
    result_message,
    step_message,
)

WIDTH = 8
LARGE = replace(VOCABULARY, size=70_000, bos=70_000, mask=70_001, sha256="large")


def travelled(message: FrameMessage) -> FrameMessage:
    decoder = FrameDecoder()
    for part in encode(message):
        decoder.feed(part)
    (received,) = decoder.messages()
    return received


@st.composite
def rows(draw: st.DrawFn) -> Row:
    ids = draw(st.lists(st.integers(0, VOCABULARY.ids - 1), min_size=1, max_size=5))
    sampling = Sampling(
        draw(st.floats(0, 2)), draw(st.integers(0, 256)), 0.5, 7, draw(st.floats(0, 1)),
        draw(st.floats(-2, 2)), draw(st.floats(-2, 2)),
        draw(st.dictionaries(st.integers(0, 300_000), st.floats(-100, 100), max_size=3)),
    )  # fmt: skip
    choice = Choice(
        sampling, draw(st.integers(0, 99)), draw(st.integers(0, 5)), draw(st.booleans()),
        draw(st.integers(0, 99)),
    )  # fmt: skip
    return Row(
        draw(st.integers(1, 2**62)),
        draw(st.integers(0, 100)),
        np.array(ids),
        draw(st.integers(0, len(ids))),
        draw(st.just(Choice()) | st.just(choice)),
        draw(st.integers(0, 2**62)),
    )


def step_of(given_rows: list[Row], tokens: int = 0) -> StepEnvelope:
    """With a readout over so many tokens."""
    draws = np.random.default_rng(len(given_rows))
    carried, read = sum(len(row.ids) for row in given_rows), sum(row.read for row in given_rows)
    work = Activations(
        tuple(given_rows),
        draws.normal(size=(carried, WIDTH)).astype(np.float32),
        draws.normal(size=(read, tokens)).astype(np.float32),
    )
    return StepEnvelope(work, "a router", ("b:1", "c:2"), seconds={"block 1": 0.5})


@given(
    st.lists(rows(), min_size=1, max_size=4),
    st.sampled_from([0, VOCABULARY.size]),
    st.sampled_from([VOCABULARY, LARGE]),
)
def test_a_step_arrives_as_it_left(
    given_rows: list[Row], tokens: int, vocabulary: Vocabulary
) -> None:
    sent = step_of(given_rows, tokens)
    received = read_step(travelled(step_message(sent, vocabulary)), vocabulary)
    assert (received.router, received.hops, received.seconds) == (
        sent.router,
        sent.hops,
        sent.seconds,
    )
    for got, row in zip(received.activations.rows, given_rows, strict=True):
        assert (got.request, got.start, got.read) == (row.request, row.start, row.read)
        assert got.choice == row.choice
        np.testing.assert_array_equal(got.ids, row.ids)
    np.testing.assert_array_equal(received.activations.state, sent.activations.state)
    if sent.activations.readout_RV.size:
        readout_RV = received.activations.readout_RV
        np.testing.assert_array_equal(readout_RV, sent.activations.readout_RV)


@pytest.mark.parametrize(
    ("sampling", "hops"),
    [
        (Sampling(), ("192.0.2.3:7101",)),
        (Sampling(0.7, top_p=0.95, seed=2**62 + 12345), ("192.0.2.3:7101", "198.51.100.4:7101")),
    ],
)
def test_a_step_of_one_position_has_few_bytes_beside_its_features(
    sampling: Sampling, hops: tuple[str, ...]
) -> None:
    width = 768
    row = Row(7, 512, np.array([1]), 1, Choice(sampling, position=513))
    work = Activations([row], np.ones((1, width), np.float32))
    step = StepEnvelope(work, "k3-_9Zqa", hops, "bf16", {"block 1": 0.012345})
    sent = sum(len(part) for part in encode(step_message(step, LARGE)))
    assert sent <= 1.1 * 2 * width


def test_ids_beyond_16_bits_travel() -> None:
    row = Row(1, 0, np.array([LARGE.ids - 1, 3]), 1)
    (received,) = read_prefill(travelled(prefill_message([row], LARGE)), LARGE)
    assert received.ids.tolist() == [LARGE.ids - 1, 3]


def a_result(given_rows: list[Row], top: int) -> StepEnvelope:
    """Of predictions over a large vocabulary."""
    draws = torch.Generator().manual_seed(0)
    positions = sum(row.read for row in given_rows)
    log_probs = torch.randn(positions, LARGE.size, generator=draws).log_softmax(dim=1)
    told = predictions(log_probs, given_rows, top)
    work = Activations(tuple(given_rows), predictions=told)
    return StepEnvelope(work, "a router", (), seconds={"block 1": 0.5})


@pytest.mark.parametrize("top", [0, 3])
def test_a_result_arrives_as_it_left_and_is_small(top: int) -> None:
    given_rows = [Row(7, 0, np.array([1, 2, 3]), 2), Row(8, 0, np.array([4]), 0),
                  Row(9, 5, np.array([6]), 1)]  # fmt: skip
    sent = a_result(given_rows, top)
    message = result_message(sent, LARGE)
    assert sum(array.nbytes for array in message.arrays) == 3 * (12 + 8 * top)
    received = read_result(travelled(message), LARGE)
    assert received.seconds == sent.seconds
    for part in split_rows(sent.activations, [0, 0, 0]):
        got = received.predictions[part.rows[0].request]
        for field in fields(Predictions):
            ours, theirs = getattr(part.predictions, field.name), getattr(got, field.name)
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    "changes",
    [
        {"requests": [7]},
        {"read": [2, 0, 2]},
        {"read": [4, -2, 1]},
        {"seconds": {"block 1": "long"}},
    ],
)
def test_a_result_that_does_not_add_up_is_refused(changes: dict[str, object]) -> None:
    rows = [Row(number, 0, np.array([1, 2]), read) for number, read in ((7, 2), (8, 0), (9, 1))]
    message = result_message(a_result(rows, 1), LARGE)
    for meta, arrays in (
        ({**message.meta, **changes}, message.arrays),
        (message.meta, message.arrays[:4]),
        (message.meta, (message.arrays[0] + LARGE.size, *message.arrays[1:])),
        (message.meta, (message.arrays[0], message.arrays[1] * np.inf, *message.arrays[2:])),
    ):
        with pytest.raises(ProtocolError):
            read_result(FrameMessage(message.kind, meta=meta, arrays=arrays), LARGE)


def a_step(**changes: object) -> FrameMessage:
    message = step_message(step_of([Row(1, 0, np.array([1, 2]), 1)]), VOCABULARY)
    return FrameMessage(message.kind, meta={**message.meta, **changes}, arrays=message.arrays)


@pytest.mark.parametrize(
    "changes",
    [
        {"router": 5},
        {"hops": ["x"] * 100},
        {"rows": []},
        {"rows": [{"request": 1, "start": -1, "length": 2, "read": 1}]},
        {"rows": [{"request": 1, "start": 0, "length": 3, "read": 1}]},
        {"rows": [{"request": 1, "start": 0, "length": 2, "read": 3}]},
        {"rows": [{"request": 1, "start": 0, "length": 2, "read": 1, "top": 1000}]},
        {"rows": [{"request": 1, "start": 0, "length": 2, "read": 1, "seed": -1}]},
        {"rows": [{"request": 2**70, "start": 0, "length": 2, "read": 1}]},
        {"wire": "int8"},
        {"wire": "pickle"},
        {"unknown": 1},
    ],
)
def test_a_step_that_does_not_add_up_is_refused(changes: dict[str, object]) -> None:
    assert read_step(a_step(), VOCABULARY)
    with pytest.raises(ProtocolError):
        read_step(a_step(**changes), VOCABULARY)


def test_ids_outside_the_vocabulary_are_refused() -> None:
    step = step_of([Row(1, 0, np.array([VOCABULARY.ids]), 1)])
    with pytest.raises(ProtocolError):
        read_step(step_message(step, VOCABULARY), VOCABULARY)


@given(st.recursive(st.none() | st.integers() | st.text(), st.lists))
def test_any_meta_is_accepted_or_refused(anything: object) -> None:
    message = a_step()
    for key in message.meta:
        changed = FrameMessage(
            FrameKind.STEP, meta={**message.meta, key: anything}, arrays=message.arrays
        )
        try:
            read_step(changed, VOCABULARY)
        except ProtocolError:
            continue


def test_the_other_messages_arrive_as_they_left() -> None:
    row = Row(3, 5, np.array([256, 7]), 0)
    (received,) = read_prefill(travelled(prefill_message([row], VOCABULARY)), VOCABULARY)
    assert (received.request, received.start, received.ids.tolist()) == (3, 5, [256, 7])
    assert read_release(travelled(release_message({1: 0, 2: 9}))) == {1: 0, 2: 9}
    with pytest.raises(ProtocolError, match="of every request"):
        read_release(FrameMessage(FrameKind.RELEASE, meta={"requests": [1, 2], "keep": [3]}))
    failure = travelled(failure_message([4], "unreachable", "no way", "c:2"))
    assert failure.kind is FrameKind.FAILURE  # an ERROR would end the connection
    assert (read_failure(failure).requests, read_failure(failure).hop) == ([4], "c:2")
