"""The ring's own authority and its members' certificates: who may be a router, who a stage.

    FOLDER/ca.pem, ca.key        the authority; its key stays where it was made
    FOLDER/NAME.pem, NAME.key    a member; these two and ca.pem are what its machine needs

A member's role and name stand in its certificate, as the URI `blocktrain:ROLE/NAME`. Nobody
is believed but this authority, in both directions, over TLS 1.3 only. Host names are not checked,
because members move between addresses: the role is what counts, and `meeting` checks it.
"""

import re
import ssl
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import ExtendedKeyUsageOID

from blocktrain.errors import ConfigError, UntrustedError
from blocktrain.files import write_bytes
from blocktrain.protocol.tls import Issuer

ROUTER = "router"
STAGE = "stage"
AUTHORITY = "ca"
RENEWED_BEFORE = timedelta(days=30)
# A router dials and is never dialled; stages do both.
PURPOSES = {
    ROUTER: [ExtendedKeyUsageOID.CLIENT_AUTH],
    STAGE: [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH],
}

Clock = Callable[[], float]
Member = tuple[str, str]  # role and name

_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,62}")
_URI = re.compile(rf"blocktrain:({ROUTER}|{STAGE})/({_NAME.pattern})")


class Keyring:
    """A folder with an authority and the members it has signed."""

    def __init__(self, folder: Path, clock: Clock = time.time) -> None:
        self.folder = folder
        self._clock = clock
        self._issuer = self._loaded() if self._exists() else self._founded()

    def add(self, role: str, name: str) -> bool:
        """A certificate for a new member; False where one is there that is good for a while."""
        if not _NAME.fullmatch(name) or name == AUTHORITY:
            raise ConfigError(f"{name!r} is no name for a {role}: a-z, 0-9, dots and dashes are")
        if self._holds(role, name):
            return False
        uri = x509.UniformResourceIdentifier(f"blocktrain:{role}/{name}")
        issued = self._issuer.issue(f"{role} {name}", [uri], PURPOSES[role], self._clock())
        self._write(name, issued.cert_pem, issued.key_pem)
        return True

    def _holds(self, role: str, name: str) -> bool:
        if not (self.folder / f"{name}.pem").exists():
            return False
        certificate = read_certificate(self.folder / f"{name}.pem")
        if _own_member(certificate)[0] != role:
            raise ConfigError(f"{name} is the name of another member, who is no {role}")
        soon = datetime.fromtimestamp(self._clock(), UTC) + RENEWED_BEFORE
        return certificate.not_valid_after_utc > soon

    def _exists(self) -> bool:
        found = [(self.folder / f"{AUTHORITY}.{kind}").exists() for kind in ("pem", "key")]
        if any(found) and not all(found):
            raise ConfigError(
                f"{self.folder} has only half of an authority; "
                "members are added where ca.pem and ca.key were made"
            )
        return all(found)

    def _loaded(self) -> Issuer:
        cert_pem, key_pem = (
            (self.folder / f"{AUTHORITY}.{kind}").read_text() for kind in ("pem", "key")
        )
        return Issuer.load(cert_pem, key_pem, f"{self.folder}: the ring's")

    def _founded(self) -> Issuer:
        issuer = Issuer.create("a serving ring", self._clock())
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write(AUTHORITY, issuer.certificate_pem, issuer.key_pem)
        return issuer

    def _write(self, name: str, cert_pem: str, key_pem: str) -> None:
        # Cut off in between, there is no certificate, rather than one with another's key.
        (self.folder / f"{name}.pem").unlink(missing_ok=True)
        write_bytes(self.folder / f"{name}.key", key_pem.encode(), mode=0o600)
        write_bytes(self.folder / f"{name}.pem", cert_pem.encode(), mode=0o644)


def server_context(folder: Path, name: str, clock: Clock = time.time) -> ssl.SSLContext:
    """For a stage that listens."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, folder, name, [STAGE], clock)
    context.num_tickets = 0  # connections are kept, not resumed
    return context


def client_context(folder: Path, name: str, clock: Clock = time.time) -> ssl.SSLContext:
    """For a router or a stage that dials."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, folder, name, [ROUTER, STAGE], clock)


def member_of(certificate: dict[str, Any]) -> Member:
    """Whose certificate it is, as the ssl module tells of it once it is verified."""
    alternatives = certificate.get("subjectAltName", ())
    return _member([value for kind, value in alternatives if kind == "URI"])


def _member(uris: Sequence[str]) -> Member:
    matches = [_URI.fullmatch(uri) for uri in uris]
    if len(matches) != 1 or not matches[0]:
        raise UntrustedError("a certificate that names no role")
    return matches[0][1], matches[0][2]


def _own_member(certificate: x509.Certificate) -> Member:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return _member(names.get_values_for_type(x509.UniformResourceIdentifier))


def _context(
    protocol: int, folder: Path, name: str, roles: Sequence[str], clock: Clock
) -> ssl.SSLContext:
    authority, certificate, key = (
        folder / file for file in (f"{AUTHORITY}.pem", f"{name}.pem", f"{name}.key")
    )
    for file in (authority, certificate, key):
        if not file.exists():
            raise ConfigError(f"{file} is missing; `blocktrain keys` makes it")
    _check(certificate, read_certificate(authority), roles, clock)
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    try:
        context.load_verify_locations(authority)
        context.load_cert_chain(certificate, key)
    except ssl.SSLError:
        raise ConfigError(f"{key} is not the key of {certificate}") from None
    return context


def _check(path: Path, authority: x509.Certificate, roles: Sequence[str], clock: Clock) -> None:
    """Tell now, in words, what every other member would only refuse."""
    certificate = read_certificate(path)
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        raise ConfigError(f"{path} was not signed by the ca.pem beside it") from None
    role, _ = _own_member(certificate)
    if role not in roles:
        raise ConfigError(f"{path} is of a {role}; here a {' or a '.join(roles)} is needed")
    if certificate.not_valid_after_utc <= datetime.fromtimestamp(clock(), UTC):
        ended = f"{certificate.not_valid_after_utc:%Y-%m-%d}"
        raise ConfigError(f"{path} expired on {ended}; `blocktrain keys` makes a new one")


def read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError:
        raise ConfigError(f"{path} is no certificate") from None
