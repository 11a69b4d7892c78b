"""A worker's key pair and what it signs; base64url, the spelling of keys and signatures."""

import base64
import json
import struct
from pathlib import Path

import filelock
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from blocktrain.errors import ConfigError, CorruptFileError
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
