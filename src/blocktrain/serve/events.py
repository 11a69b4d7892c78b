"""Server-sent events to one client, who may be slow: each waits until the one before is on its way.

A client that takes nothing for `patience` seconds is given up: StalledError.
"""

import asyncio
import json
from typing import Any

from starlette.types import Send

from blocktrain.errors import StalledError

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class EventStream:
    """Begun by the first event, so that until then an error can still be a status."""

    def __init__(self, send: Send, patience: float) -> None:
        self._send = send
        self._patience = patience
        self._turn = asyncio.Lock()
        self.started = False

    async def tell(self, *events: dict[str, Any]) -> None:
        lines = [f"data: {json.dumps(event, separators=(',', ':'))}\n\n" for event in events]
        async with self._turn:
            await self._begin()
            await self._put({"type": "http.response.body", "body": "".join(lines).encode(),
                             "more_body": True})  # fmt: skip

    async def end(self) -> None:
        async with self._turn:
            await self._begin()
            await self._put({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def break_off(self, error: dict[str, Any]) -> None:
        """The last event is an error; no [DONE] follows."""
        await self.tell(error)
        await self._put({"type": "http.response.body", "body": b""})

    async def _begin(self) -> None:
        if not self.started:
            self.started = True
            await self._put({"type": "http.response.start", "status": 200, "headers": [*HEADERS]})

    async def _put(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await self._send(message)
        except TimeoutError:
            raise StalledError(f"nothing was read for {self._patience:g} s") from None
