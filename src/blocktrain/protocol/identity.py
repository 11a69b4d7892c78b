"""Keys, signatures and bearer tokens: how a worker proves who it is."""

import base64
import hashlib
import hmac
import json
import secrets
import struct
from collections.abc import Callable
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
    """RFC 4648, section 5, without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def base64url_decode(text: str) -> bytes:
    """ValueError for everything but the one spelling of these bytes: the standard library accepts
    foreign characters, padding and stray bits, so that a typo could go unnoticed."""
    padded = text.encode("ascii") + b"=" * (-len(text) % 4)
    data = base64.b64decode(padded, altchars=b"-_", validate=True)
    if base64url_encode(data) != text:
        raise ValueError("not canonical base64url")
    return data


UPDATE_DOMAIN = b"blocktrain/1/update\n"
JOIN_DOMAIN = b"blocktrain/1/join\n"
TOKEN_DOMAIN = b"blocktrain/1/token\n"


class WorkerKey:
    """The private key; a coordinator only gets to see `public`."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @classmethod
    def create(cls) -> "WorkerKey":
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load_or_create(cls, path: Path) -> "WorkerKey":
        """The key in this file, which is created on the first call."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(path.with_name(path.name + ".lock")):
                if not path.exists():
                    write_bytes(path, cls.create().pem(), mode=0o600)
                return cls._parse(path.read_bytes(), path)
        except OSError as error:
            raise ConfigError(f"cannot keep a key in {path}: {error.strerror}") from None

    @classmethod
    def _parse(cls, pem: bytes, path: Path) -> "WorkerKey":
        try:
            key = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise CorruptFileError(
                f"{path} does not contain a key; move it away to get a new one"
            ) from None
        if not isinstance(key, Ed25519PrivateKey):
            raise CorruptFileError(
                f"{path} contains a key that is not Ed25519; choose another folder"
            )
        return cls(key)

    @property
    def public(self) -> str:
        return base64url_encode(self._key.public_key().public_bytes_raw())

    def sign_update(self, claim: UpdateClaim) -> str:
        return base64url_encode(self._key.sign(update_text(claim)))

    def sign_token_request(self, run: str, worker: str, time: int) -> str:
        return base64url_encode(self._key.sign(token_request_text(run, worker, time)))

    def sign_join(self, run: str, invite: str) -> str:
        return base64url_encode(self._key.sign(join_text(run, invite)))

    def pem(self) -> bytes:
        return self._key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )


def verify_update(public_key: str, claim: UpdateClaim, signature: str) -> bool:
    return _verify(public_key, update_text(claim), signature)


def verify_token_request(public_key: str, run: str, worker: str, time: int, signature: str) -> bool:
    """Whether the worker signed it. The caller checks how old it is."""
    return _verify(public_key, token_request_text(run, worker, time), signature)


def verify_join(public_key: str, run: str, invite: str, signature: str) -> bool:
    """Whether the joining machine has the private key to the public key it names."""
    return _verify(public_key, join_text(run, invite), signature)


def update_text(claim: UpdateClaim) -> bytes:
    """The bytes that are signed for an update."""
    fields = claim.model_dump(mode="json")
    if claim.loss is not None:
        fields["loss"] = _bits(claim.loss)
    return UPDATE_DOMAIN + _compact(fields)


def join_text(run: str, invite: str) -> bytes:
    return JOIN_DOMAIN + _compact({"run": run, "invite": invite})


def token_request_text(run: str, worker: str, time: int) -> bytes:
    return TOKEN_DOMAIN + _compact({"run": run, "worker": worker, "time": time})


def _bits(number: float) -> str:
    """A float as its bits in hex: languages differ in how they write one in decimal."""
    return struct.pack(">d", number + 0.0).hex()  # + 0.0 makes a negative zero positive


def _compact(fields: dict[str, object]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode("ascii")


def _verify(public_key: str, text: bytes, signature: str) -> bool:
    try:
        key = Ed25519PublicKey.from_public_bytes(base64url_decode(public_key))
        key.verify(base64url_decode(signature), text)
    except (ValueError, InvalidSignature):
        return False
    return True


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
    return f"{base64url_encode(claims)}.{base64url_encode(_mac(secret, claims))}"


def check(secret: bytes, token: str, now: float) -> TokenClaims:
    try:
        claims, mac = (base64url_decode(part) for part in token.split("."))
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
    return base64url_encode(random_bytes(SECRET_BYTES))


def new_identifier(random_bytes: RandomBytes = secrets.token_bytes) -> str:
    """Sixteen letters and digits: 80 random bits, enough against collisions."""
    return base64.b32encode(random_bytes(IDENTIFIER_BYTES)).decode("ascii").lower()


def identifier_of(now: float, random_bytes: RandomBytes = secrets.token_bytes) -> str:
    """An identifier that starts with the time: new rows are next to each other in an index."""
    return f"{int(now * 1000):011x}{new_identifier(random_bytes)}"


def _mac(secret: bytes, claims: bytes) -> bytes:
    return hmac.digest(secret, DOMAIN + claims, "sha256")
