"""Replicas of a stage share the work of a router."""

import asyncio
from functools import lru_cache
from pathlib import Path

from tests.support.local_ring import Ring, answer, running, until
from tests.support.models import awake_stack
from tests.support.serving import of_kind

from blocktrain.config import load_config
from blocktrain.model.stack import Stack
from blocktrain.serve.router.decode import AnswerCost, GenerationRequest
from blocktrain.serve.router.engine import EngineLimits

ROOT = Path(__file__).resolve().parents[3]
LIMITS = EngineLimits(requests=16, patience_seconds=20.0, prefill_chunk=4)


@lru_cache
def model() -> Stack:
    tiny = ["model.width=16", "model.heads=2", "model.window=96"]
    return awake_stack(of_kind(load_config(ROOT / "configs" / "tiny.toml", tiny), "cascade"))


def requests_by_stage(engine) -> list[int]:  # type: ignore[no-untyped-def]
    return sorted(stage["requests"] for stage in engine.status()["stages"])


def test_requests_are_divided_between_replicas() -> None:
    async def scenario() -> None:
        ring = Ring(model())
        for _ in range(2):
            ring.start(range(1, 3))
        async with running(ring, ring.engine(LIMITS)) as engine:
            await until(lambda: len(engine.status()["stages"]) == 2)
            asked = [
                asyncio.create_task(answer(engine, GenerationRequest(bytes([n]), 60, "ar")))
                for n in range(6)
            ]
            await until(lambda: sum(requests_by_stage(engine)) == 6)
            assert requests_by_stage(engine) == [3, 3]
            await asyncio.gather(*asked)

    asyncio.run(scenario())


def test_a_long_prompt_counts_for_the_turns_that_it_takes() -> None:
    """While one replica reads a prompt of 20 chunks, the other gets the short requests."""

    async def scenario() -> None:
        ring = Ring(model(), chunk=1)
        for _ in range(2):
            ring.start(range(1, 3))
        async with running(ring, ring.engine(LIMITS)) as engine:
            await until(lambda: len(engine.status()["stages"]) == 2)
            long = asyncio.create_task(answer(engine, GenerationRequest(b"a" * 80, 1, "ar")))
            await until(lambda: sum(requests_by_stage(engine)) == 1)
            short = [
                asyncio.create_task(answer(engine, GenerationRequest(bytes([n]), 5, "ar")))
                for n in range(4)
            ]
            await until(lambda: sum(requests_by_stage(engine)) == 5)
            assert requests_by_stage(engine) == [1, 4]
            await asyncio.gather(long, *short)

    asyncio.run(scenario())


def test_a_request_goes_where_the_beginning_of_its_prompt_is_kept() -> None:
    async def scenario() -> None:
        ring = Ring(model())
        for _ in range(2):
            ring.start(range(1, 3))
        async with running(ring, ring.engine(LIMITS)) as engine:
            await until(lambda: len(engine.status()["stages"]) == 2)
            await answer(engine, GenerationRequest(b"a" * 60, 1, "ar"))
            await until(lambda: any(each.kept_bytes for each in ring.computes))
            # The replica that kept it has one request, and the other none.
            other = asyncio.create_task(answer(engine, GenerationRequest(b"b", 90, "ar")))
            await until(lambda: sum(requests_by_stage(engine)) == 1)
            cost = AnswerCost()
            await answer(engine, GenerationRequest(b"a" * 60, 1, "ar"), cost)
            assert cost.cached_tokens == 59
            other.cancel()

    asyncio.run(scenario())
