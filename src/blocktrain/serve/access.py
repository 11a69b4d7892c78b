"""Who may ask, and a name for every request. Knows headers, not what is asked.

A key is compared in constant time, by its hash, with every key there is.
"""

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Callable, Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blocktrain.errors import ConfigError, RefusedError

log = logging.getLogger(__name__)

CLIENT_GONE, BUG = 499, 500
SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Keys:
    """API keys; none at all means that anyone may ask."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._hashes = tuple(_hash(key.encode()) for key in keys)
        if _hash(b"") in self._hashes:
            raise ConfigError("an API key is empty; leave it out to let anyone ask")

    def admit(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        hashed = _hash(given.strip().encode("latin-1") if scheme.lower() == "bearer" else b"")
        matches = sum(hmac.compare_digest(hashed, own) for own in self._hashes)
        return matches > 0 or not self._hashes

    def check(self, headers: Headers) -> None:
        if not self.admit(headers):
            raise RefusedError("invalid_api_key", "needs an Authorization: Bearer with an API key")


def _hash(key: bytes) -> bytes:
    return hashlib.blake2b(key).digest()


class Named:
    """Gives every request an id, in its answer and in the log, and tells how it went."""

    def __init__(
        self,
        app: ASGIApp,
        new_id: Callable[[], str],
        told: Callable[[str, int, float], None],
    ) -> None:
        self._app, self._new_id, self._told = app, new_id, told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if SANE_ID.fullmatch(given) else self._new_id()
        scope["request_id"] = name
        status, began = CLIENT_GONE, time.monotonic()

        async def named_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        try:
            await self._app(scope, receive, named_send)
        except Exception:
            status = BUG
            raise
        finally:
            seconds = time.monotonic() - began
            log.info(
                "%s %s %s: %d in %.3f s", name, scope["method"], scope["path"], status, seconds
            )
            self._told(scope["path"], status, seconds)
