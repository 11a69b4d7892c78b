from collections.abc import Callable
from random import Random

import pytest
from tests.support.turned_clock import TurnedClock

from blocktrain.errors import RefusedError, UnreachableError
from blocktrain.worker.http import LONGEST_PAUSE, PassingError, Patience, Retry


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
    assert retry(failing(8, PassingError("cut")), Patience(turned.now + 1000)) == "done"
    assert sum(turned.slept) == pytest.approx(0.5 + 1 + 2 + 4 + 8 + 16 + 2 * LONGEST_PAUSE)


def test_pauses_are_drawn_from_nothing_to_full():
    turned = TurnedClock()
    retry = Retry(turned.clock, Random(3))
    drawn = []
    for _ in range(50):
        before = turned.now
        retry(failing(1, PassingError("cut")), Patience(turned.now + 10))
        drawn.append(turned.now - before)
    assert max(drawn) <= 0.5
    assert min(drawn) < 0.1
    assert max(drawn) > 0.4


def test_several_places_are_tried_before_a_pause():
    turned = TurnedClock()
    retry = Retry(turned.clock, Longest())
    assert retry(failing(5, PassingError("cut")), Patience(turned.now + 10), at_once=3) == "done"
    assert sum(turned.slept) == pytest.approx(0.5)


def test_it_waits_as_long_as_it_was_asked_to():
    turned = TurnedClock()
    retry = Retry(turned.clock, Longest())
    assert retry(failing(1, PassingError("slow", after=7)), Patience(turned.now + 60)) == "done"
    assert sum(turned.slept) == pytest.approx(7.5)


def test_the_deadline_holds():
    turned = TurnedClock()
    retry = Retry(turned.clock, Longest())
    ends = turned.now + 10
    with pytest.raises(UnreachableError, match="no answer") as caught:
        retry(failing(99, PassingError("no answer")), Patience(ends))
    assert type(caught.value) is UnreachableError
    assert turned.now == pytest.approx(ends)


def test_it_does_not_wait_for_what_comes_after_the_deadline():
    turned = TurnedClock()
    retry = Retry(turned.clock, Longest())
    with pytest.raises(UnreachableError, match="slow down"):
        retry(failing(1, PassingError("slow down", after=30)), Patience(turned.now + 10))
    assert turned.slept == []


def test_what_nobody_wants_any_more_is_given_up_within_a_pause():
    turned = TurnedClock()
    retry = Retry(turned.clock, Longest())
    began = turned.now
    patience = Patience(turned.now + 1000, lambda: turned.now < began + 9)
    with pytest.raises(UnreachableError):
        retry(failing(99, PassingError("cut")), patience)
    assert turned.now == pytest.approx(began + 9, abs=0.3)


def test_a_refusal_is_not_tried_again():
    turned = TurnedClock()
    with pytest.raises(RefusedError):
        Retry(turned.clock, Longest())(
            failing(1, RefusedError("forbidden", "no")), Patience(turned.now + 10)
        )
    assert turned.slept == []
