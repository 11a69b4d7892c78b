import threading
import time

import pytest
from tests.support.turned_clock import TurnedClock

from blocktrain.worker.machine import LARGEST_PIECE, Bandwidth, Clock


def test_bytes_pass_at_the_limit_after_the_burst():
    turned = TurnedClock()
    bandwidth = Bandwidth(1000.0, turned.clock, burst=0.25)
    bandwidth.use(down=250)
    assert turned.slept == []
    bandwidth.use(down=100)
    bandwidth.use(down=400)
    assert turned.slept == pytest.approx([0.1, 0.4])


def test_unused_bandwidth_is_saved_for_one_burst_only():
    turned = TurnedClock()
    bandwidth = Bandwidth(1000.0, turned.clock, burst=0.25)
    bandwidth.use(down=250)
    turned.now += 100.0
    bandwidth.use(down=250)
    bandwidth.use(down=1)
    assert turned.slept == pytest.approx([0.001])


def test_a_piece_larger_than_the_burst_takes_its_time():
    turned = TurnedClock()
    bandwidth = Bandwidth(100.0, turned.clock, burst=0.25)
    bandwidth.use(down=1000)
    assert turned.slept == pytest.approx([9.75])


def test_without_a_limit_nothing_waits():
    turned = TurnedClock()
    bandwidth = Bandwidth(None, turned.clock)
    bandwidth.use(down=10**12)
    assert turned.slept == []
    assert bandwidth.piece == LARGEST_PIECE


def test_pieces_are_small_if_the_limit_is():
    clock = TurnedClock().clock
    assert Bandwidth(100.0, clock).piece == 1024
    assert Bandwidth(40_000.0, clock).piece == 10_000
    assert Bandwidth(1e9, clock).piece == LARGEST_PIECE


def test_threads_share_the_limit():
    bandwidth = Bandwidth(100_000.0, Clock(), burst=0.0)
    began = time.monotonic()

    def use() -> None:
        for _ in range(5):
            bandwidth.use(down=1000)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.19 <= time.monotonic() - began < 1.0
