import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktrain.errors import ConfigError, CorruptFileError
from blocktrain.protocol import identity
from blocktrain.protocol.identity import (
    WorkerKey,
    token_request_text,
    update_text,
    verify,
)
from blocktrain.protocol.messages import Recipe, UpdateClaim

DOCUMENT = Path(__file__).parents[3] / "docs" / "PROTOCOL.md"
HASH, OTHER_HASH = "ab" * 32, "cd" * 32
KEY = WorkerKey.create()
CLAIM = UpdateClaim(
    run="run00001", worker="worker01", lease="lease001", fence=3, block=1, base_version=2,
    codec="none", recipe=Recipe(size=9, chunks=(HASH, OTHER_HASH)), loss=1.5,
)  # fmt: skip
SIGNATURE = KEY.sign(update_text(CLAIM))
REQUEST: dict[str, Any] = {"run": "run00001", "worker": "worker01", "time": 1700000000}

identifiers = st.binary(min_size=4, max_size=32).map(bytes.hex)
counts = st.integers(1, 2**53)
recipes = st.builds(
    Recipe,
    size=counts,
    chunks=st.lists(st.binary(min_size=32, max_size=32).map(bytes.hex), max_size=3).map(tuple),
)
# codec has one value only, so that nothing else can be put in its place
changes = st.one_of(
    st.tuples(st.sampled_from(["run", "worker", "lease"]), identifiers),
    st.tuples(st.sampled_from(["fence", "base_version"]), counts),
    st.tuples(st.just("block"), st.integers(0, 4095)),
    st.tuples(st.just("recipe"), recipes),
    st.tuples(st.just("loss"), st.none() | st.floats(allow_nan=False, allow_infinity=False)),
).filter(lambda change: getattr(CLAIM, change[0]) != change[1])


def test_the_right_signature_is_recognized():
    assert verify(KEY.public, update_text(CLAIM), SIGNATURE)
    again = UpdateClaim.model_validate_json(CLAIM.model_dump_json())
    assert verify(KEY.public, update_text(again), SIGNATURE)


@given(change=changes)
@settings(deadline=None, max_examples=100)
def test_changing_any_field_breaks_the_signature(change: tuple[str, Any]):
    field, value = change
    assert not verify(KEY.public, update_text(CLAIM.model_copy(update={field: value})), SIGNATURE)


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(size=10, chunks=(HASH, OTHER_HASH)),
        Recipe(size=9, chunks=(OTHER_HASH, HASH)),
        Recipe(size=9, chunks=(HASH,)),
    ],
)
def test_changing_the_recipe_breaks_the_signature(recipe: Recipe):
    changed = CLAIM.model_copy(update={"recipe": recipe})
    assert not verify(KEY.public, update_text(changed), SIGNATURE)


@pytest.mark.parametrize("field", sorted(REQUEST))
def test_changing_a_token_request_breaks_the_signature(field: str):
    signature = KEY.sign(token_request_text(**REQUEST))
    assert verify(KEY.public, token_request_text(**REQUEST), signature)
    changed = {**REQUEST, field: 1700000001 if field == "time" else "another1"}
    assert not verify(KEY.public, token_request_text(**changed), signature)


def test_a_signature_for_one_purpose_is_worth_nothing_for_another():
    assert not verify(KEY.public, update_text(CLAIM), KEY.sign(token_request_text(**REQUEST)))
    assert not verify(KEY.public, token_request_text(**REQUEST), SIGNATURE)


def test_another_key_is_not_this_one():
    assert not verify(WorkerKey.create().public, update_text(CLAIM), SIGNATURE)


@given(text=st.text(max_size=100) | st.binary(max_size=70).map(identity.base64url_encode))
@settings(deadline=None, max_examples=100)
def test_malformed_keys_and_signatures_do_not_verify(text: str):
    assert not verify(text, update_text(CLAIM), SIGNATURE)
    assert not verify(KEY.public, update_text(CLAIM), text)


@pytest.mark.parametrize("length", [0, 31, 33, 63, 65, 128])
def test_wrong_lengths_do_not_verify(length: int):
    text = identity.base64url_encode(bytes(length))
    assert not verify(text, update_text(CLAIM), SIGNATURE)
    assert not verify(KEY.public, update_text(CLAIM), text)


def test_a_signature_has_one_spelling():
    assert not verify(KEY.public, update_text(CLAIM), SIGNATURE + "==")
    assert not verify(KEY.public, update_text(CLAIM), SIGNATURE + "\n")
    assert not verify(KEY.public + "=", update_text(CLAIM), SIGNATURE)


def test_the_signed_bytes_are_those_of_the_documentation():
    assert update_text(CLAIM) == (
        b"blocktrain/1/update\n"
        b'{"run":"run00001","worker":"worker01","lease":"lease001","fence":3,"block":1,'
        b'"base_version":2,"codec":"none","recipe":{"size":9,"chunks":["'
        + HASH.encode() + b'","' + OTHER_HASH.encode() + b'"]},"loss":"3ff8000000000000"}'
    )  # fmt: skip
    assert update_text(CLAIM.model_copy(update={"loss": None})).endswith(b',"loss":null}')
    assert token_request_text(**REQUEST) == (
        b"blocktrain/1/token\n"
        b'{"run":"run00001","worker":"worker01","time":1700000000}'
    )  # fmt: skip


def test_the_sign_of_zero_does_not_count():
    zeros = [update_text(CLAIM.model_copy(update={"loss": loss})) for loss in (0.0, -0.0)]
    assert zeros[0] == zeros[1]


def test_the_example_of_the_documentation_is_what_we_sign():
    """A key from the test vectors of RFC 8032, so that other implementations can compare."""
    seed = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    key = WorkerKey(Ed25519PrivateKey.from_private_bytes(seed))
    document = DOCUMENT.read_text(encoding="utf-8")
    assert f"`{key.public}`" in document
    assert key.sign(token_request_text(**REQUEST)) in document.split()


def test_a_key_file_is_made_once(tmp_path: Path):
    path = tmp_path / "deep" / "worker.pem"
    first = WorkerKey.load_or_create(path)
    assert WorkerKey.load_or_create(path).public == first.public
    assert path.read_bytes().startswith(b"-----BEGIN PRIVATE KEY-----\n")
    assert {p.name for p in path.parent.iterdir()} <= {"worker.pem", "worker.pem.lock"}
    assert verify(
        first.public, update_text(CLAIM), WorkerKey.load_or_create(path).sign(update_text(CLAIM))
    )


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permissions")
def test_a_key_file_is_for_its_owner_only(tmp_path: Path):
    path = tmp_path / "worker.pem"
    (tmp_path / "worker.pem.partial").write_text("left by a kill")
    before = os.umask(0)
    try:
        WorkerKey.load_or_create(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_processes_that_start_together_get_one_key(tmp_path: Path):
    path = tmp_path / "worker.pem"
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(WorkerKey.load_or_create(path).public))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and len(set(found)) == 1


@pytest.mark.parametrize("content", [b"", b"junk", b"-----BEGIN PRIVATE KEY-----\n"])
def test_a_damaged_key_file_is_named_and_kept(tmp_path: Path, content: bytes):
    path = tmp_path / "worker.pem"
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"worker\.pem"):
        WorkerKey.load_or_create(path)
    assert path.read_bytes() == content


def test_a_key_of_another_kind_is_refused(tmp_path: Path):
    path = tmp_path / "worker.pem"
    path.write_bytes(
        ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    with pytest.raises(CorruptFileError, match="not Ed25519"):
        WorkerKey.load_or_create(path)


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"worker\.pem"):
        WorkerKey.load_or_create(tmp_path / "file" / "worker.pem")


# Weak keys


def edwards_sum(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """The sum of two points of the curve -x^2 + y^2 = 1 + d x^2 y^2."""
    field = identity.FIELD
    d = -121665 * pow(121666, -1, field)
    (x1, y1), (x2, y2) = one, other
    product = d * x1 * x2 * y1 * y2 % field
    x = (x1 * y2 + x2 * y1) * pow(1 + product, -1, field)
    y = (y1 * y2 + x1 * x2) * pow(1 - product, -1, field)
    return x % field, y % field


def x_of(y: int) -> int:
    field = identity.FIELD
    d = -121665 * pow(121666, -1, field)
    square = (y * y - 1) * pow(d * y * y + 1, -1, field) % field
    root: int = pow(square, (field + 3) // 8, field)
    if root * root % field != square:
        root = root * pow(2, (field - 1) // 4, field) % field
    assert root * root % field == square, "no point of the curve has this y"
    return root


def test_the_weak_points_are_all_points_of_small_order():
    orders = []
    for y in identity.WEAK_POINTS:
        point = total = (x_of(y), y)
        order = 1
        while total != (0, 1):
            total, order = edwards_sum(total, point), order + 1
        orders.append(order)
    assert sorted(orders) == [1, 2, 4, 8, 8]  # with both signs of x, eight points


def test_a_key_for_which_anyone_can_sign_is_refused():
    """For the identity element, one signature is valid for every text."""
    point = (1).to_bytes(32, "little")
    forged = point + bytes(32)
    Ed25519PublicKey.from_public_bytes(point).verify(forged, b"any text")  # raises nothing
    spelled = [point, (1 + identity.FIELD).to_bytes(32, "little"), point[:-1] + b"\x80"]
    for each in spelled:
        assert not verify(identity.base64url_encode(each), b"any text",
                          identity.base64url_encode(forged))  # fmt: skip


@given(st.binary(min_size=32, max_size=32))
def test_other_keys_are_not_weak(seed: bytes):
    key = Ed25519PrivateKey.from_private_bytes(seed)
    assert not identity.is_weak(key.public_key().public_bytes_raw())
