"""A small update in one piece: put together and taken apart, and what is no such thing."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.errors import ProtocolError
from blocktrain.protocol.messages import (
    LARGEST_OFFER,
    Downloaded,
    Recipe,
    UpdateClaim,
    UpdateOffer,
    split_whole_update,
    whole_update_head,
)

CLAIM = UpdateClaim(
    run="run00001", worker="worker01", lease="lease001", fence=1, block=0, base_version=2,
    codec="int8", recipe=Recipe(size=3, chunks=("ab" * 32,)), loss=1.5,
)  # fmt: skip
OFFER = UpdateOffer(
    claim=CLAIM, signature="sig", downloads=(Downloaded(block=0, whole=1, differences=2, raw=3),)
)


@given(st.binary(max_size=100))
def test_a_joined_body_is_split_again(data: bytes):
    text, found = split_whole_update(whole_update_head(OFFER) + data)
    assert UpdateOffer.model_validate_json(text) == OFFER
    assert bytes(found) == data


@given(st.integers(0, len(whole_update_head(OFFER)) - 1))
def test_a_truncated_offer_is_refused(at: int):
    with pytest.raises(ProtocolError, match="offer"):
        split_whole_update(whole_update_head(OFFER)[:at])


@pytest.mark.parametrize("length", [0, LARGEST_OFFER + 1, 2**32 - 1])
def test_the_length_of_an_offer_is_checked(length: int):
    with pytest.raises(ProtocolError, match="length"):
        split_whole_update(length.to_bytes(4, "little") + bytes(LARGEST_OFFER + 1))


@given(st.binary(max_size=200))
def test_any_other_body_is_a_protocol_error(body: bytes):
    with suppress(ProtocolError):
        text, data = split_whole_update(body)
        assert 4 + len(text) + len(data) == len(body)
