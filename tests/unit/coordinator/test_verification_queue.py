"""Verification of updates: a few at a time, each once."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from blocktrain.coordinator.verification import VerificationQueue
from blocktrain.errors import RefusedError
from blocktrain.protocol.messages import Receipt

RECEIPT = Receipt(state="pending", reason="", weight=1.0)


class Settling:
    """Counts how often an update is verified; goes on when it is let go."""

    def __init__(self, error: Exception | None = None) -> None:
        self.times, self._error, self.go = 0, error, asyncio.Event()

    def __call__(self) -> Coroutine[Any, Any, Receipt]:
        return self._settled()

    async def _settled(self) -> Receipt:
        self.times += 1
        await self.go.wait()
        if self._error:
            raise self._error
        return RECEIPT


def test_a_thousand_requests_for_one_update_wait_for_one_receipt():
    async def story() -> None:
        verifying, settling = VerificationQueue(2), Settling()
        asking = [asyncio.create_task(verifying.run_once("a", settling)) for _ in range(1000)]
        await asyncio.sleep(0)
        settling.go.set()
        assert await asyncio.gather(*asking) == [RECEIPT] * 1000
        assert settling.times == 1
        assert await verifying.run_once("a", settling) == RECEIPT  # what is over can be asked anew
        assert settling.times == 2

    asyncio.run(story())


def test_a_refusal_reaches_all_requests_and_is_not_remembered():
    async def story() -> None:
        verifying, settling = (
            VerificationQueue(2),
            Settling(RefusedError("conflict", "chunks are missing")),
        )
        asking = [asyncio.create_task(verifying.run_once("a", settling)) for _ in range(3)]
        await asyncio.sleep(0)
        settling.go.set()
        answers = await asyncio.gather(*asking, return_exceptions=True)
        assert [str(answer) for answer in answers] == ["chunks are missing"] * 3
        again = Settling()
        again.go.set()
        assert await verifying.run_once("a", again) == RECEIPT

    asyncio.run(story())


def test_it_goes_on_if_the_first_request_is_cancelled():
    async def story() -> None:
        verifying, settling = VerificationQueue(2), Settling()
        first = asyncio.create_task(verifying.run_once("a", settling))
        await asyncio.sleep(0)
        second = asyncio.create_task(verifying.run_once("a", settling))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        settling.go.set()
        assert await second == RECEIPT

    asyncio.run(story())


def test_no_more_at_a_time_than_there_are_places():
    async def story() -> None:
        verifying, lock, running, most = VerificationQueue(2), threading.Lock(), 0, 0
        met = threading.Barrier(2)  # passed only where two are at work together

        def verify() -> str:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            met.wait(20)
            with lock:
                running -= 1
            return "fine"

        assert await asyncio.gather(*(verifying.run(verify) for _ in range(8))) == ["fine"] * 8
        assert most == 2

    asyncio.run(story())
