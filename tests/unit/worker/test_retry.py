from collections.abc import Callable
from random import Random

import pytest
from tests.support.turned_clock import TurnedClock

from blocktrain.errors import RefusedError, UnreachableError
from blocktrain.worker.http import LONGEST_PAUSE, Retry, TransientError
from blocktrain.worker.timing import Deadline


class Longest(Random):
    """Draws the longest pause every time."""

    def uniform(self, a: float, b: float) -> float:
        return b


def failing(times: int, error: Exception) -> Callable[[], str]:
    left = [error] * times

    def attempt() -> str:
        if left:
            raise left.pop()
        return "done"

    return attempt


def test_pauses_double_up_to_the_longest():
    turned = TurnedClock()
    retry = Retry(turned.clock, Longest())
    assert retry.run(failing(8, TransientError("cut")), Deadline(turned.now + 1000)) == "done"
    assert sum(turned.slept) == pytest.approx(0.5 + 1 + 2 + 4 + 8 + 16 + 2 * LONGEST_PAUSE)


def test_pauses_are_drawn_from_nothing_to_full():
    turned = TurnedClock()
    retry = Retry(turned.clock, Random(3))
    drawn = []
    for _ in range(50):
        before = turned.now
        retry.run(failing(1, TransientError("cut")), Deadline(turned.now + 10))
        drawn.append(turned.now - before)
    assert max(drawn) <= 0.5
    assert min(drawn) < 0.1
    assert max(drawn) > 0.4


def test_every_address_is_tried_before_a_pause():
    turned = TurnedClock()
    retry = Retry(turned.clock, Longest())
    assert (
        retry.run(
            failing(5, TransientError("cut")), Deadline(turned.now + 10), attempts_per_round=3
        )
        == "done"
    )
    assert sum(turned.slept) == pytest.approx(0.5)


def test_retry_after_is_added_to_the_pause():
    turned = TurnedClock()
    retry = Retry(turned.clock, Longest())
    assert (
        retry.run(failing(1, TransientError("slow", retry_after=7)), Deadline(turned.now + 60))
        == "done"
    )
    assert sum(turned.slept) == pytest.approx(7.5)


def test_it_gives_up_at_the_deadline():
    turned = TurnedClock()
    retry = Retry(turned.clock, Longest())
    ends = turned.now + 10
    with pytest.raises(UnreachableError, match="no answer") as caught:
        retry.run(failing(99, TransientError("no answer")), Deadline(ends))
    assert type(caught.value) is UnreachableError
    assert turned.now == pytest.approx(ends)


def test_it_does_not_wait_if_retry_after_is_past_the_deadline():
    turned = TurnedClock()
    retry = Retry(turned.clock, Longest())
    with pytest.raises(UnreachableError, match="slow down"):
        retry.run(
            failing(1, TransientError("slow down", retry_after=30)), Deadline(turned.now + 10)
        )
    assert turned.slept == []


def test_a_request_that_is_no_longer_wanted_ends_within_a_pause():
    turned = TurnedClock()
    retry = Retry(turned.clock, Longest())
    began = turned.now
    deadline = Deadline(turned.now + 1000, lambda: turned.now < began + 9)
    with pytest.raises(UnreachableError):
        retry.run(failing(99, TransientError("cut")), deadline)
    assert turned.now == pytest.approx(began + 9, abs=0.3)


def test_a_refusal_is_not_retried():
    turned = TurnedClock()
    with pytest.raises(RefusedError):
        Retry(turned.clock, Longest()).run(
            failing(1, RefusedError("forbidden", "no")), Deadline(turned.now + 10)
        )
    assert turned.slept == []
