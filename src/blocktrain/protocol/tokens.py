"""Bearer tokens, invite secrets and identifiers of a run.

A token contains its worker, role and expiry, under an HMAC with the run's secret, so that every
coordinator of the run can check it without a lookup. The caller checks whether the worker was
banned meanwhile.
"""

import base64
import hashlib
import hmac
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from blocktrain.errors import RefusedError
from blocktrain.protocol import identity

DOMAIN = b"blocktrain/1/bearer\n"
SECRET_BYTES = 24
IDENTIFIER_BYTES = 10

RandomBytes = Callable[[int], bytes]


@dataclass(frozen=True)
class TokenClaims:
    worker: str
    role: str
    expires: int  # seconds since 1970


def issue(secret: bytes, worker: str, role: str, now: float, seconds: int) -> str:
    claims = json.dumps([worker, role, int(now) + seconds], separators=(",", ":")).encode()
    return f"{identity.base64url_encode(claims)}.{identity.base64url_encode(_mac(secret, claims))}"


def check(secret: bytes, token: str, now: float) -> TokenClaims:
    try:
        claims, mac = (identity.base64url_decode(part) for part in token.split("."))
    except ValueError:
        raise RefusedError("unauthorized", "this is not a token") from None
    if not hmac.compare_digest(mac, _mac(secret, claims)):
        raise RefusedError("unauthorized", "this token was not issued by this run")
    decoded = TokenClaims(*json.loads(claims))
    if now >= decoded.expires:
        raise RefusedError("unauthorized", "this token has expired; request a new one")
    return decoded


def hash_secret(secret: str) -> str:
    """What the ledger stores of an invite's secret. A plain SHA-256 is enough: salt and slow
    hashing protect passwords that people choose, and a secret has at least 128 random bits."""
    return hashlib.sha256(secret.encode()).hexdigest()


def new_secret(random_bytes: RandomBytes = secrets.token_bytes) -> str:
    return identity.base64url_encode(random_bytes(SECRET_BYTES))


def new_identifier(random_bytes: RandomBytes = secrets.token_bytes) -> str:
    """Sixteen letters and digits: 80 random bits, enough against collisions."""
    return base64.b32encode(random_bytes(IDENTIFIER_BYTES)).decode("ascii").lower()


def identifier_of(now: float, random_bytes: RandomBytes = secrets.token_bytes) -> str:
    """An identifier that starts with the time: new rows are next to each other in an index."""
    return f"{int(now * 1000):011x}{new_identifier(random_bytes)}"


def _mac(secret: bytes, claims: bytes) -> bytes:
    return hmac.digest(secret, DOMAIN + claims, "sha256")
