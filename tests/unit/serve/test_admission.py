import asyncio
from contextlib import AsyncExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktrain.errors import OverloadedError
from blocktrain.serve.http.admission import AdmissionQueue


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
            with pytest.raises(
                OverloadedError, match="1 answers in progress, 1 of your requests waiting"
            ):
                await queue.enter(1).__aenter__()
            with pytest.raises(OverloadedError, match=r"no place became free within 0\.01 s"):
                await waiting
        assert (queue.inside, queue.waiting) == (0, 0)

    asyncio.run(story())


async def finish(queue: AdmissionQueue, tenants: list[str], served: list[str]) -> None:
    """Let requests of these tenants wait for one place, and note in which order they get it."""

    async def visit_once(tenant: str) -> None:
        async with queue.enter(1, tenant):
            served.append(tenant)
            await turns()

    async with asyncio.TaskGroup() as group, queue.enter(1, "first"):
        for tenant in tenants:
            group.create_task(visit_once(tenant))
        await turns()
        assert queue.waiting == len(tenants)


def test_tenants_are_served_by_turns_however_many_requests_one_has():
    async def story() -> list[str]:
        queue, served = AdmissionQueue(1, 60, 10), []
        await finish(queue, ["many"] * 60 + ["few"] * 3, served)
        return served

    served = asyncio.run(story())
    assert served[:8] == ["many", "few", "many", "few", "many", "few", "many", "many"]
    assert len(served) == 63


def test_a_free_place_goes_to_the_tenant_with_the_fewest_answers():
    async def story() -> list[str]:
        queue, order, leave = AdmissionQueue(4, 60, 10), [], asyncio.Event()
        async with AsyncExitStack() as places:
            for _ in range(3):
                await places.enter_async_context(queue.enter(1, "many"))
            async with queue.enter(1, "third"), asyncio.TaskGroup() as group:
                for tenant in ("many", "few", "few"):
                    group.create_task(visit_as(queue, tenant, order, leave))
                await turns()
                assert queue.waiting == 3
                leave.set()
                await places.aclose()
        return order

    async def visit_as(
        queue: AdmissionQueue, tenant: str, order: list[str], leave: asyncio.Event
    ) -> None:
        async with queue.enter(1, tenant):
            order.append(tenant)
            await leave.wait()

    assert asyncio.run(story()) == ["few", "many", "few"]


def test_a_tenant_that_fills_its_queue_leaves_room_in_those_of_others():
    async def story() -> None:
        queue = AdmissionQueue(1, 1, 10)
        async with queue.enter(1, "many"):
            waiting = [
                asyncio.create_task(queue.enter(1, tenant).__aenter__())
                for tenant in ("many", "few")
            ]
            await turns()
            with pytest.raises(OverloadedError, match="1 of your requests waiting"):
                await queue.enter(1, "many").__aenter__()
            assert queue.waiting == 2
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        assert (queue.inside, queue.waiting) == (0, 0)

    asyncio.run(story())


def test_the_wait_is_measured_and_predicted():
    now = 0.0

    async def story() -> None:
        nonlocal now
        queue = AdmissionQueue(1, 1, 10, clock=lambda: now)
        later = queue.enter(1)
        async with queue.enter(1) as first:
            waiting = asyncio.create_task(later.__aenter__())
            await turns()
            now = 40.0
        second = await waiting
        assert (first.seconds, first.ahead, second.seconds, second.ahead) == (0.0, 0, 40.0, 0)
        rest = asyncio.create_task(queue.enter(1).__aenter__())
        await turns()
        with pytest.raises(OverloadedError) as refused:
            await queue.enter(1).__aenter__()
        assert refused.value.seconds == 15.0  # three requests, and an eighth of 40 s for each
        rest.cancel()
        await later.__aexit__(None, None, None)

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
