"""The run's certificate authority: made with the run, it signs coordinators and nothing else.

Workers trust it by its fingerprint, which stands in the invite, and check no host names
(`protocol.trust`); so a certificate for anyone but a coordinator must never be issued here.
Keeps no files: certificate and key are PEM texts that the ledger holds. Reads no clock.
"""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from blocktrain.errors import ConfigError, CorruptFileError

AUTHORITY_LIFE = timedelta(days=3652)
SERVER_LIFE = timedelta(days=365)
COORDINATOR = "a coordinator of the run"  # spaces: no run can have this name
CLOCK_SKEW = timedelta(hours=1)  # a worker's clock may be behind by this much

_HOST_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}")


@dataclass(frozen=True)
class ServerCertificate:
    cert_pem: str
    key_pem: str = field(repr=False)


class Authority:
    """One run's authority. A time is given in seconds since 1970."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def create(cls, run_id: str, now: float) -> "Authority":
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(run_id)
        certificate = (
            _builder(name, name, key.public_key(), _time(now), _time(now) + AUTHORITY_LIFE)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(certificate, key)

    @classmethod
    def load(cls, cert_pem: str, key_pem: str) -> "Authority":
        try:
            certificate = x509.load_pem_x509_certificate(cert_pem.encode())
            key = serialization.load_pem_private_key(key_pem.encode(), password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise CorruptFileError("the run's certificate or its key is damaged") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise CorruptFileError("the key of the run's certificate is of another kind")
        if certificate.public_key() != key.public_key():
            raise CorruptFileError("the run's certificate and its key do not belong together")
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

    def issue_server(self, hosts: Sequence[str], now: float) -> ServerCertificate:
        """A certificate for a coordinator that answers at these names and addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        ends = min(_time(now) + SERVER_LIFE, self._certificate.not_valid_after_utc)
        issuer = self._certificate.subject
        certificate = (
            _builder(_name(COORDINATOR), issuer, key.public_key(), _time(now), ends)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName(_alternatives(hosts)), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        return ServerCertificate(_certificate_pem(certificate), _key_pem(key))


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    now: datetime,
    ends: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
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


def _alternatives(hosts: Sequence[str]) -> list[x509.GeneralName]:
    if not hosts:
        raise ConfigError("a coordinator's certificate needs at least one host")
    return [_alternative(host) for host in dict.fromkeys(hosts)]


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        if not _HOST_NAME.fullmatch(host):
            raise ConfigError(f"{host!r} is neither a host name nor an address") from None
    return x509.DNSName(host)


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
