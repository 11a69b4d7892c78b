import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktrain.errors import ConfigError, InviteError
from blocktrain.protocol import identity
from blocktrain.protocol.invite import MISTYPED, NEWER, Invite

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
DOCUMENT = Path(__file__).parents[3] / "docs" / "PROTOCOL.md"
FINGERPRINT = "5a" * 32
INVITE = Invite(
    ("https://coordinator.example:8470",), "s3cret-s3cret_s3cret", FINGERPRINT, "run00001"
)

hosts = st.one_of(
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(lambda address: f"[{address}]"),
    st.text("abcXYZ019-_.", min_size=1, max_size=60),
)
places = st.builds("{}:{}".format, hosts, st.integers(1, 65535))
https = places.map("https://{}".format)
secrets = st.text(ALPHABET, min_size=1, max_size=128)
runs = st.text("09az", min_size=8, max_size=64)
fingerprints = st.binary(min_size=32, max_size=32).map(bytes.hex)
invites = st.one_of(
    st.builds(
        Invite, st.lists(https, min_size=1, max_size=4).map(tuple), secrets, fingerprints, runs
    ),
    st.builds(
        Invite,
        st.lists(https | places.map("http://{}".format), min_size=1, max_size=4).map(tuple),
        secrets,
        st.none(),
        runs,
    ),
)


def written(prefix: str, payload: bytes) -> str:
    """An invite with a right checksum, whatever is in it."""
    checksum = zlib.crc32(prefix.encode() + payload).to_bytes(4, "little")
    return prefix + identity.base64url_encode(payload + checksum)


def refusal(text: str) -> str:
    with pytest.raises(InviteError) as caught:
        Invite.decode(text)
    return str(caught.value)


@given(invite=invites)
@settings(deadline=None, max_examples=100)
def test_an_invite_comes_back_as_it_was(invite: Invite):
    assert Invite.decode(invite.encode()) == invite


@given(invite=invites, data=st.data())
@settings(deadline=None, max_examples=100)
def test_any_changed_character_is_refused(invite: Invite, data: st.DataObject):
    text = invite.encode()
    place = data.draw(st.integers(0, len(text) - 1))
    wrong = data.draw(st.characters(exclude_characters=text[place], exclude_categories=["Cs"]))
    with pytest.raises(InviteError):
        Invite.decode(text[:place] + wrong + text[place + 1 :])


def test_every_typo_in_an_invite_is_reported_as_a_typo():
    text = INVITE.encode()
    for place, right in enumerate(text):
        for wrong in ALPHABET:
            if wrong != right:
                assert refusal(text[:place] + wrong + text[place + 1 :]) == MISTYPED


def test_a_cut_off_invite_is_reported_as_incomplete():
    text = INVITE.encode()
    for end in range(len(text)):
        assert refusal(text[:end]) == MISTYPED
    assert refusal(text + text) == MISTYPED
    assert refusal(text + "A") == MISTYPED


@given(data=st.data())
@settings(deadline=None, max_examples=50)
def test_spaces_and_line_breaks_do_not_count(data: st.DataObject):
    text = INVITE.encode()
    place = data.draw(st.integers(0, len(text)))
    gap = data.draw(st.text(" \t\r\n", min_size=1, max_size=6))
    assert Invite.decode(f"\n {text[:place]}{gap}{text[place:]}  \r\n") == INVITE


def test_the_bytes_are_those_of_the_documentation():
    """The example of docs/PROTOCOL.md."""
    invite = Invite(
        ("https://[::1]:8470", "https://a.example:443"), "c2VjcmV0", FINGERPRINT, "run00001"
    )
    payload = (
        b"\x01" + b"\x5a" * 32 + b"\x08run00001" + b"\x08c2VjcmV0" + b"\x02"
        b"\x01\x0a[::1]:8470" + b"\x01\x0da.example:443"
    )  # fmt: skip
    assert invite.encode() == written("bt1_", payload)
    assert invite.encode() in DOCUMENT.read_text(encoding="utf-8").split()


def test_an_invite_is_short():
    assert len(INVITE.encode()) < 140


@pytest.mark.parametrize(
    "text",
    [
        written("bt2_", b"who knows"),
        written("bt17_", b""),
        written("bt1_", b"\x02"),
        written("bt1_", b"\x00\x08run00001\x01s\x01\x02\x03a:1"),
    ],
    ids=["version 2", "version 17", "an unknown flag", "an unknown scheme"],
)
def test_an_invite_of_a_newer_version_has_its_own_error(text: str):
    assert refusal(text) == NEWER


def test_a_typo_in_an_invite_of_a_newer_version_is_still_a_typo():
    assert refusal(written("bt2_", b"who knows").replace("d", "e", 1)) == MISTYPED


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x00",
        b"\x01short",
        b"\x00\x08run00001\x01s\x01\x00\x03a:1more",
        b"\x00\x08run00001\x01\xff\x01\x00\x03a:1",
        b"\x00\x08run00001\x01s\x00",
        b"\x00\x08run00001\x01s\x01\x00\x01a",
        b"\x00\x02no\x01s\x01\x00\x03a:1",
    ],
)
def test_a_payload_that_makes_no_sense_is_refused(payload: bytes):
    assert refusal(written("bt1_", payload)) not in (MISTYPED, NEWER)


@pytest.mark.parametrize(
    "text", ["", " ", "bt1_", "hello", "https://host:1", "bt0_AAAA", "bt1_é", "\x00"]
)
def test_other_text_is_refused(text: str):
    assert refusal(text) == MISTYPED


@pytest.mark.parametrize(
    "address",
    [
        "host:1", "https://host", "https://host:", "https://host:0", "https://host:65536",
        "https://host:08", "https://host:1/", "https://host:1/path", "https://u@host:1",
        "ftp://host:1", "https://:1", "https://::1:8470", "https://[::g]:1", "https://[1.2.3.4]:1",
        "https://höst:1", "https://host :1", "HTTPS://host:1", "https://[fe80::1%eth0]:1",
        "https://" + "a" * 255 + ":1",
    ],
)  # fmt: skip
def test_addresses_are_checked(address: str):
    with pytest.raises(InviteError, match="is not an address"):
        Invite((address,), "secret", None, "run00001")


@pytest.mark.parametrize(
    ("addresses", "secret", "fingerprint", "run"),
    [
        ((), "secret", None, "run00001"),
        (("http://a:1",) * 17, "secret", None, "run00001"),
        (("http://a:1",), "secret", FINGERPRINT, "run00001"),
        (("http://a:1",), "", None, "run00001"),
        (("http://a:1",), "not base64!", None, "run00001"),
        (("http://a:1",), "s" * 129, None, "run00001"),
        (("https://a:1",), "secret", "5A" * 32, "run00001"),
        (("https://a:1",), "secret", "5a" * 31, "run00001"),
        (("http://a:1",), "secret", None, "run"),
        (("http://a:1",), "secret", None, "run00001\n"),
    ],
)
def test_the_fields_of_an_invite_are_checked(
    addresses: tuple[str, ...], secret: str, fingerprint: str | None, run: str
):
    with pytest.raises(ConfigError):
        Invite(addresses, secret, fingerprint, run)


def test_the_secret_stays_out_of_logs():
    assert INVITE.secret not in repr(INVITE)
