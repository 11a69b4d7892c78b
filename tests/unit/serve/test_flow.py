"""Padding on an imagined line: how much is sent, and when it ends."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from blocktrain.errors import UnreachableError
from blocktrain.serve.ring.flow import FIRST_PADDING_BYTES, warm_up

MOST = 1 << 24


class Line:
    def __init__(self, round_trip: float, bytes_per_second: float) -> None:
        self.now, self.padded = 0.0, [0]
        self._round_trip, self._rate = round_trip, bytes_per_second

    async def pad(self, size: int) -> None:
        self.padded.append(size)
        self.now += self._round_trip + size / self._rate


def padded(line: Line, most: int = MOST) -> list[int]:
    asyncio.run(warm_up(line.pad, most, lambda: line.now))
    return line.padded[1:]


@given(round_trip=st.floats(1e-4, 0.5), megabytes=st.floats(0.1, 1000.0))
def test_padding_doubles_until_the_line_is_full_and_not_much_longer(
    round_trip: float, megabytes: float
) -> None:
    holds = round_trip * megabytes * 1e6
    sizes = padded(Line(round_trip, megabytes * 1e6))
    assert sizes == [FIRST_PADDING_BYTES << n for n in range(len(sizes))]
    assert sizes[-1] >= min(holds, MOST)
    assert sizes[-1] <= max(4 * holds, 4 * FIRST_PADDING_BYTES)


def test_no_more_is_sent_at_once_than_allowed() -> None:
    assert padded(Line(10.0, 1e12), most=4 * FIRST_PADDING_BYTES)[-1] == 4 * FIRST_PADDING_BYTES
    assert padded(Line(10.0, 1e12), most=0) == []


def test_a_line_that_breaks_is_not_its_concern() -> None:
    async def broken(size: int) -> None:
        raise UnreachableError("gone")

    asyncio.run(warm_up(broken, MOST, lambda: 0.0))
