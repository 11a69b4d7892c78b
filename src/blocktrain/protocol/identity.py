"""Keys, signatures and bearer tokens: how a worker proves who it is."""

import base64
import hashlib
import hmac
import json
import secrets
import struct
from dataclasses import dataclass
from pathlib import Path

import filelock
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from blocktrain.errors import ConfigError, CorruptFileError, RefusedError
from blocktrain.files import write_bytes
from blocktrain.protocol.messages import UpdateClaim


def base64url_encode(data: bytes) -> str:
    """Encode by RFC 4648, section 5, without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def base64url_decode(text: str) -> bytes:
    """Decode strictly: only the canonical spelling is accepted. The standard library also accepts
    foreign characters, padding and stray bits, which could hide a typo."""
    padded = text.encode("ascii") + b"=" * (-len(text) % 4)
    data = base64.b64decode(padded, altchars=b"-_", validate=True)
    if base64url_encode(data) != text:
        raise ValueError("not canonical base64url")
    return data


UPDATE_DOMAIN = b"blocktrain/1/update\n"
JOIN_DOMAIN = b"blocktrain/1/join\n"
TOKEN_DOMAIN = b"blocktrain/1/token\n"


class WorkerKey:
    """A worker's private key. A coordinator sees only `public`."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @classmethod
    def create(cls) -> "WorkerKey":
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load_or_create(cls, path: Path) -> "WorkerKey":
        """The key in this file. The first call creates the file."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(path.with_name(path.name + ".lock")):
                if not path.exists():
                    write_bytes(path, cls.create().pem(), mode=0o600)
                return cls._parse(path.read_bytes(), path)
        except OSError as error:
            raise ConfigError(
                f"cannot store a key in {path}: {error.strerror}; choose another folder"
            ) from None

    @classmethod
    def _parse(cls, pem: bytes, path: Path) -> "WorkerKey":
        try:
            key = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise CorruptFileError(
                f"{path} does not contain a private key; move it away to get a new one"
            ) from None
        if not isinstance(key, Ed25519PrivateKey):
            raise CorruptFileError(
                f"{path} contains a key that is not Ed25519; choose another folder"
            )
        return cls(key)

    @property
    def public(self) -> str:
        return base64url_encode(self._key.public_key().public_bytes_raw())

    def sign(self, text: bytes) -> str:
        """Sign a text that one of the `*_text` functions below has made."""
        return base64url_encode(self._key.sign(text))

    def pem(self) -> bytes:
        return self._key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )


FIELD = 2**255 - 19
# The y of the points of order 8, 4, 2 and 1: for these keys, anyone can make signatures.
WEAK_POINTS = {
    0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826,
    0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7,
    0,
    FIELD - 1,
    1,
}


def verify(public_key: str, text: bytes, signature: str) -> bool:
    """Whether the owner of the private key signed this text."""
    try:
        point = base64url_decode(public_key)
        key = Ed25519PublicKey.from_public_bytes(point)
        key.verify(base64url_decode(signature), text)
    except (ValueError, InvalidSignature):
        return False
    return not is_weak(point)


def is_weak(point: bytes) -> bool:
    """Whether a public key is of small order, or is not in its only canonical form."""
    y = int.from_bytes(point, "little") % 2**255  # the highest bit is the sign of x
    return y >= FIELD or y in WEAK_POINTS


def update_text(claim: UpdateClaim) -> bytes:
    """The bytes to sign for an update."""
    fields = claim.model_dump(mode="json")
    if claim.loss is not None:
        fields["loss"] = _bits(claim.loss)
    return UPDATE_DOMAIN + _compact(fields)


def join_text(run: str, invite: str) -> bytes:
    """The bytes to sign for joining a run."""
    return JOIN_DOMAIN + _compact({"run": run, "invite": invite})


def token_request_text(run: str, worker: str, time: int) -> bytes:
    """The bytes to sign for a token request. The coordinator checks their age."""
    return TOKEN_DOMAIN + _compact({"run": run, "worker": worker, "time": time})


def _bits(number: float) -> str:
    """The bits of a float in hex, because languages format decimals differently."""
    return struct.pack(">d", number + 0.0).hex()  # + 0.0 turns -0.0 into 0.0


def _compact(fields: dict[str, object]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode("ascii")


DOMAIN = b"blocktrain/1/bearer\n"
SECRET_BYTES = 24
IDENTIFIER_BYTES = 10


@dataclass(frozen=True)
class TokenClaims:
    worker: str
    role: str
    expires: int  # seconds since 1970


def issue(secret: bytes, worker: str, role: str, now: float, seconds: int) -> str:
    """A bearer token for a worker, valid for `seconds`."""
    claims = json.dumps([worker, role, int(now) + seconds], separators=(",", ":")).encode()
    return f"{base64url_encode(claims)}.{base64url_encode(_mac(secret, claims))}"


def check(secret: bytes, token: str, now: float) -> TokenClaims:
    """The claims of a bearer token. Refuses a token that is not the run's own or has expired."""
    try:
        claims, mac = (base64url_decode(part) for part in token.split("."))
    except ValueError:
        raise RefusedError(
            "unauthorized", "the bearer token is malformed; request a new one"
        ) from None
    if not hmac.compare_digest(mac, _mac(secret, claims)):
        raise RefusedError("unauthorized", "this run did not issue the token; request a new one")
    decoded = TokenClaims(*json.loads(claims))
    if now >= decoded.expires:
        raise RefusedError("unauthorized", "the token has expired; request a new one")
    return decoded


def hash_secret(secret: str) -> str:
    """The form in which the ledger stores an invite's secret. A plain SHA-256 is enough for at
    least 128 random bits; salt and slow hashing protect passwords that people choose."""
    return hashlib.sha256(secret.encode()).hexdigest()


def new_secret() -> str:
    return base64url_encode(secrets.token_bytes(SECRET_BYTES))


def new_identifier() -> str:
    """Sixteen letters and digits: 80 random bits, which makes collisions improbable."""
    return base64.b32encode(secrets.token_bytes(IDENTIFIER_BYTES)).decode("ascii").lower()


def identifier_of(now: float) -> str:
    """An identifier that starts with the time, so that new rows are adjacent in an index."""
    return first_identifier(now) + new_identifier()


def first_identifier(now: float) -> str:
    """The beginning of the identifiers that `identifier_of` makes at this time."""
    return f"{int(now * 1000):011x}"


def _mac(secret: bytes, claims: bytes) -> bytes:
    return hmac.digest(secret, DOMAIN + claims, "sha256")
