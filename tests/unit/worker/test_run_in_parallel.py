import math
import threading
import time

import pytest

from blocktrain.worker.machine import Deadline
from blocktrain.worker.transfer import run_in_parallel

FOREVER = Deadline(math.inf)


def test_all_items_are_worked_on_by_this_many_threads():
    done: list[int] = []
    together = threading.Barrier(3, timeout=5)

    def work(item: int, until: Deadline) -> None:
        together.wait()
        done.append(item)

    run_in_parallel(work, range(9), FOREVER, 3)
    assert sorted(done) == list(range(9))


def test_the_first_failure_stops_all_threads():
    done: list[int] = []
    ended, both = threading.Event(), threading.Barrier(2, timeout=5)

    def work(item: int, until: Deadline) -> None:
        done.append(item)
        both.wait()
        if item == 0:
            raise ValueError("first")
        while until.wanted():
            time.sleep(0.01)
        ended.set()

    with pytest.raises(ValueError, match="first"):
        run_in_parallel(work, range(100), FOREVER, 2)
    assert ended.wait(5)
    assert len(done) == 2


def test_no_items_need_no_threads():
    run_in_parallel(lambda item, until: None, [], FOREVER, 4)
