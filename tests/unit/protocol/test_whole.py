"""A small update in one piece: put together and taken apart, and what is no such thing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.errors import ProtocolError
from blocktrain.protocol.messages import Downloaded, Recipe, UpdateClaim, UpdateOffer
from blocktrain.protocol.whole import LARGEST_OFFER, head, split

CLAIM = UpdateClaim(
    run="run00001", worker="worker01", lease="lease001", fence=1, block=0, base_version=2,
    codec="int8", recipe=Recipe(size=3, chunks=("ab" * 32,)), loss=1.5,
)  # fmt: skip
OFFER = UpdateOffer(
    claim=CLAIM, signature="sig", downloads=(Downloaded(block=0, whole=1, differences=2, raw=3),)
)


@given(st.binary(max_size=100))
def test_what_is_put_together_is_taken_apart(data: bytes):
    offer, found = split(head(OFFER) + data)
    assert offer == OFFER
    assert bytes(found) == data


@given(st.integers(0, len(head(OFFER)) - 1))
def test_an_offer_that_was_cut_is_none(at: int):
    with pytest.raises(ProtocolError, match=r"offer|Invalid JSON"):
        split(head(OFFER)[:at])


@given(st.binary(max_size=200))
def test_anything_else_is_refused(body: bytes):
    with pytest.raises(ProtocolError):
        split(body)


def test_an_offer_has_a_largest_size():
    body = (LARGEST_OFFER + 1).to_bytes(4, "little") + b" " * (LARGEST_OFFER + 1)
    with pytest.raises(ProtocolError, match="length"):
        split(body)


def test_what_is_wrong_with_an_offer_is_said():
    text = OFFER.model_dump_json().replace('"fence":1', '"fence":0').encode()
    with pytest.raises(ProtocolError, match=r"claim\.fence"):
        split(len(text).to_bytes(4, "little") + text)
