"""Updates that are being verified: few at once, since each keeps a processor busy, and each once,
however often that is asked for.

A worker whose request was cut asks again, and one that means harm asks a thousand times: they all
wait for the same receipt.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool

from blocktrain.protocol.messages import Receipt

T = TypeVar("T")


class Verifying:
    def __init__(self, at_once: int) -> None:
        self._turn = asyncio.Semaphore(at_once)
        self._under_way: dict[str, asyncio.Task[Receipt]] = {}

    async def in_turn(self, verify: Callable[..., T], *args: Any) -> T:
        async with self._turn:
            return await run_in_threadpool(verify, *args)

    async def once(self, lease: str, settle: Callable[[], Coroutine[Any, Any, Receipt]]) -> Receipt:
        """The receipt of a lease's update. Goes on when whoever asked first has left."""
        task = self._under_way.get(lease)
        if task is None:
            task = self._under_way[lease] = asyncio.create_task(settle())
            task.add_done_callback(lambda done: self._under_way.pop(lease))
        return await asyncio.shield(task)
