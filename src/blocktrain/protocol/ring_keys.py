"""The certificate authority of a ring, and the certificates of its members: routers and stages.

    FOLDER/ca.pem, ca.key        the authority; its key stays on the machine that made it
    FOLDER/NAME.pem, NAME.key    a member; its machine needs both files and ca.pem

A certificate contains its member's role and name as the URI `blocktrain:ROLE/NAME`. Both sides of a
connection trust only this authority, over TLS 1.3. Host names are not checked, because members move
between addresses; `serve.ring.handshake` checks the role instead.
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
# A router only opens connections; a stage also accepts them.
PURPOSES = {
    ROUTER: [ExtendedKeyUsageOID.CLIENT_AUTH],
    STAGE: [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH],
}

Clock = Callable[[], float]
Member = tuple[str, str]  # role and name

_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,62}")
_URI = re.compile(rf"blocktrain:({ROUTER}|{STAGE})/({_NAME.pattern})")


class Keyring:
    """A folder with an authority and the members whose certificates it has signed."""

    def __init__(self, folder: Path, clock: Clock = time.time) -> None:
        self.folder = folder
        self._clock = clock
        self._issuer = self._load_or_create()

    def add(self, role: str, name: str) -> bool:
        """Make a member's certificate. Returns False if it has one that stays valid for a while."""
        if not _NAME.fullmatch(name) or name == AUTHORITY:
            raise ConfigError(
                f"{name!r} is not a valid name for a {role}; use a-z, 0-9, dots and dashes"
            )
        if self._has_valid(role, name):
            return False
        uri = x509.UniformResourceIdentifier(f"blocktrain:{role}/{name}")
        issued = self._issuer.issue(f"{role} {name}", [uri], PURPOSES[role], self._clock())
        self._write(name, issued.cert_pem, issued.key_pem)
        return True

    def _has_valid(self, role: str, name: str) -> bool:
        if not (self.folder / f"{name}.pem").exists():
            return False
        certificate = read_certificate(self.folder / f"{name}.pem")
        if _own_member(certificate)[0] != role:
            raise ConfigError(
                f"{name} already belongs to a member that is not a {role}; choose another name"
            )
        soon = datetime.fromtimestamp(self._clock(), UTC) + RENEWED_BEFORE
        return certificate.not_valid_after_utc > soon

    def _load_or_create(self) -> Issuer:
        paths = [self.folder / f"{AUTHORITY}.{kind}" for kind in ("pem", "key")]
        existing = [path.read_text() for path in paths if path.exists()]
        if len(existing) == 1:
            raise ConfigError(
                f"{self.folder} has only one of ca.pem and ca.key; run `blocktrain keys` on the"
                " folder that has both"
            )
        if existing:
            cert_pem, key_pem = existing
            return Issuer.load(cert_pem, key_pem, f"{self.folder}: the ring's")
        issuer = Issuer.create("a serving ring", self._clock())
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write(AUTHORITY, issuer.certificate_pem, issuer.key_pem)
        return issuer

    def _write(self, name: str, cert_pem: str, key_pem: str) -> None:
        # If interrupted, leave no certificate rather than one with a wrong key.
        (self.folder / f"{name}.pem").unlink(missing_ok=True)
        write_bytes(self.folder / f"{name}.key", key_pem.encode(), mode=0o600)
        write_bytes(self.folder / f"{name}.pem", cert_pem.encode(), mode=0o644)


def server_context(folder: Path, name: str, clock: Clock = time.time) -> ssl.SSLContext:
    """TLS for a stage that accepts connections."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, folder, name, [STAGE], clock)
    context.num_tickets = 0  # connections are long-lived and not resumed
    return context


def client_context(folder: Path, name: str, clock: Clock = time.time) -> ssl.SSLContext:
    """TLS for a router or a stage that opens connections."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, folder, name, [ROUTER, STAGE], clock)


def member_of(certificate: dict[str, Any]) -> Member:
    """The member that a verified certificate names, in the form that the ssl module returns."""
    alternatives = certificate.get("subjectAltName", ())
    return _member([value for kind, value in alternatives if kind == "URI"])


def _member(uris: Sequence[str]) -> Member:
    matches = [_URI.fullmatch(uri) for uri in uris]
    if len(matches) != 1 or not matches[0]:
        raise UntrustedError(
            "the certificate names no role in a ring; use one made by `blocktrain keys`"
        )
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
            raise ConfigError(
                f"{file} is missing; copy it from the machine where it was made, or make it with"
                " `blocktrain keys FOLDER`"
            )
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
        raise ConfigError(
            f"{key} is not the key of {certificate}; make both again with `blocktrain keys FOLDER`"
        ) from None
    return context


def _check(path: Path, authority: x509.Certificate, roles: Sequence[str], clock: Clock) -> None:
    """Raise an error that explains a certificate which other members would refuse without a
    reason."""
    certificate = read_certificate(path)
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        raise ConfigError(
            f"{path} is not signed by the ca.pem in its folder; copy all files from one folder"
        ) from None
    role, _ = _own_member(certificate)
    if role not in roles:
        expected = " or a ".join(roles)
        raise ConfigError(f"{path} belongs to a {role}; use the certificate of a {expected}")
    if certificate.not_valid_after_utc <= datetime.fromtimestamp(clock(), UTC):
        ended = f"{certificate.not_valid_after_utc:%Y-%m-%d}"
        raise ConfigError(f"{path} expired on {ended}; renew it with `blocktrain keys FOLDER`")


def read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError:
        raise ConfigError(
            f"{path} is not a PEM certificate; make it again with `blocktrain keys FOLDER`"
        ) from None
