"""Rows that wait at a stage: each is computed after the positions before it, whole or in parts."""

import numpy as np

from blocktrain.serve.ring.activations import Activations, Row
from blocktrain.serve.ring.envelope import StepEnvelope
from blocktrain.serve.ring.waiting import WaitingRows


def row(request: int, start: int, length: int, read: int = 0) -> Row:
    return Row(request, start, np.arange(start, start + length, dtype=np.uint32), read)


def step(of: Row, carried: int | None = None) -> StepEnvelope:
    positions = np.arange(len(of.ids) if carried is None else carried, dtype=np.float32)
    readout = np.ones((of.read, 4), np.float32)
    return StepEnvelope(Activations((of,), positions[:, None], readout), "a router", ())


def queue(*rows: Row) -> WaitingRows:
    waiting = WaitingRows(5.0)
    for now, each in enumerate(rows):
        waiting.add(each, None, float(now))
    return waiting


def test_rows_wait_for_the_positions_before_them() -> None:
    waiting = queue(row(1, 8, 4), row(1, 0, 8), row(2, 3, 1))
    cached = {1: 0, 2: 0}
    ready = waiting.computable(lambda each: each.start <= cached[each.request])
    assert {request: each.row.start for request, each in ready.items()} == {1: 0}
    assert list(waiting.others(ready)) == [2]
    waiting.take(ready[1], 8)
    cached[1] = 8
    ready = waiting.computable(lambda each: each.start <= cached[each.request])
    assert ready[1].row.start == 8
    assert len(waiting) == 2


def test_a_row_is_overdue_only_while_its_context_is_missing() -> None:
    waiting = queue(row(1, 8, 4), row(2, 0, 4))
    assert waiting.overdue([1], 4.9) == []
    assert waiting.overdue([1], 5.0) == [1]
    assert [each.row.request for each in waiting.drop([1, 3])] == [1]
    assert len(waiting) == 1


def test_a_prefill_is_taken_in_parts() -> None:
    waiting = queue(row(1, 4, 10))
    everything = waiting.computable(lambda each: True)
    first = waiting.take(everything[1], 6)
    assert (first.row.start, first.row.ids.tolist()) == (4, [4, 5, 6, 7, 8, 9])
    rest = waiting.take(waiting.computable(lambda each: True)[1], 6)
    assert (rest.row.start, rest.row.ids.tolist()) == (10, [10, 11, 12, 13])
    assert not len(waiting)


def test_a_step_of_a_cascade_is_taken_in_parts_with_its_features() -> None:
    waiting, whole = WaitingRows(5.0), row(1, 0, 10, read=2)
    waiting.add(whole, step(whole), 0.0)
    ready = waiting.computable(lambda each: True)[1]
    assert ready.context == 8
    first = waiting.take(ready, 3).step
    rest = waiting.take(waiting.computable(lambda each: True)[1], 8).step
    assert first and rest
    assert (first.activations.rows[0].read, rest.activations.rows[0].read) == (0, 2)
    assert first.activations.state.flatten().tolist() == [0, 1, 2]
    assert rest.activations.state.flatten().tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert (len(first.activations.readout_RV), len(rest.activations.readout_RV)) == (0, 2)


def test_a_denoising_step_is_never_divided() -> None:
    waiting, whole = WaitingRows(5.0), row(1, 0, 10, read=2)
    waiting.add(whole, step(whole, carried=2), 0.0)
    ready = waiting.computable(lambda each: True)[1]
    assert ready.context == 0
    assert waiting.take(ready, 0).row is whole
