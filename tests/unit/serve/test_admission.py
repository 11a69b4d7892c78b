import asyncio
from contextlib import AsyncExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktrain.errors import OverloadedError
from blocktrain.serve.http.answer import AdmissionQueue


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def visit(
    queue: AdmissionQueue, places: int, order: list[str], name: str, leave: asyncio.Event
) -> None:
    async with queue.enter(places):
        order.append(name)
        await leave.wait()


def test_requests_enter_in_order_even_if_a_later_one_would_fit():
    async def story() -> list[str]:
        queue, order, leave = AdmissionQueue(2, 5, 10), [], asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for name, places in (("one", 1), ("both", 2), ("small", 1)):
                group.create_task(visit(queue, places, order, name, leave))
                await turns()
            assert (order, queue.inside, queue.waiting) == (["one"], 1, 2)
            leave.set()
        assert (queue.inside, queue.waiting) == (0, 0)
        return order

    assert asyncio.run(story()) == ["one", "both", "small"]


def test_a_full_queue_and_a_long_wait_are_refused():
    async def story() -> None:
        queue = AdmissionQueue(1, 1, 0.01)
        async with queue.enter(1):
            waiting = asyncio.create_task(queue.enter(1).__aenter__())
            await turns()
            with pytest.raises(OverloadedError, match="1 answers in progress, 1 waiting"):
                await queue.enter(1).__aenter__()
            with pytest.raises(OverloadedError, match=r"no place became free within 0\.01 s"):
                await waiting
        assert (queue.inside, queue.waiting) == (0, 0)

    asyncio.run(story())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["stay", "cancel"]))))
def test_all_places_come_back_however_requests_end(visits: list[tuple[int, str]]):
    async def story() -> None:
        queue = AdmissionQueue(3, 100, 10)
        tasks: list[tuple[asyncio.Task[None], str]] = []
        leave = asyncio.Event()
        async with AsyncExitStack() as stack:
            stack.callback(leave.set)
            for index, (places, end) in enumerate(visits):
                task = asyncio.create_task(visit(queue, places, [], str(index), leave))
                tasks.append((task, end))
                await turns(index % 3)
            assert queue.inside <= 3
            for task, end in tasks:
                if end == "cancel":
                    task.cancel()
        await asyncio.gather(*(task for task, _ in tasks), return_exceptions=True)
        assert (queue.inside, queue.waiting) == (0, 0)

    asyncio.run(story())
