"""An invite: one line of text with everything a machine needs to join a run.

    bt1_ + base64url(payload + checksum)

It contains the coordinators' addresses, the join secret, the fingerprint of the run's certificate
authority and the run's name; docs/PROTOCOL.md describes the bytes. The checksum is at the same
place in every version, so that a typo and an invite of a newer version raise different errors. The
coordinator decides whether the secret is still valid.
"""

import io
import ipaddress
import re
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from blocktrain.errors import ConfigError, InviteError
from blocktrain.protocol import identity
from blocktrain.protocol.addresses import (
    DEFAULT_PORT,
    as_url,
    join_host_port,
    split_host_port,
    split_url,
)

VERSION = 1
MOST_ADDRESSES = 16
CHECKSUM_BYTES = 4
MISTYPED = "this invite is incomplete or mistyped; copy all of it again"
NEWER = "a newer version of blocktrain made this invite; update blocktrain and try again"

_SCHEMES = ("http", "https")  # an address's first byte is its index here
_HAS_FINGERPRINT = 1

_FORMAT = re.compile(r"bt([1-9][0-9]{0,3})_([A-Za-z0-9_-]+)")
_HOST = re.compile(r"[A-Za-z0-9._-]+")
_SECRET = re.compile(r"[A-Za-z0-9_-]{1,128}")
_RUN = re.compile(r"[0-9a-z]{8,64}")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Invite:
    """`addresses` are http(s)://host:port. Plain http is allowed only without a fingerprint."""

    addresses: tuple[str, ...]
    secret: str = field(repr=False)
    fingerprint: str | None
    run: str

    def __post_init__(self) -> None:
        if not 1 <= len(self.addresses) <= MOST_ADDRESSES:
            raise InviteError(f"an invite needs 1 to {MOST_ADDRESSES} addresses")
        for address in self.addresses:
            scheme, _ = _parts(address)
            if scheme == "http" and self.fingerprint is not None:
                raise InviteError(f"{address} is not encrypted, but the run uses TLS; use https")
        if not _SECRET.fullmatch(self.secret):
            raise InviteError("an invite's secret must be 1 to 128 characters of A-Z a-z 0-9 - _")
        if not _RUN.fullmatch(self.run):
            raise InviteError("a run's name must be 8 to 64 characters of 0-9 a-z")
        if self.fingerprint is not None and not _FINGERPRINT.fullmatch(self.fingerprint):
            raise InviteError("a fingerprint must be 64 hex digits")

    def at(self, places: Sequence[str]) -> "Invite":
        """The same invite for a coordinator at other addresses: HOST, HOST:PORT or URLs."""
        scheme, *_ = split_url(self.addresses[0])
        urls = (as_url(place.rstrip("/"), scheme, DEFAULT_PORT) for place in places)
        return replace(self, addresses=tuple(urls))

    def encode(self) -> str:
        prefix = f"bt{VERSION}_"
        payload = self._payload()
        return prefix + identity.base64url_encode(payload + _checksum(prefix, payload))

    @classmethod
    def decode(cls, text: str) -> "Invite":
        """Decode an invite as people paste it: whitespace in it is ignored."""
        match = _FORMAT.fullmatch("".join(text.split()))
        if not match:
            raise InviteError(MISTYPED)
        version, body = match.groups()
        payload = _checked(f"bt{version}_", body)
        if int(version) != VERSION:
            raise InviteError(NEWER)
        return _parsed(payload)

    def _payload(self) -> bytes:
        fingerprint = self.fingerprint
        parts = [struct.pack("B", 0 if fingerprint is None else _HAS_FINGERPRINT)]
        if fingerprint is not None:
            parts.append(bytes.fromhex(fingerprint))
        parts += [_short(self.run), _short(self.secret), struct.pack("B", len(self.addresses))]
        for address in self.addresses:
            scheme, place = _parts(address)
            parts += [struct.pack("B", _SCHEMES.index(scheme)), _short(place)]
        return b"".join(parts)


def _parsed(payload: bytes) -> Invite:
    """Parse an invite whose checksum is correct, so that a fault in it is not a typo."""
    rest = io.BytesIO(payload)

    def take(size: int) -> bytes:
        data = rest.read(size)
        if len(data) < size:
            raise InviteError("this invite is malformed: it ends too early; ask for a new one")
        return data

    def byte(below: int) -> int:
        value = take(1)[0]
        if value >= below:
            raise InviteError(NEWER)
        return value

    def text() -> str:
        return take(byte(256)).decode("ascii")

    try:
        fingerprint = take(32).hex() if byte(2 * _HAS_FINGERPRINT) else None
        run, secret = text(), text()
        count = byte(256)
        addresses = tuple(f"{_SCHEMES[byte(len(_SCHEMES))]}://{text()}" for _ in range(count))
    except UnicodeDecodeError:
        raise InviteError(
            "this invite is malformed: it contains non-ASCII text; ask for a new one"
        ) from None
    if rest.read():
        raise InviteError(
            "this invite is malformed: it has extra bytes at its end; ask for a new one"
        )
    return Invite(addresses, secret, fingerprint, run)


def _parts(address: str) -> tuple[str, str]:
    """Scheme and host:port of an address; an IPv6 host keeps its brackets."""
    scheme, _, place = address.partition("://")
    if scheme not in _SCHEMES or not _is_place(place):
        raise InviteError(f"{address!r} is not an address; write it like https://host:port")
    return scheme, place


def _is_place(place: str) -> bool:
    """Whether a text is HOST:PORT in canonical form."""
    try:
        host, port = split_host_port(place)
        is_host = _HOST.fullmatch(host) or ("%" not in host and ipaddress.IPv6Address(host))
    except (ConfigError, ValueError):
        return False
    return bool(is_host and port and len(place) <= 255 and place == join_host_port(host, port))


def _short(text: str) -> bytes:
    return struct.pack("B", len(text)) + text.encode("ascii")


def _checksum(prefix: str, payload: bytes) -> bytes:
    """Little-endian CRC-32, which detects every change of a single character."""
    return struct.pack("<I", zlib.crc32(prefix.encode("ascii") + payload))


def _checked(prefix: str, body: str) -> bytes:
    try:
        data = identity.base64url_decode(body)
    except ValueError:
        raise InviteError(MISTYPED) from None
    payload, checksum = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
    if _checksum(prefix, payload) != checksum:
        raise InviteError(MISTYPED)
    return payload
