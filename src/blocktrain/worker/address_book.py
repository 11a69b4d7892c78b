"""The addresses of a run's coordinators: those of the invite, and those that a coordinator names.

A coordinator that is going to move names its next address too. Workers that are connected learn it
and remember it in their folder. What a coordinator names is untrusted. It counts only in a run with
a pinned authority, against which every connection is checked. At most 16 addresses count, and none
in a private network, unless an address of the invite is in one.
"""

import ipaddress
import json
import logging
import math
import socket
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from blocktrain.errors import InviteError
from blocktrain.files import write_bytes
from blocktrain.protocol.invite import MOST_ADDRESSES, Invite
from blocktrain.worker.machine import Clock

FILE = "addresses.json"
ASK_SECONDS = 300.0  # between two questions for the addresses

log = logging.getLogger(__name__)


class AddressBook:
    """Thread-safe, since every change replaces a whole value."""

    def __init__(self, invite: Invite, clock: Clock, folder: Path | None = None) -> None:
        """`folder`: where addresses are remembered; None: they are not."""
        self._invite, self._clock = invite, clock
        self._path = folder / FILE if folder else None
        self._is_inside: bool | None = None
        self._named = self._valid(self._stored())
        self._ask_at = -math.inf
        self.current = invite.addresses[0]  # the address that answered last

    @property
    def addresses(self) -> tuple[str, ...]:
        """The invite's, then those that were named."""
        return tuple(dict.fromkeys((*self._invite.addresses, *self._named)))

    def failed(self, address: str) -> None:
        """An address did not answer: try the next one, and ask for addresses again as soon as one
        answers."""
        self._ask_at = -math.inf
        if self.current == address:  # no other thread has switched
            known = self.addresses
            position = known.index(address) + 1 if address in known else 0
            self.current = known[position % len(known)]

    def take_question(self) -> bool:
        """Whether it is time to ask for addresses. The next time is later."""
        if self._invite.fingerprint is None or self._clock.monotonic() < self._ask_at:
            return False
        self._ask_at = self._clock.monotonic() + ASK_SECONDS
        return True

    def learn(self, named: Iterable[str]) -> None:
        """Replace the addresses that were named before, unless none of the new ones counts."""
        valid = self._valid(named)
        if not valid or valid == self._named:
            return
        self._named = valid
        log.info("the coordinator's addresses are %s", ", ".join(valid))
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(self._path, json.dumps(valid).encode())

    @property
    def is_inside(self) -> bool:
        """Whether an address of the invite is in a private network."""
        if self._is_inside is None:
            self._is_inside = any(map(is_private, self._invite.addresses))
        return self._is_inside

    def _valid(self, named: Iterable[str]) -> tuple[str, ...]:
        if self._invite.fingerprint is None:
            return ()
        accepted = filter(self._accepts, dict.fromkeys(named))
        return tuple(address for _, address in zip(range(MOST_ADDRESSES), accepted, strict=False))

    def _accepts(self, address: str) -> bool:
        try:
            replace(self._invite, addresses=(address,))
        except InviteError:
            return False
        return address in self._invite.addresses or self.is_inside or not is_private(address)

    def _stored(self) -> list[str]:
        """The addresses in the file; none if it is missing or damaged."""
        try:
            stored = json.loads(self._path.read_bytes()) if self._path else []
        except (OSError, ValueError):
            return []
        is_list = isinstance(stored, list) and all(isinstance(each, str) for each in stored)
        return stored if is_list else []


def is_private(url: str, resolve: Callable[..., Any] = socket.getaddrinfo) -> bool:
    """Whether a URL may lead into a private network: one address of its host is not public. A host
    that cannot be resolved here counts as public, since a proxy may resolve it."""
    try:
        found = resolve(httpx.URL(url).host, None, type=socket.SOCK_STREAM)
        addresses = [ipaddress.ip_address(place[0].partition("%")[0]) for *_, place in found]
    except (OSError, ValueError, httpx.InvalidURL):
        return False
    plain = [getattr(each, "ipv4_mapped", None) or each for each in addresses]
    return not all(each.is_global for each in plain)
