"""Many requests through a ring of real sockets in one process: what they leave behind, what they
survive."""

import asyncio
import copy
import time
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from tests.support.local_ring import SECONDS, Ring, answer, anyone, running, until
from tests.support.models import awake_stack
from tests.support.serving import of_kind, reference_text, stage, text_of

from blocktrain.config import load_config
from blocktrain.errors import OverloadedError, UnavailableError
from blocktrain.model.stack import Stack
from blocktrain.numerics.sampling import Sampling
from blocktrain.protocol.addresses import bound_socket
from blocktrain.protocol.framing import FrameKind, FrameMessage
from blocktrain.protocol.ring_keys import ROUTER, STAGE
from blocktrain.serve.ring.batch import SlotLimits
from blocktrain.serve.ring.connection import RingConnection
from blocktrain.serve.ring.handshake import RingListener
from blocktrain.serve.ring.stage import PATIENCE_SECONDS
from blocktrain.serve.router.active_request import MAX_UNREAD
from blocktrain.serve.router.decode import AnswerCost, GenerationRequest
from blocktrain.serve.router.engine import EngineLimits
from blocktrain.serve.router.first_block import DraftModel
from blocktrain.serve.router.profile import Profiler

ROOT = Path(__file__).resolve().parents[3]
WINDOW = 16
PROMPT, LONG = b"some words", 40
POISON = 10  # a byte that no expected answer has
SAMPLING = Sampling(1.0, seed=3)


@lru_cache
def model(kind: str) -> Stack:
    tiny = ["model.width=16", "model.heads=2", f"model.window={WINDOW}"]
    return awake_stack(of_kind(load_config(ROOT / "configs" / "tiny.toml", tiny), kind))


@lru_cache
def expected(kind: str) -> bytes:
    return reference_text(model(kind), PROMPT, LONG, SAMPLING)


def request(mode: str = "ar", **more: object) -> GenerationRequest:
    return GenerationRequest(PROMPT, LONG, mode, 0, sampling=SAMPLING, **more)  # type: ignore[arg-type]


def test_another_model_may_write_the_drafts() -> None:
    async def scenario() -> None:
        ring = Ring(model("cascade"))
        ring.start(range(1, 3))
        drafting = stage(model("cascade"), range(3))
        async with running(ring, ring.engine(draft=DraftModel(drafting))) as engine:
            costs = [AnswerCost() for _ in range(3)]
            asked = [answer(engine, request("speculative", drafts="model"), c) for c in costs]
            assert await asyncio.gather(*asked) == [expected("cascade")] * 3
            # Past the window, both read the text from different places.
            assert all(cost.accepted > LONG / 4 for cost in costs)
            await until(lambda: not drafting.requests and not ring.cached_requests())

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["denoise", "cascade"])
def test_requests_of_every_mode_at_once_leave_nothing_behind(kind: str) -> None:
    async def scenario() -> None:
        ring = Ring(model(kind))
        ring.start(range(1, 2))
        ring.start(range(2, 3))
        async with running(ring, ring.engine()) as engine:
            modes = ["ar", "speculative", "sweep"] * 2
            accounts = [AnswerCost() for _ in modes]
            asked = [answer(engine, request(m), a) for m, a in zip(modes, accounts, strict=True)]
            assert await asyncio.gather(*asked) == [expected(kind)] * len(modes)
            assert [account.reason for account in accounts] == ["length"] * len(modes)
            assert {"block 0", "block 1", "block 2"} == set(accounts[0].stage_seconds)
            await until(lambda: ring.cached_requests() == 0)
            assert engine.status()["requests"] == engine.status()["in_the_ring"] == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["denoise", "cascade"])
def test_a_profile_divides_the_whole_time_of_a_request(kind: str) -> None:
    async def scenario() -> None:
        ring, profiler = Ring(model(kind)), Profiler()
        ring.start(range(1, 2))
        ring.start(range(2, 3))
        async with running(ring, ring.engine(profiler=profiler)) as engine:
            started, cost = time.perf_counter(), AnswerCost()
            assert await answer(engine, request("speculative"), cost) == expected(kind)
            whole = time.perf_counter() - started
        rows = profiler.rows()
        profiled = cost.traversals * sum(row.seconds for row in rows)
        assert 0.5 * whole < profiled <= whole
        assert sum(row.share for row in rows) == pytest.approx(1.0)
        places = {row.place: row.what for row in rows}
        assert set(places) == {"router", "block 1", "block 2", "network"}
        own = {(row.place, row.what) for row in rows}
        steps = ("decode", "queue", "batching", "back from the thread", "encode")
        assert {(stage, step) for stage in ("block 1", "block 2") for step in steps} <= own
        router = ("queue", "encode and send", "decoding")
        assert {("router", step) for step in router} <= own

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["denoise", "cascade"])
def test_the_readout_final_is_of_the_last_block(kind: str) -> None:
    async def scenario() -> None:
        ring = Ring(model(kind), "final")
        ring.start(range(1, 2))
        ring.start(range(2, 3))
        text = reference_text(model(kind), PROMPT, LONG, SAMPLING, "final")
        async with running(ring, ring.engine()) as engine:
            for mode in ("ar", "speculative"):
                assert await answer(engine, request(mode)) == text

    asyncio.run(scenario())


def test_one_block_needs_no_ring() -> None:
    async def scenario() -> None:
        ring = Ring(model("end_to_end"))
        async with running(ring, ring.engine()) as engine:
            for mode in ("ar", "speculative", "sweep"):
                assert await answer(engine, request(mode)) == expected("end_to_end")

    asyncio.run(scenario())


def test_stages_that_announce_one_address_do_not_end_the_router() -> None:
    async def scenario() -> None:
        ring = Ring(model("denoise"))
        first = ring.start(range(1, 3))
        ring.start(range(1, 3), announced=first)
        async with running(ring, ring.engine()) as engine:
            assert await answer(engine, request()) == expected("denoise")
            assert [stage["address"] for stage in engine.status()["stages"]] == [first]

    asyncio.run(scenario())


def test_a_stage_that_leaves_while_others_are_introduced_is_only_missed() -> None:
    """While the first of two like stages is told of the last one, the second is gone."""

    async def scenario() -> None:
        ring = Ring(model("denoise"))
        like = [ring.start(range(1, 2)), ring.start(range(1, 2))]
        last = ring.start(range(2, 3))

        async def reach(address: str) -> RingConnection:
            if address == last:
                await until(lambda: known() == set(like))
            connection = await ring.reach(address)
            send = connection.send

            async def send_late(message: FrameMessage) -> None:
                if message.kind is FrameKind.DIAL and known() > set(like):
                    (other,) = set(like) - {address}
                    await ring.stop(other)
                    await until(lambda: other not in known())
                await send(message)

            connection.send = send_late  # type: ignore[method-assign]
            return connection

        engine = ring.engine(reach=reach)

        def known() -> set[str]:
            return {stage["address"] for stage in engine.status()["stages"]}

        async with running(ring, engine), asyncio.timeout(SECONDS):
            await until(lambda: len(ring.servers) == 2)
            assert await answer(engine, request()) == expected("denoise")
            assert known() == set(ring.servers)

    asyncio.run(scenario())


def test_stages_that_leave_after_their_hello_do_not_end_the_router() -> None:
    async def scenario() -> None:
        ring = Ring(model("denoise"))
        ring.start(range(1, 2))
        ring.start(range(2, 3))
        fickle = bound_socket("127.0.0.1", 0)
        address = f"127.0.0.1:{fickle.getsockname()[1]}"
        hello = {"role": STAGE, "name": "fickle", "blocks": [1], "address": ""}
        visits: list[RingConnection] = []

        async def leave(connection: RingConnection) -> None:
            visits.append(connection)

        ring.servers[address] = RingListener(
            fickle, None, lambda: hello, leave, roles=[ROUTER], check=anyone
        )
        ring.runs[address] = asyncio.create_task(asyncio.sleep(0))

        async def reach(dialled: str) -> RingConnection:
            connection = await ring.reach(dialled)
            if dialled == address:
                await connection.wait_closed()  # when it is introduced it is gone
            return connection

        async with running(ring, ring.engine(reach=reach)) as engine, asyncio.timeout(SECONDS):
            await until(lambda: len(visits) > 2)
            assert await answer(engine, request()) == expected("denoise")

    asyncio.run(scenario())


@pytest.mark.parametrize(("kind", "block"), [("denoise", 1), ("cascade", 0), ("end_to_end", 0)])
def test_a_nan_fails_its_own_request_and_no_other(kind: str, block: int) -> None:
    """A block that computes NaN for one byte; requests with and without it share slots."""

    async def scenario() -> None:
        assert POISON not in expected(kind)
        stack = copy.deepcopy(model(kind))
        with torch.no_grad():
            stack.blocks[block].embed.weight[POISON] = torch.nan  # type: ignore[union-attr, index]
        ring = Ring(stack)
        if kind != "end_to_end":
            ring.start(range(1, 3))
        cursed = replace(request("speculative"), prompt=PROMPT[:-1] + bytes([POISON]))
        filtered = replace(SAMPLING, top_p=0.9)
        async with running(ring, ring.engine()) as engine, asyncio.timeout(SECONDS):
            for sampling in (SAMPLING, filtered):
                curse = asyncio.gather(
                    *(answer(engine, replace(cursed, sampling=sampling)) for _ in range(2)),
                    return_exceptions=True,
                )
                texts = await asyncio.gather(*(answer(engine, request()) for _ in range(3)))
                assert texts == [expected(kind)] * 3
                for error in await curse:
                    assert isinstance(error, UnavailableError)
                    assert f"block {block}" in str(error)
            await until(lambda: ring.cached_requests() == 0)

    asyncio.run(scenario())


def test_a_request_that_is_closed_early_is_forgotten_everywhere() -> None:
    async def scenario() -> None:
        ring = Ring(model("denoise"))
        ring.start(range(1, 3))
        async with running(ring, ring.engine()) as engine:
            pieces = engine.generate(request(), AnswerCost())
            await anext(pieces)
            assert ring.cached_requests() == 1
            await pieces.aclose()
            await until(lambda: ring.cached_requests() == 0)

    asyncio.run(scenario())


def test_a_client_that_reads_nothing_pauses_its_request() -> None:
    async def scenario() -> None:
        ring = Ring(model("denoise"))
        ring.start(range(1, 3))
        async with running(ring, ring.engine()) as engine:
            account = AnswerCost()
            pieces = engine.generate(request(), account)
            text = text_of(await anext(pieces))
            await until(lambda: account.output_tokens == MAX_UNREAD + 1)
            await asyncio.sleep(0.2)
            assert account.output_tokens == MAX_UNREAD + 1
            text += b"".join([text_of(piece) async for piece in pieces])
            assert text == expected("denoise")

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["denoise", "cascade"])
def test_a_context_that_a_stage_dropped_is_replayed(kind: str) -> None:
    """A stage with room for one context, which is not safe, and two requests."""

    async def scenario() -> None:
        ring = Ring(model(kind))
        ring.start(range(1, 3), SlotLimits(1, idle_seconds=0.0))
        async with running(ring, ring.engine()) as engine:
            account = AnswerCost()
            first = engine.generate(request(), account)
            head = text_of(await anext(first))
            await until(lambda: account.output_tokens == MAX_UNREAD + 1)  # now it rests
            assert await answer(engine, request("speculative")) == expected(kind)
            rest = b"".join([text_of(piece) async for piece in first])
            assert head + rest == expected(kind)
            assert account.replays > 0

    asyncio.run(scenario())


def test_a_full_stage_refuses_at_once() -> None:
    async def scenario() -> None:
        ring = Ring(model("denoise"))
        ring.start(range(1, 3), SlotLimits(1))
        async with running(ring, ring.engine()) as engine:
            first = engine.generate(request(), AnswerCost())
            await anext(first)
            async with asyncio.timeout(PATIENCE_SECONDS / 2):
                with pytest.raises(OverloadedError, match="all 1 slots"):
                    await answer(engine, request())
            await first.aclose()
            await until(lambda: ring.cached_requests() == 0)
            assert await answer(engine, request()) == expected("denoise")

    asyncio.run(scenario())


def test_stages_that_do_not_reach_each_other_are_passed_by() -> None:
    async def scenario() -> None:
        ring = Ring(model("cascade"))
        ring.start(range(1, 2))
        cut_off = ring.start(range(2, 3))
        ring.cut.add(cut_off)
        ring.start(range(2, 3))
        async with running(ring, ring.engine()) as engine:
            await until(lambda: len(engine.status()["stages"]) == 3)
            account = AnswerCost()
            texts = await asyncio.gather(
                answer(engine, request(), account), answer(engine, request())
            )
            assert texts == [expected("cascade")] * 2

    asyncio.run(scenario())


def test_too_many_requests_are_refused_and_no_stage_is_an_error_in_bounded_time() -> None:
    async def scenario() -> None:
        ring = Ring(model("denoise"))
        address = ring.start(range(1, 3))
        engine = ring.engine(EngineLimits(requests=1, patience_seconds=0.5))
        async with running(ring, engine):
            pieces = engine.generate(request(), AnswerCost())
            await anext(pieces)
            with pytest.raises(OverloadedError):
                await answer(engine, request())
            await ring.stop(address)
            async with asyncio.timeout(SECONDS):
                with pytest.raises(UnavailableError, match="no stage has block 1, 2"):
                    async for _ in pieces:
                        pass

    asyncio.run(scenario())


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_fewer_bits_between_stages_still_answer(wire: str) -> None:
    async def scenario() -> None:
        ring = Ring(model("cascade"))
        ring.start(range(1, 3))
        async with running(ring, ring.engine(wire=wire)) as engine:
            assert len(await answer(engine, request())) == LONG

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["denoise", "cascade"])
@pytest.mark.parametrize("mode", ["ar", "speculative", "sweep"])
def test_replayed_frames_spoil_at_most_the_answers_of_their_time(
    kind: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage sends every step and every result twice, and old ones again. It could as well send
    wrong results; the router and the other stages go on."""
    send = RingConnection.send
    sent: list[FrameMessage] = []

    async def replay(connection: RingConnection, message: FrameMessage) -> None:
        await send(connection, message)
        if message.kind in (FrameKind.STEP, FrameKind.RESULT):
            older = [each for each in sent if each.kind is message.kind][-5:-4]
            sent.append(message)
            for again in (message, *older):
                await send(connection, again)

    async def scenario() -> None:
        ring = Ring(model(kind))
        ring.start(range(1, 2))
        ring.start(range(2, 3))
        async with running(ring, ring.engine()) as engine:
            with monkeypatch.context() as patched:
                patched.setattr(RingConnection, "send", replay)
                async with asyncio.timeout(SECONDS):
                    await asyncio.gather(
                        *(answer(engine, request(mode)) for _ in range(2)), return_exceptions=True
                    )
            assert len(sent) > 5
            assert await answer(engine, request(mode)) == expected(kind)

    asyncio.run(scenario())
