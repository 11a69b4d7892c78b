"""A certificate for 127.0.0.1 in files, as an operator has it, and the authority to check it by."""

import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from blocktrain.protocol.tls import Issuer

DAY = 24 * 3600.0
NOW = 1_800_000_000.0


@dataclass(frozen=True)
class Pair:
    certificate: Path
    key: Path
    authority_pem: str

    @property
    def files(self) -> tuple[Path, Path]:
        return self.certificate, self.key

    def client_context(self) -> ssl.SSLContext:
        """Of a client that believes this authority and no other."""
        return ssl.create_default_context(cadata=self.authority_pem)


def written(folder: Path, now: float = NOW) -> Pair:
    issuer = Issuer.create("an authority for tests", now)
    here = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    issued = issuer.issue("a site", [here], [ExtendedKeyUsageOID.SERVER_AUTH], now)
    folder.mkdir(parents=True, exist_ok=True)
    pair = Pair(folder / "site.pem", folder / "site.key", issuer.certificate_pem)
    pair.certificate.write_text(issued.cert_pem)
    pair.key.write_text(issued.key_pem)
    return pair
