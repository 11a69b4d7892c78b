"""Where the time of traversals goes, by a clock that the test sets."""

import json
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from tests.support.models import awake_stack
from tests.support.serving import of_kind

from blocktrain.config import Config
from blocktrain.serve.ring.activations import Activations, Predictions, Row
from blocktrain.serve.ring.envelope import (
    StepEnvelope,
    read_result,
    read_step,
    result_message,
    step_message,
)
from blocktrain.serve.ring.laps import UNTIMED, Laps
from blocktrain.serve.router.first_block import generate
from blocktrain.serve.router.profile import NO_PROFILER, Profiler, Traversal


def ticking(started: float = 0.0) -> Laps:
    """A second passes between two looks at the clock."""
    seconds = count(int(started) + 1)
    return Laps(started, lambda: float(next(seconds)))


def test_laps_add_up_to_the_time_since_the_start() -> None:
    laps = ticking()
    for name in ("decode", "layers", "decode"):
        laps.lap(name)
    laps.lap("layers", block=2)
    assert laps.seconds == {"decode": 2.0, "layers": 1.0, "block 2: layers": 1.0}
    assert laps.total == 4.0


def test_laps_measured_elsewhere_are_added_with_the_time_until_they_began() -> None:
    laps, others = ticking(), ticking(started=5)
    others.lap("layers")
    laps.lap("queue")
    laps.include(others, "other requests")
    assert laps.seconds == {"queue": 1.0, "other requests": 4.0, "layers": 1.0}
    assert laps.total == 6.0


def test_nothing_is_recorded_unless_somebody_asks(config: Config) -> None:
    UNTIMED.lap("layers")
    stack = awake_stack(of_kind(config, "cascade"))
    assert len(list(generate(stack, b"ab", 3))) == 3
    assert not UNTIMED.seconds
    assert not NO_PROFILER.rows()


def test_the_network_is_what_stages_leave_of_a_round_trip() -> None:
    laps = ticking()
    laps.lap("encode and send")
    traversal = Traversal(laps)
    traversal.returned({"block 1": {"queue": 0.25, "layers": 0.25}, "block 2": {"layers": 0.125}})
    assert traversal.network == 1.0 - 0.625
    assert sum(seconds for _, _, seconds in traversal.parts()) == laps.total
    profiler = Profiler()
    profiler.finish(traversal)
    assert sum(row.share for row in profiler.rows()) == pytest.approx(1.0)
    assert "block 2" in profiler.table()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("cascade", ("embedding", "layers", "tail", "head")),
        ("denoise", ("context", "denoising")),
    ],
)
def test_every_microsecond_of_generating_is_in_the_table_and_the_trace(
    config: Config, tmp_path: Path, kind: str, expected: tuple[str, ...]
) -> None:
    stack, profiler = awake_stack(of_kind(config, kind)), Profiler()
    started = Laps()
    assert len(list(generate(stack, b"ab", 8, profiler=profiler))) == 8
    started.lap("all")
    spent = 8 * sum(row.seconds for row in profiler.rows())
    assert 0.5 * started.total < spent < started.total
    assert sum(row.share for row in profiler.rows()) == pytest.approx(1.0)
    profiler.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    timed = [event for event in events if event["ph"] == "X"]
    names = {event["name"] for event in timed}
    assert {f"block {block}: {name}" for block in range(3) for name in expected} <= names
    assert {"batching", "sampling", "decoding"} <= names
    assert sum(event["dur"] for event in timed) / 1e6 == pytest.approx(spent, rel=0.01)
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in timed)


def test_a_profile_travels_with_a_step_and_its_result(config: Config) -> None:
    row = Row(1, 0, np.array([5], np.uint32), 1)
    work = Activations([row], np.zeros((1, config.model.width), np.float32))
    asked = StepEnvelope(work, "a router", ("b:1",), profile={})
    arrived = read_step(step_message(asked, config.vocabulary), config.vocabulary)
    assert list(arrived.laps.seconds) == ["decode"]
    numbers = np.zeros(1, np.float32)
    predicted = Predictions(np.array([3]), numbers, numbers, np.zeros((1, 0)), np.zeros((1, 0)))
    answer = StepEnvelope(
        Activations([row], work.state, predictions=predicted), "a router", (),
        profile={"block 1": arrived.laps.seconds}, laps=arrived.laps,
    )  # fmt: skip
    result = read_result(result_message(answer, config.vocabulary), config.vocabulary)
    assert result.profile and list(result.profile["block 1"]) == ["decode", "encode"]


def test_a_step_that_is_not_profiled_does_not_mention_it(config: Config) -> None:
    """So that an earlier release accepts it."""
    work = Activations([Row(1, 0, np.array([5], np.uint32), 1)], np.zeros((1, 4), np.float32))
    message = step_message(StepEnvelope(work, "a router", ()), config.vocabulary)
    assert "profile" not in message.meta
    assert read_step(message, config.vocabulary).laps is UNTIMED
