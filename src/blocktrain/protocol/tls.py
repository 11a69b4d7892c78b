"""Certificates of a private authority: issuing them, and trusting no others.

A run and a serving ring each have their own authority. Keeps no files: everything is PEM text.
Reads no clock: callers pass times in seconds since 1970.
"""

import hashlib
import ipaddress
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Self

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from blocktrain.errors import ConfigError, CorruptFileError, ProtocolError, UntrustedError

AUTHORITY_LIFE = timedelta(days=3652)
CERTIFICATE_LIFE = timedelta(days=365)
CLOCK_SKEW = timedelta(hours=1)  # how far a peer's clock may be behind
COORDINATOR = "a coordinator of the run"  # the spaces keep it distinct from any run's name

_HOST_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}")


@dataclass(frozen=True)
class Certificate:
    cert_pem: str
    key_pem: str = field(repr=False)


class Issuer:
    """A certificate authority: its own certificate and its key."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def create(cls, name: str, now: float) -> Self:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _builder(_name(name), _name(name), key.public_key(), now, _time(now) + AUTHORITY_LIFE)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(certificate, key)

    @classmethod
    def load(cls, cert_pem: str, key_pem: str, whose: str = "the run's") -> Self:
        """An authority from PEM text. `whose`: its owner, for error messages."""
        try:
            certificate = x509.load_pem_x509_certificate(cert_pem.encode())
            key = serialization.load_pem_private_key(key_pem.encode(), password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise CorruptFileError(
                f"{whose} certificate or its key is damaged; restore them from a backup"
            ) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise CorruptFileError(
                f"the key of {whose} certificate is not an EC key; restore both from a backup"
            )
        if certificate.public_key() != key.public_key():
            raise CorruptFileError(
                f"{whose} certificate and key do not match; restore both from a backup"
            )
        return cls(certificate, key)

    @property
    def certificate_pem(self) -> str:
        return _certificate_pem(self._certificate)

    @property
    def key_pem(self) -> str:
        return _key_pem(self._key)

    @property
    def fingerprint(self) -> str:
        return self._certificate.fingerprint(hashes.SHA256()).hex()

    def issue(
        self,
        name: str,
        alternatives: Sequence[x509.GeneralName],
        purposes: Sequence[x509.ObjectIdentifier],
        now: float,
    ) -> Certificate:
        """A certificate with a new key. It cannot sign others, and expires with the authority."""
        key = ec.generate_private_key(ec.SECP256R1())
        ends = min(_time(now) + CERTIFICATE_LIFE, self._certificate.not_valid_after_utc)
        certificate = (
            _builder(_name(name), self._certificate.subject, key.public_key(), now, ends)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        return Certificate(_certificate_pem(certificate), _key_pem(key))


class Authority(Issuer):
    """The authority of a run, named after it. Issues certificates only to coordinators."""

    def issue_server(self, hosts: Sequence[str], now: float) -> Certificate:
        """A certificate for a coordinator with these names and addresses."""
        if not hosts:
            raise ConfigError("a coordinator's certificate needs at least one host")
        alternatives = [_alternative(host) for host in dict.fromkeys(hosts)]
        return self.issue(COORDINATOR, alternatives, [ExtendedKeyUsageOID.SERVER_AUTH], now)


def pinned_context(ca_pem: str, fingerprint: str) -> ssl.SSLContext:
    """TLS for connections to the run's coordinators. `ca_pem` may come from anyone, because it must
    match the fingerprint."""
    certificate = _der(ca_pem)
    if hashlib.sha256(certificate).hexdigest() != fingerprint:
        raise UntrustedError(
            "the coordinator's certificate does not match the invite; ask for a new invite"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Host names need not be checked: this authority certifies only coordinators of this run, and a
    # worker may talk to any of them, also through a tunnel or at a new address.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    # Load exactly the bytes that were checked, not the text around them.
    context.load_verify_locations(cadata=certificate)
    return context


def _der(pem: str) -> bytes:
    try:
        if pem.count("-----BEGIN") != 1:
            raise ValueError("not one certificate")
        return ssl.PEM_cert_to_DER_cert(pem)
    except ValueError:
        raise ProtocolError(
            "the coordinator sent no valid certificate; check its address"
        ) from None


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        if not _HOST_NAME.fullmatch(host):
            raise ConfigError(
                f"{host!r} is neither a host name nor an IP address; correct this address"
            ) from None
    return x509.DNSName(host)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    now: float,
    ends: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_time(now) - CLOCK_SKEW)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "blocktrain"),
            x509.NameAttribute(NameOID.COMMON_NAME, common_name),
        ]
    )


def _time(now: float) -> datetime:
    return datetime.fromtimestamp(int(now), UTC)


def _certificate_pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode("ascii")


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return pem.decode("ascii")
