"""Steps as messages: they arrive as they left, and nothing malformed is accepted."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.errors import ProtocolError
from blocktrain.protocol.framing import FrameDecoder, FrameKind, FrameMessage, encode
from blocktrain.serve.ring.envelope import (
    StepEnvelope,
    failure_message,
    prefill_message,
    read_failure,
    read_prefill,
    read_release,
    read_step,
    release_message,
    result_message,
    step_message,
    takes_bare_steps,
)
from blocktrain.serve.router.decode import Sampling
from blocktrain.serve.stage.batch import Activations, Refinement, Row
from blocktrain.vocabulary import BYTES, IDS

WIDTH = 8


def travelled(message: FrameMessage) -> FrameMessage:
    decoder = FrameDecoder()
    for part in encode(message):
        decoder.feed(part)
    (received,) = decoder.messages()
    return received


@st.composite
def rows(draw: st.DrawFn) -> Row:
    ids = draw(st.lists(st.integers(0, IDS - 1), min_size=1, max_size=5))
    sampling = Sampling(draw(st.floats(0, 2)), draw(st.integers(0, 256)), 0.5, 7)
    refinement = draw(st.none() | st.just(Refinement(sampling, draw(st.integers(0, 99)))))
    return Row(
        draw(st.integers(1, 2**62)),
        draw(st.integers(0, 100)),
        np.array(ids, np.uint16),
        draw(st.integers(0, len(ids))),
        refinement,
    )


def step_of(given_rows: list[Row]) -> StepEnvelope:
    draws = np.random.default_rng(len(given_rows))
    carried, read = sum(len(row.ids) for row in given_rows), sum(row.read for row in given_rows)
    work = Activations(
        tuple(given_rows),
        draws.normal(size=(carried, WIDTH)).astype(np.float32),
        draws.normal(size=(read, BYTES)).astype(np.float32),
    )
    return StepEnvelope(work, "a router", ("b:1", "c:2"), seconds=(("block 1", 0.5),))


@given(
    st.lists(rows(), min_size=1, max_size=4), st.sampled_from([FrameKind.STEP, FrameKind.RESULT])
)
def test_a_step_arrives_as_it_left(given_rows: list[Row], kind: FrameKind) -> None:
    sent = step_of(given_rows)
    message = step_message(sent) if kind is FrameKind.STEP else result_message(sent)
    received = read_step(travelled(message))
    assert (received.router, received.hops, received.seconds) == (
        sent.router,
        sent.hops,
        sent.seconds,
    )
    for got, row in zip(received.activations.rows, given_rows, strict=True):
        assert (got.request, got.start, got.read) == (row.request, row.start, row.read)
        assert got.refinement == row.refinement
        np.testing.assert_array_equal(got.ids, row.ids)
    np.testing.assert_array_equal(received.activations.readout_RV, sent.activations.readout_RV)
    if kind is FrameKind.STEP:
        np.testing.assert_array_equal(received.activations.state, sent.activations.state)


def test_a_bare_step_leaves_the_readout_out() -> None:
    sent = step_of([Row(1, 0, np.array([1, 2], np.uint16), 2)])
    whole, bare = step_message(sent), travelled(step_message(sent, bare=True))
    assert sum(array.nbytes for array in bare.arrays) == (
        sum(array.nbytes for array in whole.arrays) - sent.activations.readout_RV.nbytes
    )
    received = read_step(bare).activations
    np.testing.assert_array_equal(received.state, sent.activations.state)
    np.testing.assert_array_equal(received.readout_RV, np.zeros((2, BYTES), np.float32))


@pytest.mark.parametrize(
    ("hello", "bare"),
    [
        ({"readout": "final", "reads_bare_steps": True}, True),
        ({"readout": "final"}, False),  # release 0.1
        ({"readout": "product", "reads_bare_steps": True}, False),
        ({"readout": "final", "reads_bare_steps": "yes"}, False),
    ],
)
def test_only_stages_that_announce_it_get_bare_steps(hello: dict[str, object], bare: bool) -> None:
    assert takes_bare_steps(hello) is bare


def a_step(**changes: object) -> FrameMessage:
    message = step_message(step_of([Row(1, 0, np.array([1, 2], np.uint16), 1)]))
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
        {"rows": [{"request": 1, "start": 0, "length": 2, "read": 2}]},
        {"rows": [{"request": 2**70, "start": 0, "length": 2, "read": 1}]},
        {"wire": "int8"},
        {"wire": "pickle"},
        {"unknown": 1},
    ],
)
def test_a_step_that_does_not_add_up_is_refused(changes: dict[str, object]) -> None:
    assert read_step(a_step())
    with pytest.raises(ProtocolError):
        read_step(a_step(**changes))


def test_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ProtocolError):
        read_step(step_message(step_of([Row(1, 0, np.array([IDS], np.uint16), 1)])))


@given(st.recursive(st.none() | st.integers() | st.text(), st.lists))
def test_any_meta_is_accepted_or_refused(anything: object) -> None:
    message = a_step()
    for key in message.meta:
        changed = FrameMessage(
            FrameKind.STEP, meta={**message.meta, key: anything}, arrays=message.arrays
        )
        try:
            read_step(changed)
        except ProtocolError:
            continue


def test_the_other_messages_arrive_as_they_left() -> None:
    row = Row(3, 5, np.array([256, 7], np.uint16), 0)
    (received,) = read_prefill(travelled(prefill_message([row])))
    assert (received.request, received.start, received.ids.tolist()) == (3, 5, [256, 7])
    assert read_release(travelled(release_message([1, 2]))) == [1, 2]
    failure = travelled(failure_message([4], "unreachable", "no way", "c:2"))
    assert failure.request == 4  # an error of no request would end the connection
    assert (read_failure(failure).requests, read_failure(failure).hop) == ([4], "c:2")
