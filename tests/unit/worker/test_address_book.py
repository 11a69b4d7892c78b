"""Which addresses of coordinators a worker uses and remembers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from blocktrain.errors import InviteError
from blocktrain.protocol.invite import MOST_ADDRESSES, Invite
from blocktrain.worker.address_book import ASK_SECONDS, FILE, AddressBook
from blocktrain.worker.machine import Clock

OUTSIDE = "https://192.88.99.1:7070"  # public addresses; nothing connects to them here
NEXT = "https://192.88.99.2:7071"
INVITE = Invite((OUTSIDE,), "secret", "ab" * 32, "run00000")


def book(folder: Path | None = None, invite: Invite = INVITE) -> AddressBook:
    return AddressBook(invite, Clock(), folder)


def test_what_a_coordinator_names_is_remembered_and_replaced(tmp_path: Path):
    first = book(tmp_path)
    first.learn([NEXT, OUTSIDE])
    assert first.addresses == (OUTSIDE, NEXT)
    again = book(tmp_path)
    assert again.addresses == (OUTSIDE, NEXT)
    third = "https://[2a00:1450::1]:7070"
    again.learn([third])
    assert book(tmp_path).addresses == (OUTSIDE, third)
    again.learn([])
    assert book(tmp_path).addresses == (OUTSIDE, third)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '["nonsense"]', "\x00"])
def test_a_damaged_file_is_ignored(tmp_path: Path, content: str):
    (tmp_path / FILE).write_text(content)
    assert book(tmp_path).addresses == (OUTSIDE,)


@pytest.mark.parametrize(
    "named",
    [
        "http://192.88.99.2:7070",  # not encrypted
        "https://127.0.0.1:7070",  # of this machine
        "https://192.168.1.1:443",  # of its network
        "https://[::1]:7070",
        "https://192.88.99.2",
        "https://192.88.99.2:7070/path",
        "https://user@192.88.99.2:7070",
        f"https://{'a' * 300}:7070",
        "ftp://192.88.99.2:7070",
        "",
    ],
)
def test_other_addresses_are_not_used(tmp_path: Path, named: str):
    known = book(tmp_path)
    known.learn([named])
    assert known.addresses == (OUTSIDE,)
    (tmp_path / FILE).write_text(json.dumps([named]))
    assert book(tmp_path).addresses == (OUTSIDE,)


def test_few_addresses_are_used():
    known = book()
    known.learn(f"https://192.88.99.2:{port}" for port in range(7000, 8000))
    assert len(known.addresses) == 1 + MOST_ADDRESSES


def test_without_a_pinned_authority_none_is_used():
    known = book(invite=replace(INVITE, fingerprint=None))
    assert not known.take_question()
    known.learn([NEXT])
    assert known.addresses == (OUTSIDE,)


def test_a_run_in_a_private_network_may_move_within_it():
    known = book(invite=INVITE.at(["192.168.1.5"]))
    known.learn(["https://192.168.1.6:7070"])
    assert known.addresses == ("https://192.168.1.5:7070", "https://192.168.1.6:7070")


def test_addresses_are_tried_in_turn_and_asked_for_after_a_failure():
    now = [0.0]
    known = AddressBook(INVITE, Clock(monotonic=lambda: now[0]))
    assert known.take_question()
    assert not known.take_question()
    known.learn([NEXT])
    assert known.current == OUTSIDE
    known.failed(OUTSIDE)
    assert known.current == NEXT
    known.failed(OUTSIDE)  # another thread, which has used the old one
    assert known.current == NEXT
    assert known.take_question()
    known.failed(NEXT)
    assert known.current == OUTSIDE
    now[0] = ASK_SECONDS
    assert known.take_question()
    now[0] += ASK_SECONDS - 1
    assert not known.take_question()


def test_an_invite_can_be_used_at_other_addresses():
    moved = INVITE.at(["new.example.org", "new.example.org:8000", "https://10.0.0.1:9000/"])
    assert moved.addresses == (
        "https://new.example.org:7070", "https://new.example.org:8000", "https://10.0.0.1:9000",
    )  # fmt: skip
    assert (moved.secret, moved.fingerprint) == (INVITE.secret, INVITE.fingerprint)
    with pytest.raises(InviteError, match="not encrypted"):
        INVITE.at(["http://new.example.org:7070"])
    with pytest.raises(InviteError, match="is not an address"):
        INVITE.at(["no such place"])
    plain = replace(INVITE, addresses=("http://a:1",), fingerprint=None)
    assert plain.at(["b"]).addresses == ("http://b:7070",)
