"""Credit, heartbeat and warm-up of one connection. Knows no sockets and no messages.

Credit bounds what a reader must hold in memory, in bytes: a message costs its frame and a constant.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress

from blocktrain.errors import BlocktrainError, ProtocolError

MESSAGE_COST = 1024  # what a small message takes in memory, beyond its frame
TICKS_PER_BEAT = 4
SMOOTHING = 1 / 8  # of round trips, as in TCP
FIRST_PADDING_BYTES = 1 << 15
FULL_LINE = 2  # padding that takes this many shortest times filled the line


def message_cost(frame_bytes: int) -> int:
    return frame_bytes + MESSAGE_COST


def window_for(max_frame: int) -> int:
    """Credit for two of the largest frames: one is processed while the next one travels."""
    return 2 * message_cost(max_frame)


class ReceiveCredit:
    """What the other side may still send. It gets more in bulk, not after every message."""

    def __init__(self, window: int) -> None:
        self._left, self._read, self._window = window, 0, window

    def arrived(self, frame_bytes: int) -> None:
        self._left -= message_cost(frame_bytes)
        if self._left < 0:
            raise ProtocolError("the other side sent more than its credit allows")

    def read(self, frame_bytes: int) -> None:
        self._read += message_cost(frame_bytes)

    def top_up(self) -> int:
        """Credit to grant now; 0 until it is a quarter of the window.

        So a writer whose reader keeps up has at least three quarters of the window, which is more
        than the largest frame: no message waits forever.
        """
        if self._read < self._window // 4:
            return 0
        more, self._read = self._read, 0
        self._left += more
        return more


class SendCredit:
    """What this side may still send; also holds back while the transport's buffer is full."""

    def __init__(self) -> None:
        self.max_frame = 0  # until the other side's HELLO
        self.paused = False
        self._window = self._credit = 0
        self._ended = False
        self._wake: asyncio.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        return self._window > 0

    def open(self, max_frame: int) -> None:
        self.max_frame = max_frame
        self._window = self._credit = window_for(max_frame)

    async def take(self, frame_bytes: int) -> None:
        """Wait until a frame of this size may be written, or the connection has ended. For one
        caller at a time."""
        needed = message_cost(frame_bytes)
        while not self._ended and (self._credit < needed or self.paused):
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        self._credit -= needed

    def grant(self, more: int) -> None:
        self._credit += more
        if self._credit > self._window:
            raise ProtocolError("the other side granted more credit than the window has")
        self._wake_up()

    def resume(self) -> None:
        self.paused = False
        self._wake_up()

    def end(self) -> None:
        self._ended = True
        self._wake_up()

    def _wake_up(self) -> None:
        if self._wake and not self._wake.done():
            self._wake.set_result(None)


class Heartbeat:
    """Pings the other side, measures the round trip, and notices silence.

    Silence is counted in ticks of the event loop, not read from a clock: time in which this process
    itself stood still does not count.
    """

    def __init__(
        self,
        beat: float,
        slack: float,
        ping: Callable[[int], None],
        on_silence: Callable[[float], None],
    ) -> None:
        self.round_trip: float | None = None
        self._beat, self._slack = beat, slack
        self._ping, self._on_silence = ping, on_silence
        self._patience = 2 * beat + slack
        self._silence, self._ticks = 0.0, 0
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def expect(self, other_beat: float) -> None:
        """Be patient with a side that pings less often."""
        self._patience = 2 * max(other_beat, self._beat) + self._slack

    def heard(self) -> None:
        self._silence = 0.0

    def pong(self, ping: int) -> None:
        seconds = (self._microseconds() - ping) / 1e6
        if seconds < 0:
            raise ProtocolError("a PONG without a PING")
        before = seconds if self.round_trip is None else self.round_trip
        self.round_trip = before + SMOOTHING * (seconds - before)

    def start(self) -> None:
        seconds = self._beat / TICKS_PER_BEAT
        self._timer = self._loop.call_later(seconds, self.start)
        if self._silence > self._patience:
            self._on_silence(self._silence)
            return
        if self._ticks % TICKS_PER_BEAT == 0:
            self._ping(self._microseconds())
        self._silence += seconds
        self._ticks += 1

    def stop(self) -> None:
        if self._timer:
            self._timer.cancel()

    def _microseconds(self) -> int:
        return int(self._loop.time() * 1e6)


async def warm_up(
    pad: Callable[[int], Awaitable[None]], limit: int, clock: Callable[[], float]
) -> None:
    """Send padding, twice as much each time, until its size and not the round trip makes it slow:
    the kernel's congestion control has then learnt the line's speed."""
    size, shortest = FIRST_PADDING_BYTES, math.inf
    with suppress(BlocktrainError):  # users of the connection learn of its end by themselves
        while size <= limit:
            started = clock()
            await pad(size)
            seconds = clock() - started
            if seconds > FULL_LINE * shortest:
                return
            size, shortest = 2 * size, min(shortest, seconds)
