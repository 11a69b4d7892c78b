"""TLS of the HTTP port, by a certificate that the operator has: checked, and what is wrong with it
told in words, before anybody connects.

Clients are anyone's, so TLS 1.2 is taken too. Knows nothing of the ring's own authority (`keys`).
"""

import ipaddress
import ssl
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from blocktrain.errors import ConfigError
from blocktrain.serve.keys import read_certificate


def https_context(
    certificate: Path | None, key: Path | None, clock: Callable[[], float] = time.time
) -> ssl.SSLContext | None:
    """Of a certificate (with those between it and its authority, in one file) and its key; None
    where neither is given."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("--tls-cert and --tls-key go together: give both, or neither")
    for file in (certificate, key):
        if not file.is_file():
            raise ConfigError(f"{file} is missing, or no file")
    _check(certificate, key, datetime.fromtimestamp(clock(), UTC))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        raise ConfigError(f"{certificate} and {key} cannot be used: {error.reason}") from None
    return context


def in_the_clear(host: str, context: ssl.SSLContext | None) -> bool:
    """Whether what is said to this address of ours can be read on its way."""
    return context is None and not ipaddress.ip_address(host).is_loopback


def _check(certificate: Path, key: Path, now: datetime) -> None:
    found = read_certificate(certificate)
    try:
        private = load_pem_private_key(key.read_bytes(), password=None)
    except TypeError:
        raise ConfigError(f"{key} is locked by a passphrase; give one that is not") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(f"{key} is no private key") from None
    if found.public_key() != private.public_key():
        raise ConfigError(f"{key} is not the key of {certificate}")
    if found.not_valid_after_utc <= now:
        raise ConfigError(f"{certificate} expired on {found.not_valid_after_utc:%Y-%m-%d}")
    if found.not_valid_before_utc > now:
        begins = f"{found.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
        raise ConfigError(f"{certificate} is not valid before {begins}; is this clock right?")
