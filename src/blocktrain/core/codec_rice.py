"""Rice coding of ascending places, in streams that numpy reads and writes without a loop.

Between two places there is a gap; a gap is `quotient << parameter | low bits`. Quotients are one
stream of bits, each as many zeros and a one; whoever holds the gaps keeps the low bits, which all
have the same width. Of 64 places drawn from 4096 each costs 7.5 bits, and 7.4 is the least that
is possible. Streams to be read may be anything: what does not fit is a `ProtocolError`.
"""

import numpy as np

from blocktrain.core.codec_numbers import Integers
from blocktrain.errors import ProtocolError

MOST_LOW_BITS = 15


def gaps_between(places: Integers) -> Integers:
    """How many are left out before each place."""
    return np.diff(places, prepend=-1) - 1


def places_after(gaps: Integers) -> Integers:
    return np.cumsum(gaps + 1) - 1


def best_parameter(gaps: Integers) -> int:
    """The count of low bits that makes the gaps smallest."""
    costs = [gaps.size * low + int((gaps >> low).sum()) for low in range(MOST_LOW_BITS + 1)]
    return costs.index(min(costs))


def most_bits(places: int, among: int) -> int:
    """The most that this many places, or fewer, cost among this many numbers."""
    # One more place costs a bit or more and shortens the gaps by one: the most places are worst.
    return min(places * (low + 1) + ((among - places) >> low) for low in range(MOST_LOW_BITS + 1))


def write_quotients(quotients: Integers) -> bytes:
    ends = places_after(quotients)
    bits = np.zeros(int(ends[-1]) + 1 if ends.size else 0, np.bool_)
    bits[ends] = True
    return np.packbits(bits).tobytes()


def read_quotients(stream: bytes, count: int) -> Integers:
    ends = np.flatnonzero(np.unpackbits(np.frombuffer(stream, np.uint8)))
    used = int(ends[-1]) + 1 if ends.size else 0
    if ends.size != count or len(stream) != -(-used // 8):
        raise ProtocolError(f"a stream of {len(stream)} bytes does not hold {count} quotients")
    return gaps_between(ends)
