import threading
import time

import pytest
from tests.support.turned_clock import TurnedClock

from blocktrain.worker.bandwidth import LARGEST_PIECE, Throttle
from blocktrain.worker.clock import Clock


def test_bytes_come_at_the_rate_after_the_burst():
    turned = TurnedClock()
    throttle = Throttle(1000.0, turned.clock, burst=0.25)
    throttle.take(250)
    assert turned.slept == []
    throttle.take(100)
    throttle.take(400)
    assert turned.slept == pytest.approx([0.1, 0.4])


def test_what_was_not_used_is_kept_for_one_burst_only():
    turned = TurnedClock()
    throttle = Throttle(1000.0, turned.clock, burst=0.25)
    throttle.take(250)
    turned.now += 100.0
    throttle.take(250)
    throttle.take(1)
    assert turned.slept == pytest.approx([0.001])


def test_a_piece_larger_than_the_burst_takes_its_time():
    turned = TurnedClock()
    throttle = Throttle(100.0, turned.clock, burst=0.25)
    throttle.take(1000)
    assert turned.slept == pytest.approx([9.75])


def test_without_a_limit_nothing_waits():
    turned = TurnedClock()
    throttle = Throttle(None, turned.clock)
    throttle.take(10**12)
    assert turned.slept == []
    assert throttle.piece == LARGEST_PIECE


def test_pieces_are_small_where_the_rate_is():
    clock = TurnedClock().clock
    assert Throttle(100.0, clock).piece == 1024
    assert Throttle(40_000.0, clock).piece == 10_000
    assert Throttle(1e9, clock).piece == LARGEST_PIECE


def test_threads_share_the_rate():
    throttle = Throttle(100_000.0, Clock(), burst=0.0)
    began = time.monotonic()

    def take() -> None:
        for _ in range(5):
            throttle.take(1000)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.19 <= time.monotonic() - began < 1.0
