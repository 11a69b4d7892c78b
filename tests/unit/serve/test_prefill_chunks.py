"""Prompts that are read in chunks, on the router and at the stages: the same text, and short
requests do not wait for long ones."""

import asyncio
from functools import lru_cache
from pathlib import Path

import pytest
from tests.support.local_ring import Ring, answer, running, until
from tests.support.models import awake_stack
from tests.support.serving import of_kind, reference_text, stage

from blocktrain.config import load_config
from blocktrain.model.stack import Stack
from blocktrain.numerics.sampling import Sampling
from blocktrain.serve.ring.activations import Row
from blocktrain.serve.ring.compute import StageCompute
from blocktrain.serve.router.decode import AnswerCost, GenerationRequest
from blocktrain.serve.router.engine import EngineLimits
from blocktrain.serve.router.first_block import DraftModel

ROOT = Path(__file__).resolve().parents[3]
PROMPT = b"a prompt of many more positions than a chunk has, and a little more"
SAMPLING = Sampling(1.0, seed=3)
LIMITS = EngineLimits(requests=8, patience_seconds=20.0, prefill_chunk=6)
STAGE_CHUNK = 4
COUNT = 12


@lru_cache
def model(kind: str) -> Stack:
    tiny = ["model.width=16", "model.heads=2", "model.window=96"]
    return awake_stack(of_kind(load_config(ROOT / "configs" / "tiny.toml", tiny), kind))


def request(prompt: bytes = PROMPT, mode: str = "ar", **more: object) -> GenerationRequest:
    return GenerationRequest(prompt, COUNT, mode, 0, sampling=SAMPLING, **more)  # type: ignore[arg-type]


def local_ring(kind: str, readout: str = "product") -> Ring:
    ring = Ring(model(kind), readout, STAGE_CHUNK)
    if kind != "end_to_end":
        ring.start(range(1, 2))
        ring.start(range(2, 3))
    return ring


@pytest.mark.parametrize("readout", ["product", "final"])
@pytest.mark.parametrize("kind", ["denoise", "cascade", "end_to_end"])
def test_the_text_is_that_of_a_prompt_read_at_once(kind: str, readout: str) -> None:
    async def scenario() -> None:
        ring = local_ring(kind, readout)
        async with running(ring, ring.engine(LIMITS)) as engine:
            modes = ["ar", "speculative", "sweep"]
            texts = await asyncio.gather(*(answer(engine, request(mode=mode)) for mode in modes))
            expected = reference_text(model(kind), PROMPT, COUNT, SAMPLING, readout)
            assert texts == [expected] * len(modes)

    asyncio.run(scenario())


def largest_context(compute: StageCompute, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The most positions of a row that the compute gets, in a list of one number."""
    largest = [0]
    step, prefill = compute.step, compute.prefill

    def note(rows: list[Row]) -> None:
        largest[0] = max([largest[0], *(row.context for row in rows)])

    def noted_step(activations, **more):  # type: ignore[no-untyped-def]
        note(activations.rows)
        return step(activations, **more)

    def noted_prefill(rows):  # type: ignore[no-untyped-def]
        note(rows)
        return prefill(rows)

    monkeypatch.setattr(compute, "step", noted_step)
    monkeypatch.setattr(compute, "prefill", noted_prefill)
    return largest


@pytest.mark.parametrize("kind", ["denoise", "cascade"])
def test_nobody_computes_more_than_two_chunks_at_once(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        ring = local_ring(kind)
        at_stages = [largest_context(compute, monkeypatch) for compute in ring.computes]
        drafting = stage(model(kind), range(3))
        of_drafts = largest_context(drafting, monkeypatch)
        engine = ring.engine(LIMITS, draft=DraftModel(drafting))
        async with running(ring, engine):
            await answer(engine, request(mode="speculative", drafts="model"))
        assert all(largest <= 2 * STAGE_CHUNK for (largest,) in at_stages)
        assert of_drafts[0] <= 2 * LIMITS.prefill_chunk

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["denoise", "cascade", "end_to_end"])
def test_a_short_request_overtakes_a_long_prompt(kind: str) -> None:
    async def scenario() -> None:
        ring, ends = local_ring(kind), []

        async def ended(name: str, prompt: bytes) -> None:
            await answer(engine, GenerationRequest(prompt, 1, "ar", sampling=SAMPLING))
            ends.append(name)

        async with running(ring, ring.engine(LIMITS)) as engine:
            long = asyncio.create_task(ended("long", PROMPT))
            await asyncio.sleep(0)
            await asyncio.gather(long, ended("short", b"brief"))
        assert ends == ["short", "long"]

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["denoise", "cascade"])
def test_a_stage_that_leaves_while_a_prompt_is_read_is_replaced(kind: str) -> None:
    async def scenario() -> None:
        ring = Ring(model(kind), chunk=1)
        addresses = [ring.start(range(1, 3)) for _ in range(2)]
        async with running(ring, ring.engine(LIMITS)) as engine:
            await until(lambda: len(engine.status()["stages"]) == 2)
            cost = AnswerCost()
            asked = asyncio.create_task(answer(engine, request(), cost))
            await until(lambda: ring.cached_requests() > 0)
            (reading,) = (at for at, each in enumerate(ring.computes) if each.requests)
            await ring.stop(addresses[reading])
            assert await asked == reference_text(model(kind), PROMPT, COUNT, SAMPLING)
            assert cost.replays == 1

    asyncio.run(scenario())
