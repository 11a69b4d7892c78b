"""The emulated lines are what they say: delay, rate, loss; and nothing is left behind."""

import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.tcp_link import TcpLink
from tests.support.wan import HostLine, Wan, why_not
from tests.support.wan_router import Line

ROOT = Path(__file__).resolve().parents[3]
ENDS = (sys.executable, str(ROOT / "tests/support/echo.py"))
MEGABYTE = 1_000_000
NEEDS_NAMESPACES = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def line(loss: float = 0.0, queue_seconds: float = math.inf) -> Line:
    return Line(0.01, 1000.0, loss, queue_seconds, random.Random(0))


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(40, 1500)), min_size=1, max_size=50))
def test_a_line_keeps_the_order_and_never_exceeds_its_rate(
    packets: list[tuple[float, int]],
) -> None:
    carried, now, last = line(), 0.0, 0.0
    for pause, size in packets:
        now += pause
        at = carried.arrival(size, now)
        assert at is not None
        assert at >= now + 0.01 + size / 1000.0 - 1e-9
        assert at >= last + size / 1000.0 - 1e-9
        last = at


def test_a_full_queue_drops_what_comes_last() -> None:
    carried = line(queue_seconds=0.15)
    assert [carried.arrival(100, 0.0) is not None for _ in range(3)] == [True, True, False]
    assert carried.traffic.overflowed == 1
    assert carried.arrival(100, 0.1) is not None  # there is room again


def test_a_line_loses_about_as_much_as_it_should_and_the_same_each_time() -> None:
    first, second = line(loss=0.02), line(loss=0.02)
    fates = [[c.arrival(1, float(n)) is None for n in range(20_000)] for c in (first, second)]
    assert fates[0] == fates[1]
    assert 0.017 < sum(fates[0]) / 20_000 < 0.023


Popen = Callable[[str, list[str]], Any]
Through = Callable[[int], AbstractContextManager[int]]


def on(wan: Wan) -> Popen:
    return lambda host, command: wan.popen(host, command, stdout=subprocess.PIPE, text=True)


def here(host: str, command: list[str]) -> Any:
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def measured(popen: Popen, server: str, size: int, through: Through = nullcontext) -> Any:
    """What host b sees of host a."""
    serving = popen("a", [*ENDS, "serve", server])
    with through(int(serving.stdout.readline())) as port:
        asking = popen("b", [*ENDS, "ask", server, str(port), str(size)])
        told = json.loads(asking.communicate(timeout=60)[0])
        serving.communicate(timeout=10)
    return told


def fastest(measure: Callable[[], Any]) -> Any:
    """A busy machine makes a line slower, never faster: the first of three that is fast enough."""
    for _ in range(3):
        seen = measure()
        if seen["mbit"] >= 80:
            break
    return seen


@NEEDS_NAMESPACES
@pytest.mark.parametrize("round_trip", [20.0, 50.0])
def test_a_wan_has_its_round_trip_and_its_rate(round_trip: float) -> None:
    with Wan(["a", "b"], round_trip, mbit=100) as wan:
        seen = fastest(lambda: measured(on(wan), wan.address("a"), 30 * MEGABYTE))
        sent, received = wan.traffic("b").up, wan.traffic("a").down
    assert statistics.median(seen["trips_ms"]) == pytest.approx(round_trip, rel=0.1)
    assert 80 <= seen["mbit"] <= 100
    assert sent.bytes >= received.bytes > 30 * MEGABYTE


@NEEDS_NAMESPACES
def test_a_wan_loses_packets_and_tcp_brings_them_again() -> None:
    with Wan(["a", "b"], 10, mbit=100, loss=0.01, congestion="bbr", seed=1) as wan:
        measured(on(wan), wan.address("a"), 10 * MEGABYTE)
        up, down = wan.traffic("b").up, wan.traffic("a").down
    assert 0.005 < (up.lost + down.lost) / up.packets < 0.015


@NEEDS_NAMESPACES
def test_a_host_may_have_a_line_of_its_own() -> None:
    slow = {"a": HostLine(one_way_ms=40, mbit=5)}
    with Wan(["a", "b", "c"], 20, mbit=100, lines=slow) as wan:
        far = measured(on(wan), wan.address("a"), MEGABYTE)
    assert statistics.median(far["trips_ms"]) == pytest.approx(90, rel=0.1)
    assert far["mbit"] <= 5


@NEEDS_NAMESPACES
def test_nothing_is_left_behind_even_when_whoever_made_it_is_killed() -> None:
    program = (
        "import subprocess, time\n"
        "from tests.support.wan import Wan\n"
        "with Wan(['a'], 10, 100) as wan:\n"
        "    ends = wan.popen('a', ['sleep', '600'])\n"
        "    while open(f'/proc/{ends.pid}/comm').read().strip() != 'sleep':\n"
        "        time.sleep(0.01)  # on its way into the host it is in none\n"
        "    print(ends.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    before = namespaces()
    maker = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert maker.stdout
    sleeper = int(maker.stdout.readline())
    assert namespaces() - before
    maker.kill()
    maker.communicate()
    for _ in range(100):
        if not Path(f"/proc/{sleeper}").exists() and not namespaces() - before:
            return
        time.sleep(0.05)
    raise AssertionError("the sleeper or its namespace is still there")


def namespaces() -> set[int]:
    """Network namespaces that some process is in."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.add(os.stat(process / "ns/net").st_ino)
        except OSError:
            continue  # it has just ended
    return found


def test_a_tcp_link_has_its_round_trip_and_its_rate() -> None:
    links = []

    @contextmanager
    def through(port: int) -> Iterator[int]:
        with TcpLink(port, round_trip_ms=40, mbit=100) as link:
            links.append(link)
            yield link.port

    size = 10 * MEGABYTE
    seen = fastest(lambda: measured(here, "127.0.0.1", size, through))
    assert statistics.median(seen["trips_ms"]) == pytest.approx(40, rel=0.1)
    assert 80 <= seen["mbit"] <= 100
    assert links[0].up.bytes == size + 8 + len(seen["trips_ms"])
    assert links[0].down.bytes == 1 + len(seen["trips_ms"])
