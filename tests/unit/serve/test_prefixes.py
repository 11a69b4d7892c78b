"""Requests that begin alike share what was computed of their beginnings, and get the same text."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.local_ring import Ring, answer, running, until
from tests.support.models import awake_stack
from tests.support.serving import of_kind, reference_text, stage

from blocktrain.config import load_config
from blocktrain.errors import MissingPrefixError
from blocktrain.model.stack import Stack
from blocktrain.numerics.sampling import Sampling
from blocktrain.serve.ring.activations import Activations, Choice, Row
from blocktrain.serve.ring.batch import SlotLimits
from blocktrain.serve.ring.compute import StageCompute
from blocktrain.serve.ring.prefixes import CopiedContext, KeptContexts
from blocktrain.serve.router.decode import AnswerCost, GenerationRequest, Proposal
from blocktrain.serve.router.engine import EngineLimits
from blocktrain.serve.router.first_block import DraftModel
from blocktrain.serve.router.shared_prefixes import (
    NO_PREFIX,
    KeptContext,
    KeptPrefixes,
    SharedPrefix,
)

ROOT = Path(__file__).resolve().parents[3]
SYSTEM = b"what all of these requests begin with, word by word: "
SAMPLING = Sampling(1.0, seed=3, presence_penalty=0.5)
LIMITS = EngineLimits(requests=16, patience_seconds=20.0, prefill_chunk=6)
COUNT = 10


@lru_cache
def model(kind: str) -> Stack:
    tiny = ["model.width=16", "model.heads=2", "model.window=96"]
    return awake_stack(of_kind(load_config(ROOT / "configs" / "tiny.toml", tiny), kind))


@lru_cache
def expected(kind: str, prompt: bytes, count: int = COUNT) -> bytes:
    return reference_text(model(kind), prompt, count, SAMPLING)


def request(prompt: bytes, mode: str = "ar", tenant: str = "") -> GenerationRequest:
    return GenerationRequest(prompt, COUNT, mode, 0, sampling=SAMPLING, tenant=tenant)


def ids(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8).astype(np.uint32)


def counted(compute: StageCompute, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of positions that are computed, in a list of one number."""
    positions = [0]
    step, prefill = compute.step, compute.prefill

    def count(rows: Sequence[Row]) -> None:
        positions[0] += sum(len(row.ids) for row in rows)

    def counted_step(activations, **more):  # type: ignore[no-untyped-def]
        count(activations.rows)
        return step(activations, **more)

    def counted_prefill(rows):  # type: ignore[no-untyped-def]
        count(rows)
        return prefill(rows)

    monkeypatch.setattr(compute, "step", counted_step)
    monkeypatch.setattr(compute, "prefill", counted_prefill)
    return positions


def local_ring(kind: str, limits: SlotLimits | None = None) -> Ring:
    ring = Ring(model(kind), chunk=4)
    if kind != "end_to_end":
        ring.start(range(1, 2), limits)
        ring.start(range(2, 3), limits)
    return ring


@pytest.mark.parametrize("kind", ["denoise", "cascade", "end_to_end"])
def test_a_later_request_computes_only_what_is_its_own(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        ring = local_ring(kind)
        async with running(ring, ring.engine(LIMITS)) as engine:
            counts = [counted(compute, monkeypatch) for compute in ring.computes]
            first, second = SYSTEM + b"one", SYSTEM + b"another"
            assert await answer(engine, request(first)) == expected(kind, first)
            before = [count for (count,) in counts]
            cost = AnswerCost()
            assert await answer(engine, request(second), cost) == expected(kind, second)
            assert cost.cached_tokens == len(SYSTEM)
            assert cost.replays == 0
            own = len(second) - len(SYSTEM) + COUNT - 1
            assert [count for (count,) in counts] == [each + own for each in before]
            await until(lambda: ring.cached_requests() == 0)

    asyncio.run(scenario())


def test_a_conversation_continues_where_its_last_answer_ended() -> None:
    async def scenario() -> None:
        ring = local_ring("cascade")
        async with running(ring, ring.engine(LIMITS)) as engine:
            text = SYSTEM
            for turn in range(3):
                cost = AnswerCost()
                said = await answer(engine, request(text, "speculative"), cost)
                assert said == expected("cascade", text)
                assert cost.cached_tokens >= (len(SYSTEM) if turn else 0)
                cached, text = cost.cached_tokens, text + said
            assert cached >= len(SYSTEM) + COUNT - 1

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["denoise", "cascade", "end_to_end"])
def test_requests_at_once_read_what_they_share_once(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        ring = local_ring(kind)
        async with running(ring, ring.engine(LIMITS)) as engine:
            counts = [counted(compute, monkeypatch) for compute in ring.computes]
            prompts = [SYSTEM + bytes([letter]) * 3 for letter in b"abcdef"]
            costs = [AnswerCost() for _ in prompts]
            texts = await asyncio.gather(
                *(answer(engine, request(p), c) for p, c in zip(prompts, costs, strict=True))
            )
            assert texts == [expected(kind, prompt) for prompt in prompts]
            assert sorted(cost.cached_tokens for cost in costs) == [0, *[len(SYSTEM)] * 5]
            assert [cost.replays for cost in costs] == [0] * 6
            own = 1 + len(SYSTEM) + 6 * (3 + COUNT - 1)  # after the BOS token
            assert [count for (count,) in counts] == [own] * len(counts)

    asyncio.run(scenario())


def test_a_draft_model_shares_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def proposal(text: bytes, source: int = 0) -> Proposal:
        read = ids(text)
        return Proposal(0, read, 1, len(text), SAMPLING, 3, text=list(text), source=source)

    compute, longer = stage(model("cascade"), range(3)), SYSTEM + b"and more"
    drafting, fresh = DraftModel(compute), DraftModel(stage(model("cascade"), range(3)))
    drafting.drafted({1: proposal(SYSTEM)})
    drafting.release(1, keep=True)
    assert (compute.requests, compute.copyable(1)) == ((), 1 + len(SYSTEM))
    positions = counted(compute, monkeypatch)
    drafts = drafting.drafted({2: proposal(longer, source=1)})[2]
    assert positions == [len(longer) - len(SYSTEM) + 2]
    assert drafts.ids.tolist() == fresh.drafted({2: proposal(longer)})[2].ids.tolist()
    drafting.release(2)
    compute.release(1)
    assert not compute.kept_bytes


def test_requests_of_others_share_nothing() -> None:
    async def scenario() -> None:
        ring = local_ring("cascade")
        async with running(ring, ring.engine(LIMITS)) as engine:
            for tenant in ("one", "another"):
                cost = AnswerCost()
                said = await answer(engine, request(SYSTEM, tenant=tenant), cost)
                assert (said, cost.cached_tokens) == (expected("cascade", SYSTEM), 0)

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["denoise", "cascade"])
def test_a_stage_that_kept_nothing_costs_a_replay_and_not_the_text(kind: str) -> None:
    async def scenario() -> None:
        ring = local_ring(kind, SlotLimits(16, prefix_bytes=0))
        async with running(ring, ring.engine(LIMITS)) as engine:
            assert await answer(engine, request(SYSTEM)) == expected(kind, SYSTEM)
            cost = AnswerCost()
            assert await answer(engine, request(SYSTEM), cost) == expected(kind, SYSTEM)
            assert (cost.replays, cost.cached_tokens) == (1, 0)

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["denoise", "cascade"])
def test_a_replica_without_the_prefix_computes_it(kind: str) -> None:
    async def scenario() -> None:
        ring = Ring(model(kind), chunk=4)
        addresses = [ring.start(range(1, 3)) for _ in range(2)]
        async with running(ring, ring.engine(LIMITS)) as engine:
            await until(lambda: len(engine.status()["stages"]) == 2)
            assert await answer(engine, request(SYSTEM)) == expected(kind, SYSTEM)
            await until(lambda: any(each.kept_bytes for each in ring.computes))
            (used,) = (at for at, each in enumerate(ring.computes) if each.kept_bytes)
            await ring.stop(addresses[used])
            await until(lambda: len(engine.status()["stages"]) == 1)
            cost = AnswerCost()
            assert await answer(engine, request(SYSTEM), cost) == expected(kind, SYSTEM)
            assert cost.cached_tokens == 0

    asyncio.run(scenario())


def test_a_request_whose_source_is_cancelled_reads_its_prompt_itself() -> None:
    async def scenario() -> None:
        ring = local_ring("cascade")
        async with running(ring, ring.engine(LIMITS)) as engine:
            first = asyncio.create_task(answer(engine, request(SYSTEM)))
            second = asyncio.create_task(answer(engine, request(SYSTEM)))
            await until(lambda: ring.cached_requests() > 0)
            first.cancel()
            assert await second == expected("cascade", SYSTEM)

    asyncio.run(scenario())


# The parts


@pytest.mark.parametrize("kind", ["denoise", "cascade", "end_to_end"])
@pytest.mark.parametrize("kept", [True, False])
def test_a_copied_context_gives_the_same_numbers(kind: str, kept: bool) -> None:
    """Copied from a slot, or from what was kept of it."""
    compute = stage(model(kind), range(1))
    compute.step(Activations([Row(1, 0, ids(SYSTEM + b"rejected"), 1)]), draft=True)
    if kept:
        compute.keep(1, len(SYSTEM))
        assert compute.requests == ()
    assert compute.copyable(1) >= len(SYSTEM)
    own = Row(2, len(SYSTEM), ids(b"its own"), 3, Choice(top=256), source=1)
    copied = compute.step(Activations([own]), draft=True)
    fresh = stage(model(kind), range(1)).step(
        Activations([Row(2, 0, ids(SYSTEM + b"its own"), 3, Choice(top=256))]), draft=True
    )
    assert copied.predictions and fresh.predictions
    carried = slice(-len(copied.state), None)
    assert np.allclose(copied.state, fresh.state[carried], atol=1e-5)
    assert np.allclose(copied.predictions.top_log_probs_RK, fresh.predictions.top_log_probs_RK,
                       atol=1e-5)  # fmt: skip
    with pytest.raises(MissingPrefixError):
        compute.step(Activations([replace(own, request=3, source=7)]))


def test_kept_contexts_stay_within_their_memory() -> None:
    kept, layers = KeptContexts(100), [torch.zeros(10)]
    for request in (1, 2):
        kept.put(request, CopiedContext(ids(b"ab"), layers))
    assert (kept.bytes, kept.length(1), kept.length(2)) == (80, 2, 2)
    kept.use(1)
    kept.put(3, CopiedContext(ids(b"abc"), layers))
    assert [kept.length(request) for request in (1, 2, 3)] == [2, 0, 3]
    kept.put(3, CopiedContext(ids(b"a"), [torch.zeros(100)]))
    assert (kept.bytes, kept.length(3)) == (40, 0)
    kept.drop(1)
    assert kept.bytes == 0


def test_the_longest_kept_prefix_of_the_same_route_and_tenant_is_found() -> None:
    kept, long = KeptPrefixes(), b"a" * 40
    kept.add(KeptContext(1, ("a",), "me", ids(long[:30] + b"x")))
    kept.add(KeptContext(2, ("a",), "me", ids(long[:20] + b"y")))
    kept.add(KeptContext(3, ("b",), "me", ids(long)))
    kept.add(KeptContext(4, ("a",), "you", ids(long)))
    assert kept.find("me", ("a",), ids(long)) == SharedPrefix(1, 30)
    assert kept.find("me", ("a",), ids(b"a" * 15 + b"b")) == NO_PREFIX
    kept.lose("a")
    assert kept.find("me", ("a",), ids(long)) == NO_PREFIX
    assert kept.find("me", ("b",), ids(long)) == SharedPrefix(3, 40)


def test_what_a_longer_context_contains_and_the_oldest_are_dropped() -> None:
    kept = KeptPrefixes(2)
    assert kept.add(KeptContext(1, (), "", ids(b"a" * 20))) == []
    assert [each.key for each in kept.add(KeptContext(2, (), "", ids(b"a" * 30)))] == [1]
    kept.add(KeptContext(3, (), "", ids(b"b" * 30)))
    kept.find("", (), ids(b"a" * 30))
    assert [each.key for each in kept.add(KeptContext(4, (), "", ids(b"c" * 30)))] == [3]


def test_the_route_with_the_most_kept_positions_is_found() -> None:
    kept = KeptPrefixes()
    kept.add(KeptContext(1, ("a",), "", ids(b"a" * 20)))
    kept.add(KeptContext(2, ("b",), "", ids(b"a" * 30)))
    assert kept.longest("", ids(b"a" * 40)) == (("b",), 30)
    assert kept.longest("", ids(b"b" * 40)) == ((), 0)
    assert kept.longest("another", ids(b"a" * 40)) == ((), 0)
