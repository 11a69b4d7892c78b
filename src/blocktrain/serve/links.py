"""Connections to the next stages: opened when first needed, or before, and kept."""

import asyncio
from collections.abc import Awaitable, Callable

from blocktrain.serve.connection import Connection

Dial = Callable[[str], Awaitable[Connection]]


class Links:
    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._open: dict[str, Connection] = {}
        self._dialing: dict[str, asyncio.Lock] = {}

    async def to(self, address: str) -> Connection:
        """The connection to an address; dialled if there is none that still stands."""
        async with self._dialing.setdefault(address, asyncio.Lock()):
            held = self._open.get(address)
            if held is None or held.reason:
                held = self._open[address] = await self._dial(address)
            return held

    def close(self) -> None:
        for connection in self._open.values():
            connection.close()
        self._open.clear()
