"""How many answers are made at once, and who waits for a place: first come, first served.

Places are taken together, so that a request for several answers never holds some and waits for
the others. The queue is bounded in length and in time. A closed gate lets nobody in, and tells
those inside.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

from blocktrain.errors import OverloadedError, UnavailableError


class Gate:
    def __init__(self, places: int, queue: int, patience: float) -> None:
        self.places = places
        self._free = places
        self._queue = queue
        self._patience = patience
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._closed = asyncio.Event()

    @property
    def inside(self) -> int:
        return self.places - self._free

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        self._closed.set()

    async def closing(self) -> NoReturn:
        """Waits until the gate is closed."""
        await self._closed.wait()
        raise UnavailableError("the server is stopping")

    @asynccontextmanager
    async def enter(self, places: int) -> AsyncIterator[None]:
        await self._take(places)
        try:
            yield
        finally:
            self._leave(places)

    async def _take(self, places: int) -> None:
        if not self._waiting and places <= self._free:
            self._free -= places
            return
        if len(self._waiting) >= self._queue:
            raise OverloadedError(f"{self.inside} answers under way and {self.waiting} waiting")
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((places, turn))
        try:
            async with asyncio.timeout(self._patience):
                await turn
        except (asyncio.CancelledError, TimeoutError) as error:
            if turn.cancelled():
                self._waiting.remove((places, turn))
                self._admit()  # behind a large one that left, smaller ones may fit
            else:
                self._leave(places)  # its turn came as it left
            if isinstance(error, TimeoutError):
                raise OverloadedError(f"no place within {self._patience:g} s") from None
            raise

    def _leave(self, places: int) -> None:
        self._free += places
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            places, turn = self._waiting[0]
            if turn.cancelled():
                return  # it is about to remove itself, and to admit who follows
            self._waiting.popleft()
            self._free -= places
            turn.set_result(None)
