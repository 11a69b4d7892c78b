"""A small update in one piece: what it claims to be, and its only chunk.

    4 bytes    length of the offer, little endian
    offer      an `UpdateOffer` as JSON
    data       the chunk

One request instead of three: for an update this small the round trips would take longer than the
bytes.
"""

from blocktrain.errors import ProtocolError
from blocktrain.protocol.messages import UpdateOffer

WHOLE_BYTES = 1024 * 1024  # the largest update that may travel so
# Without a codec a worker gets its next lease once the one before is known to be offered: larger
# ones are offered first, so that a slow line does not keep it from training.
WHOLE_WEIGHTS_BYTES = 64 * 1024
LARGEST_OFFER = 64 * 1024
PREFIX_BYTES = 4
LARGEST_BODY = PREFIX_BYTES + LARGEST_OFFER + WHOLE_BYTES


def head(offer: UpdateOffer) -> bytes:
    """What goes before the data."""
    text = offer.model_dump_json().encode()
    return len(text).to_bytes(PREFIX_BYTES, "little") + text


def split(body: bytes) -> tuple[bytes, memoryview]:
    """The offer's JSON, and the data."""
    length = int.from_bytes(body[:PREFIX_BYTES], "little")
    start = PREFIX_BYTES + length
    if not 0 < length <= LARGEST_OFFER or start > len(body):
        raise ProtocolError("the body does not begin with an offer and its length")
    return body[PREFIX_BYTES:start], memoryview(body)[start:]
