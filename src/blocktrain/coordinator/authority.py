"""The run's certificate authority: made with the run, it signs coordinators and nothing else.

Workers trust it by its fingerprint, which stands in the invite, and check no host names
(`protocol.trust`); so a certificate for anyone but a coordinator must never be issued here.
Keeps no files: certificate and key are PEM texts that the ledger holds. Reads no clock.
"""

import ipaddress
import re
from collections.abc import Sequence

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from blocktrain.errors import ConfigError
from blocktrain.protocol.certificates import Certificate, Issuer

COORDINATOR = "a coordinator of the run"  # spaces: no run can have this name

_HOST_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}")


class Authority:
    """One run's authority. A time is given in seconds since 1970."""

    def __init__(self, issuer: Issuer) -> None:
        self._issuer = issuer
        self.certificate_pem = issuer.certificate_pem
        self.fingerprint = issuer.fingerprint

    @classmethod
    def create(cls, run_id: str, now: float) -> "Authority":
        return cls(Issuer.create(run_id, now))

    @classmethod
    def load(cls, cert_pem: str, key_pem: str) -> "Authority":
        return cls(Issuer.load(cert_pem, key_pem, "the run's"))

    @property
    def key_pem(self) -> str:
        return self._issuer.key_pem

    def issue_server(self, hosts: Sequence[str], now: float) -> Certificate:
        """A certificate for a coordinator that answers at these names and addresses."""
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH]
        return self._issuer.issue(COORDINATOR, _alternatives(hosts), purposes, now)


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
