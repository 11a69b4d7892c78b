"""An invite: one line of text with everything a machine needs to join a run.

    bt1_ + base64url(payload + checksum)

It contains the coordinators' addresses, the join secret, the fingerprint of the run's certificate
authority and the run's name; docs/PROTOCOL.md describes the bytes. The checksum is at the same
place in every version, so that a typo and an invite of a newer version get different errors. Does
not know whether the secret is still valid.
"""

import ipaddress
import re
import struct
import zlib
from dataclasses import dataclass, field

from blocktrain.errors import ConfigError, InviteError
from blocktrain.protocol import identity
from blocktrain.protocol.addresses import join_host_port, split_host_port

VERSION = 1
MOST_ADDRESSES = 16
CHECKSUM_BYTES = 4
MISTYPED = "this invite is incomplete or mistyped; copy all of it again"
NEWER = "this invite is of a newer version of blocktrain; update blocktrain and try again"

_SCHEMES = ("http", "https")  # an address's first byte is its index here
_HAS_FINGERPRINT = 1

_WRITTEN = re.compile(r"bt([1-9][0-9]{0,3})_([A-Za-z0-9_-]+)")
_HOST = re.compile(r"[A-Za-z0-9._-]+")
_SECRET = re.compile(r"[A-Za-z0-9_-]{1,128}")
_RUN = re.compile(r"[0-9a-z]{8,64}")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Invite:
    """`addresses` are http(s)://host:port; plain http only if there is no fingerprint."""

    addresses: tuple[str, ...]
    secret: str = field(repr=False)
    fingerprint: str | None
    run: str

    def __post_init__(self) -> None:
        if not 1 <= len(self.addresses) <= MOST_ADDRESSES:
            raise InviteError(f"an invite has 1 to {MOST_ADDRESSES} addresses")
        for address in self.addresses:
            scheme, _ = _parts(address)
            if scheme == "http" and self.fingerprint is not None:
                raise InviteError(f"{address} is not encrypted, but the run has a certificate")
        if not _SECRET.fullmatch(self.secret):
            raise InviteError("an invite's secret is 1 to 128 of A-Z a-z 0-9 - _")
        if not _RUN.fullmatch(self.run):
            raise InviteError("a run's name is 8 to 64 of 0-9 a-z")
        if self.fingerprint is not None and not _FINGERPRINT.fullmatch(self.fingerprint):
            raise InviteError("a fingerprint is 64 hex digits")

    def encode(self) -> str:
        prefix = f"bt{VERSION}_"
        payload = self._payload()
        return prefix + identity.base64url_encode(payload + _checksum(prefix, payload))

    @classmethod
    def decode(cls, text: str) -> "Invite":
        """Read an invite as people paste it: spaces and line breaks in it do not count."""
        written = _WRITTEN.fullmatch("".join(text.split()))
        if not written:
            raise InviteError(MISTYPED)
        version, body = written.groups()
        payload = _checked(f"bt{version}_", body)
        if int(version) != VERSION:
            raise InviteError(NEWER)
        return _Reader(payload).invite()

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


class _Reader:
    """Reads a payload from the front. Its checksum was right, so this is not about typos."""

    def __init__(self, payload: bytes) -> None:
        self.rest = payload

    def invite(self) -> Invite:
        flags = self.byte()
        if flags & ~_HAS_FINGERPRINT:
            raise InviteError(NEWER)
        fingerprint = self.take(32).hex() if flags & _HAS_FINGERPRINT else None
        run, secret = self.short(), self.short()
        addresses = tuple(self.address() for _ in range(self.byte()))
        if self.rest:
            raise InviteError("this invite is malformed: there are bytes after its end")
        return Invite(addresses, secret, fingerprint, run)

    def take(self, size: int) -> bytes:
        if size > len(self.rest):
            raise InviteError("this invite is malformed: it ends too early")
        taken, self.rest = self.rest[:size], self.rest[size:]
        return taken

    def byte(self) -> int:
        return self.take(1)[0]

    def short(self) -> str:
        try:
            return self.take(self.byte()).decode("ascii")
        except UnicodeDecodeError:
            raise InviteError(
                "this invite is malformed: it contains text that is not ASCII"
            ) from None

    def address(self) -> str:
        scheme = self.byte()
        if scheme >= len(_SCHEMES):
            raise InviteError(NEWER)
        return f"{_SCHEMES[scheme]}://{self.short()}"


def _parts(address: str) -> tuple[str, str]:
    """Scheme, and host with port; an IPv6 host stays in its brackets."""
    scheme, _, place = address.partition("://")
    if scheme not in _SCHEMES or not _is_place(place):
        raise InviteError(f"{address!r} is not an address like https://host:port")
    return scheme, place


def _is_place(place: str) -> bool:
    """Whether it is HOST:PORT in canonical spelling."""
    try:
        host, port = split_host_port(place)
        is_host = _HOST.fullmatch(host) or ("%" not in host and ipaddress.IPv6Address(host))
    except (ConfigError, ValueError):
        return False
    return bool(is_host and port and len(place) <= 255 and place == join_host_port(host, port))


def _short(text: str) -> bytes:
    return struct.pack("B", len(text)) + text.encode("ascii")


def _checksum(prefix: str, payload: bytes) -> bytes:
    """CRC-32 in little-endian order, which detects every change of a single character."""
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
