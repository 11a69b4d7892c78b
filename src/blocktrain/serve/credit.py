"""How much one side of a connection may send before the other has read it, counted in bytes.

One currency for all messages, because what must be bounded is the reader's memory: a message costs
its frame and something for being a message. Knows no sockets and no clock.
"""

from blocktrain.errors import ProtocolError

MESSAGE_COST = 1024  # what a small message takes in memory, beyond its frame


def cost(frame_bytes: int) -> int:
    return frame_bytes + MESSAGE_COST


def window_for(largest_frame: int) -> int:
    """Two of the largest frames: one is worked on while the next one travels."""
    return 2 * cost(largest_frame)


class Grant:
    """What a reader has allowed the other side. Topped up in bulk: not a word per message."""

    def __init__(self, window: int) -> None:
        self._left, self._read, self._window = window, 0, window

    def arrived(self, frame_bytes: int) -> None:
        self._left -= cost(frame_bytes)
        if self._left < 0:
            raise ProtocolError("the other side sent more than it was allowed to")

    def read(self, frame_bytes: int) -> None:
        self._read += cost(frame_bytes)

    def top_up(self) -> int:
        """What to allow the other side now: nothing, until it is a quarter of the window.

        So at least three quarters of the window are free to a writer whose reader keeps up, more
        than the largest frame needs: no message waits for ever.
        """
        if self._read < self._window // 4:
            return 0
        more, self._read = self._read, 0
        self._left += more
        return more
