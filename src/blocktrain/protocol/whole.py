"""A small update in one piece: what it claims to be, and its only chunk.

    4 bytes    length of the offer, little endian
    offer      an `UpdateOffer` as JSON
    data       the chunk

One request instead of three: for an update this small the round trips would take longer than the
bytes.
"""

from pydantic import ValidationError

from blocktrain.errors import ProtocolError
from blocktrain.protocol.messages import UpdateOffer

WHOLE_BYTES = 1024 * 1024  # the largest update that may travel so
LARGEST_OFFER = 64 * 1024
PREFIX_BYTES = 4
LARGEST_BODY = PREFIX_BYTES + LARGEST_OFFER + WHOLE_BYTES


def head(offer: UpdateOffer) -> bytes:
    """What goes before the data."""
    text = offer.model_dump_json().encode()
    return len(text).to_bytes(PREFIX_BYTES, "little") + text


def split(body: bytes) -> tuple[UpdateOffer, memoryview]:
    length = int.from_bytes(body[:PREFIX_BYTES], "little")
    start = PREFIX_BYTES + length
    if not 0 < length <= LARGEST_OFFER or start > len(body):
        raise ProtocolError("the body does not begin with an offer and its length")
    try:
        offer = UpdateOffer.model_validate_json(body[PREFIX_BYTES:start])
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the offer"
        raise ProtocolError(f"{place}: {first['msg']}") from None
    return offer, memoryview(body)[start:]
