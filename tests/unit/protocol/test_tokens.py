import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from blocktrain.errors import RefusedError
from blocktrain.protocol import identity
from blocktrain.protocol.identity import (
    TokenClaims,
    check,
    hash_secret,
    identifier_of,
    issue,
    new_identifier,
    new_secret,
)
from blocktrain.protocol.messages import Base64, Identifier

SECRET = b"the run's own secret"
TOKEN = issue(SECRET, "worker01", "train", now=1000.7, seconds=60)


def refused(secret: bytes, token: str, now: float) -> str:
    with pytest.raises(RefusedError) as caught:
        check(secret, token, now)
    assert caught.value.code == "unauthorized"
    return caught.value.reason


def test_a_token_contains_its_claims():
    assert check(SECRET, TOKEN, 1001) == TokenClaims("worker01", "train", 1060)


def test_a_token_expires():
    assert check(SECRET, TOKEN, 1059.9)
    assert "expired" in refused(SECRET, TOKEN, 1060)


def test_a_token_of_another_run_is_refused():
    assert "this run" in refused(b"another secret", TOKEN, 1001)


@given(data=st.data())
@settings(deadline=None, max_examples=100)
def test_any_changed_character_is_refused(data: st.DataObject):
    place = data.draw(st.integers(0, len(TOKEN) - 1))
    wrong = data.draw(st.characters(exclude_characters=TOKEN[place], exclude_categories=["Cs"]))
    refused(SECRET, TOKEN[:place] + wrong + TOKEN[place + 1 :], 1001)


def test_claims_need_their_own_mac():
    claims, code = TOKEN.split(".")
    longer = issue(SECRET, "worker01", "train", now=1000, seconds=6000).split(".")[0]
    refused(SECRET, f"{longer}.{code}", 1001)
    refused(SECRET, f"{claims}.", 1001)
    refused(SECRET, f"{claims}.{code[:-2]}", 1001)


@pytest.mark.parametrize(
    "token", ["", ".", "..", "a.b.c", "Bearer", "é.é", "a" * 10000, "\x00.\x00"]
)
def test_text_that_is_not_a_token_is_refused(token: str):
    refused(SECRET, token, 1001)


@given(worker=st.text(max_size=64), role=st.text(max_size=20), now=st.floats(0, 1e10))
@settings(deadline=None, max_examples=50)
def test_any_claims_come_back(worker: str, role: str, now: float):
    found = check(SECRET, issue(SECRET, worker, role, now, 60), now)
    assert found == TokenClaims(worker, role, int(now) + 60)


def test_the_mac_covers_the_claims_with_a_domain():
    """Pinned: coordinators of one run may be of different releases."""
    claims, code = (identity.base64url_decode(part) for part in TOKEN.split("."))
    assert claims == b'["worker01","train",1060]'
    inner = hashlib.sha256(
        bytes(b ^ 0x36 for b in SECRET.ljust(64, b"\0")) + b"blocktrain/1/bearer\n" + claims
    ).digest()
    outer = hashlib.sha256(bytes(b ^ 0x5C for b in SECRET.ljust(64, b"\0")) + inner)
    assert code == outer.digest()


def test_secrets_and_identifiers_fit_the_messages():
    for _ in range(20):
        TypeAdapter(Identifier).validate_python(new_identifier())
        TypeAdapter(Base64).validate_python(new_secret())
    assert len({new_secret() for _ in range(20)}) == 20
    assert len({new_identifier() for _ in range(20)}) == 20


def test_secrets_have_at_least_128_bits():
    assert len(identity.base64url_decode(new_secret())) * 8 >= 128


def test_a_stored_secret_is_its_hash():
    assert hash_secret("abc") == hashlib.sha256(b"abc").hexdigest()


def test_identifiers_of_later_times_come_later():
    found = [identifier_of(now) for now in (1.0, 1.7e9, 1.7e9 + 0.001, 4e9)]
    assert found == sorted(found)
    for identifier in found:
        TypeAdapter(Identifier).validate_python(identifier)
    assert len({identifier_of(1.7e9) for _ in range(20)}) == 20
