"""Credit, heartbeat and warm-up of one connection. Knows neither sockets nor messages.

Credit limits the bytes that a reader must buffer. A message costs its frame plus a constant.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress

from blocktrain.errors import BlocktrainError, ProtocolError

MESSAGE_COST = 1024  # memory per message beyond its frame
TICKS_PER_BEAT = 4
FIRST_PADDING_BYTES = 1 << 15
FULL_LINE = 2  # padding this many times slower than the fastest has saturated the link


def message_cost(frame_bytes: int) -> int:
    return frame_bytes + MESSAGE_COST


def window_for(max_frame: int) -> int:
    """Credit for two of the largest frames: one in processing, one in transit."""
    return 2 * message_cost(max_frame)


class ReceiveCredit:
    """How much the peer may still send. Credit is granted in bulk, not after every message."""

    def __init__(self, window: int) -> None:
        self._left, self._read, self._window = window, 0, window

    def arrived(self, frame_bytes: int) -> None:
        self._left -= message_cost(frame_bytes)
        if self._left < 0:
            raise ProtocolError("the peer sent more than its credit allows")

    def read(self, frame_bytes: int) -> None:
        self._read += message_cost(frame_bytes)

    def top_up(self) -> int:
        """Credit to grant now; 0 until it is a quarter of the window.

        If the reader keeps up, the writer thus has at least three quarters of the window. That is
        more than the largest frame, so no message waits forever.
        """
        if self._read < self._window // 4:
            return 0
        more, self._read = self._read, 0
        self._left += more
        return more


class SendCredit:
    """How much this side may still send. Sending also pauses while the transport's buffer is
    full."""

    def __init__(self) -> None:
        self.max_frame = 0  # until the peer's HELLO
        self.paused = False
        self._window = self._credit = 0
        self._ended = False
        self._wake = asyncio.Event()

    @property
    def is_open(self) -> bool:
        return self._window > 0

    def open(self, max_frame: int) -> None:
        self.max_frame = max_frame
        self._window = self._credit = window_for(max_frame)

    async def take(self, frame_bytes: int) -> None:
        """Wait until a frame of this size may be written, or the connection has ended. One caller
        at a time."""
        needed = message_cost(frame_bytes)
        while not self._ended and (self._credit < needed or self.paused):
            self._wake.clear()
            await self._wake.wait()
        self._credit -= needed

    def grant(self, more: int) -> None:
        self._credit += more
        if self._credit > self._window:
            raise ProtocolError("the peer granted more credit than its window")
        self._wake.set()

    def resume(self) -> None:
        self.paused = False
        self._wake.set()

    def end(self) -> None:
        self._ended = True
        self._wake.set()


class Heartbeat:
    """Pings the peer, and detects its silence.

    Silence is counted in ticks of the event loop, so time during which this process was suspended
    does not count.
    """

    def __init__(
        self,
        beat: float,
        slack: float,
        ping: Callable[[int], None],
        on_silence: Callable[[float], None],
    ) -> None:
        self._beat, self._slack = beat, slack
        self._ping, self._on_silence = ping, on_silence
        self._patience = 2 * beat + slack
        self._silence, self._ticks = 0.0, 0
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def expect(self, other_beat: float) -> None:
        """Allow more silence if the peer pings less often."""
        self._patience = 2 * max(other_beat, self._beat) + self._slack

    def reset(self) -> None:
        self._silence = 0.0

    def pong(self, ping: int) -> None:
        if ping > self._microseconds():
            raise ProtocolError("the peer sent a PONG without a PING")

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
    """Send padding of doubling size until bandwidth, not the round trip, limits it: by then the
    kernel's congestion control knows the link's speed."""
    size, shortest = FIRST_PADDING_BYTES, math.inf
    with suppress(BlocktrainError):  # users of the connection notice its end themselves
        while size <= limit:
            started = clock()
            await pad(size)
            seconds = clock() - started
            if seconds > FULL_LINE * shortest:
                return
            size, shortest = 2 * size, min(shortest, seconds)
