"""The router's engine: many requests at once, one step of each in the ring, and recovery when a
stage, a step or a cache is lost."""

import asyncio
import itertools
import logging
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from secrets import randbits
from typing import Any

from blocktrain.errors import (
    BlocktrainError,
    CacheFullError,
    MissingPrefixError,
    OverloadedError,
    UnavailableError,
)
from blocktrain.serve.ring.activations import (
    NOT_FINITE,
    Activations,
    Row,
    is_finite,
    joined,
)
from blocktrain.serve.ring.envelope import FailureHead, StepEnvelope, StepResult
from blocktrain.serve.ring.laps import Laps
from blocktrain.serve.ring.turns import CPU_CHUNK, PromptTurns
from blocktrain.serve.router.active_request import ActiveRequest
from blocktrain.serve.router.decode import (
    AnswerCost,
    GenerationRequest,
    Proposal,
    TraversalCost,
    new_decoding,
)
from blocktrain.serve.router.first_block import DraftModel, FirstBlock
from blocktrain.serve.router.output import OutputToken, Spell
from blocktrain.serve.router.pipeline import Pipeline, Route
from blocktrain.serve.router.placement import Placement, Release
from blocktrain.serve.router.profile import NO_PROFILER, Profiler

MAX_REPLAYS = 5  # consecutive, without a result between them
WATCH_SECONDS = 0.25
SMOOTHING = 1 / 8
OWN_STAGE = "block 0"

Cut = tuple[Proposal, Proposal | None]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineLimits:
    requests: int = 64
    patience_seconds: float = 10.0  # wait for a lost stage without a replica
    step_seconds: float = 30.0  # wait for a step while all its stages seem alive
    prefill_chunk: int = CPU_CHUNK  # positions of prompts between two steps of other requests


class RingEngine:
    """Generates answers with the first block and a pipeline of stages."""

    def __init__(
        self,
        first_block: FirstBlock,
        pipeline: Pipeline,
        name: str,
        wire: str = "fp32",
        limits: EngineLimits = EngineLimits(),  # noqa: B008 - frozen
        spell: Spell = lambda token: b"",
        draft_model: DraftModel | None = None,
        profiler: Profiler = NO_PROFILER,
    ) -> None:
        self._profiler = profiler
        self._spell, self._draft_model = spell, draft_model
        self._first_block, self._pipeline = first_block, pipeline
        self._name, self._wire_kind, self._limits = name, wire, limits
        self._pace = TraversalCost()
        self._prompts = PromptTurns(limits.prefill_chunk)
        self._active: list[ActiveRequest] = []
        self._in_ring: dict[int, ActiveRequest] = {}
        self._keys = itertools.count(1 + randbits(62))  # not those of another router
        self._released: list[Release] = []
        self._placement = Placement(pipeline, first_block.first.copyable, limits.prefill_chunk)
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "compute")

    async def run(self) -> None:
        """Run until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pipeline.run(self))
                tasks.create_task(self._turns())
                tasks.create_task(self._watch())
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def generate(
        self, request: GenerationRequest, cost: AnswerCost
    ) -> AsyncGenerator[list[OutputToken], None]:
        """The final tokens of an answer in order, without the stop string. Updates `cost`. Closing
        the generator cancels the request."""
        if len(self._active) >= self._limits.requests:
            raise OverloadedError(
                f"the server is full: {len(self._active)} answers in progress; try again later"
            )
        config = self._first_block.first.config
        decoding = new_decoding(request, config, cost, self._pace, self._spell)
        active = ActiveRequest(decoding, traversal=self._profiler.begin())
        self._active.append(active)
        try:
            if active.decoding.opening:
                yield active.decoding.opening
            while not active.complete:
                self._wake.set()
                piece = await active.pieces.get()
                if isinstance(piece, BlocktrainError):
                    raise piece
                if piece:
                    yield piece
        finally:
            self._drop(active)

    @property
    def slots(self) -> int:
        """How many requests the cache of the first block has room for."""
        return self._first_block.first.slots

    def status(self) -> dict[str, Any]:
        """The engine's state, for health checks and people. `alive`: whether every block is
        available."""
        return {
            "alive": not self._pipeline.missing,
            "stages": [
                {
                    "address": stage.address,
                    "blocks": list(range(stage.first, stage.stop)),
                    "requests": sum(stage.address in (a.route or ()) for a in self._active),
                }
                for stage in self._pipeline.stages
            ],
            "missing": self._pipeline.missing,
            "requests": len(self._active),
            "in_the_ring": len(self._in_ring),
        }

    # Called by the pipeline

    def arrived(self, result: StepResult) -> None:
        for key, predictions in result.predictions.items():
            active = self._in_ring.get(key)
            if active is None:
                continue  # cancelled, or restarted on another route
            if not len(predictions.tokens_R):
                active.decoding.cost.add_seconds(dict(result.seconds))
                active.chunk_arrived(time.monotonic(), self._limits.step_seconds)
                continue
            if not active.expects(predictions):
                continue  # a second result of an earlier step
            del self._in_ring[key]
            active.take_result(predictions)
            active.traversal.returned(result.profile)
            active.decoding.cost.add_seconds(dict(result.seconds))
            seconds = time.monotonic() - active.sent_at
            outside = max(0.0, seconds - sum(result.seconds.values()))
            active.decoding.cost.network_seconds += outside
            self._pace.traversal = _smoothed(self._pace.traversal, seconds)
        self._wake.set()

    def failed(self, address: str, failure: FailureHead) -> None:
        if failure.hop:
            self._pipeline.avoid((address, failure.hop))
        for key in failure.requests:
            active = self._in_ring.pop(key, None)
            if active is None:
                continue
            if failure.code == "cache_full":
                active.fail(OverloadedError(f"a stage is full: {failure.message}"))
            else:
                self._start_over(active, failure.message)
        self._wake.set()

    def lost(self, address: str) -> None:
        self._placement.lose(address)
        for active in self._active:
            if active.route and address in active.route:
                self._start_over(active, f"the stage at {address} is gone")
        self._wake.set()

    def joined(self) -> None:
        self._wake.set()

    # The loop

    async def _turns(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._forget()
            self._take_results()
            ready = [active for active in self._active if active.ready and self._routed(active)]
            ready = [active for active in ready if self._prepared(active)]
            await self._forget()  # free the slots of old contexts for the new ones
            steps = {active.key: active for active in ready if not active.propose().context}
            await self._advance({key: steps[key].propose().cut(0) for key in steps}, steps)
            await self._read_prompts(ready)

    async def _forget(self) -> None:
        """Release contexts that are no longer needed, here and at the stages."""
        released, self._released = self._released, []
        loop = asyncio.get_running_loop()
        for key, route, keep in released:
            await loop.run_in_executor(self._thread, self._release, key, keep)
            with suppress(BlocktrainError):  # the stage and its cache are gone
                await self._pipeline.release(key, route, keep)

    def _take_results(self) -> None:
        for active in self._active:
            predictions, active.predictions = active.predictions, None
            if predictions is None:
                continue
            assert active.row is not None
            active.traversal.laps.lap("waiting for the loop")
            active.pieces.put_nowait(active.decoding.take(active.row, predictions))
            active.traversal.laps.lap("decoding")
            active.traversal = self._profiler.finish(active.traversal, active.key)
            active.replays = 0

    def _routed(self, active: ActiveRequest) -> bool:
        if active.route is None:
            active.route = self._placement.route(active, self._active)
            if active.route is None:
                patience = self._limits.patience_seconds
                active.deadline = active.deadline or time.monotonic() + patience
                return False
        return True

    def _prepared(self, active: ActiveRequest) -> bool:
        """Decide what the request sends next. A proposal that starts over gets a new context, which
        waits while another request reads positions that both begin with."""
        if active.proposal is None and active.propose().start == 0:
            self._leave_context(active)
        if not active.key:
            prefix = self._placement.prefix(active, self._active)
            if prefix is None:
                return False
            active.begin(next(self._keys), prefix)
        return True

    async def _read_prompts(self, ready: Sequence[ActiveRequest]) -> None:
        """Read a chunk of the prompts of these requests."""
        prompts = {
            active.key: active
            for active in ready
            if active.ready and active.proposal and active.proposal.context
        }
        counts = self._prompts.choose(
            {key: active.propose().context for key, active in prompts.items()}
        )
        cuts = {key: prompts[key].propose().cut(count) for key, count in counts.items()}
        whole = {key: cut for key, cut in cuts.items() if cut[1] is None}
        await self._advance({key: cut for key, cut in cuts.items() if key not in whole}, prompts)
        await self._advance(whole, prompts)
        if len(whole) < len(prompts):
            self._wake.set()

    async def _advance(
        self, cuts: Mapping[int, Cut], active_of: Mapping[int, ActiveRequest]
    ) -> None:
        """Compute proposals in the first block, and send them into the ring. The second part of a
        cut is what remains to be sent."""
        if not cuts:
            return
        proposals = {key: proposal for key, (proposal, _) in cuts.items()}
        by_key, laps = {key: active_of[key] for key in cuts}, self._profiler.laps()
        compute = self._step if all(each.read for each in proposals.values()) else self._read
        try:
            await self._prefill_stages(by_key, proposals)
            started = time.monotonic()
            parts = await asyncio.get_running_loop().run_in_executor(
                self._thread, compute, proposals, laps
            )
        except MissingPrefixError as error:
            for key in error.requests:
                self._start_over(by_key[key], "the router's own cache dropped its context")
            self._wake.set()
        except CacheFullError as error:
            for key in error.requests or by_key:
                by_key[key].fail(OverloadedError(str(error)))
            self._wake.set()
        except (BlocktrainError, RuntimeError) as error:
            log.exception("a batch failed")
            for active in by_key.values():
                active.fail(UnavailableError(f"block 0 failed: {error}"))
        else:
            seconds = time.monotonic() - started
            laps.lap("back from the thread")
            for key, active in by_key.items():
                active.traversal.laps.include(laps, "queue")
                active.decoding.cost.add_seconds({OWN_STAGE: seconds})
                if active.key == key:  # else it has started over meanwhile
                    active.proposal = cuts[key][1]
            if compute == self._step:
                rounds = 1 + max(proposal.drafts for proposal in proposals.values())
                self._pace.draft = _smoothed(self._pace.draft, seconds / rounds)
            await self._dispatch(parts, by_key)

    def _read(self, chunks: Mapping[int, Proposal], laps: Laps) -> list[Activations]:
        laps.lap("proposals, and waiting for the thread")
        if self._draft_model:
            self._draft_model.read(chunks)
            laps.lap("draft model")
        return self._first_block.read(chunks, laps)

    def _step(self, proposals: Mapping[int, Proposal], laps: Laps) -> list[Activations]:
        laps.lap("proposals, and waiting for the thread")
        if self._draft_model:
            proposals = self._draft_model.drafted(proposals)
            laps.lap("draft model")
        return self._first_block.step(proposals, laps)

    def _release(self, key: int, keep: int) -> None:
        if keep:
            self._first_block.first.keep(key, keep)
        else:
            self._first_block.first.release(key)
        if self._draft_model:
            self._draft_model.release(key, keep=keep > 0)

    async def _prefill_stages(
        self, by_key: dict[int, ActiveRequest], proposals: dict[int, Proposal]
    ) -> None:
        """If stages can read context by themselves, let them do so while the router does. A prefill
        is always the first message with a request's new key, so no stage can take it for an older
        context of that request."""
        by_route: dict[Route, list[Row]] = defaultdict(list)
        for row in self._first_block.prefills(proposals):
            if route := by_key[row.request].route:
                by_route[route].append(row)
        for route, rows in by_route.items():
            try:
                await self._pipeline.prefill(rows, route)
            except BlocktrainError as error:
                log.info("cannot send a context to a stage: %s", error)  # `lost` will follow

    async def _dispatch(
        self, parts: Sequence[Activations], by_key: dict[int, ActiveRequest]
    ) -> None:
        by_route: dict[Route, list[Activations]] = defaultdict(list)
        for part in parts:
            active = by_key[part.rows[0].request]
            if active.cancelled or active.route is None:
                continue  # cancelled, or lost a stage meanwhile
            if not is_finite(part):
                active.fail(UnavailableError(f"block 0 {NOT_FINITE}"))
                continue
            (row,), now = part.rows, time.monotonic()
            if row.read:
                active.send(row, now, self._limits.step_seconds)
            elif active.route:
                active.send_chunk(now, self._limits.step_seconds)
            if active.route:
                self._in_ring[active.key] = active
                by_route[active.route].append(part)
            elif row.read:
                active.take_result(part.predictions)
                self._wake.set()
        for route, together in by_route.items():
            step = StepEnvelope(
                joined(together),
                self._name,
                route[1:],
                self._wire_kind,
                profile=self._profiler.asks_stages,
            )
            try:
                await self._pipeline.send(step, route)
                for part in together:
                    by_key[part.rows[0].request].traversal.laps.lap("encode and send")
            except BlocktrainError as error:
                for part in together:
                    self._start_over(by_key[part.rows[0].request], str(error))
                self._wake.set()

    # Losses

    async def _watch(self) -> None:
        """Restart steps that take too long, and fail requests that wait too long for a route."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = time.monotonic()
            for active in self._active:
                if active.deadline is None:
                    continue
                self._wake.set()  # broken pairs of stages may be retried
                if now < active.deadline:
                    continue
                if active.waits_for_stages:
                    self._start_over(active, "a step did not return in time")
                else:
                    active.fail(
                        UnavailableError(f"the model is unavailable: {self._pipeline.missing}")
                    )

    def _start_over(self, active: ActiveRequest, why: str) -> None:
        if active.source:  # which may be what was missing
            self._placement.forget(active.source)
        self._leave_route(active)
        active.replays += 1
        if active.replays > MAX_REPLAYS:
            active.fail(UnavailableError(f"gave up after {MAX_REPLAYS} attempts: {why}"))
        else:
            log.info("restarting a request: %s", why)
            active.start_over()

    def _leave_context(self, active: ActiveRequest) -> None:
        self._in_ring.pop(active.key, None)
        self._prompts.forget([active.key])
        if active.key:
            self._released.append(Release(active.key, active.route or ()))
            active.key = 0

    def _keep_context(self, active: ActiveRequest) -> None:
        """Keep the context of a request that has ended, if it is of use for others."""
        if released := self._placement.keep(active):
            self._released += released
            self._in_ring.pop(active.key, None)
            self._prompts.forget([active.key])
            active.key = 0

    def _leave_route(self, active: ActiveRequest) -> None:
        self._leave_context(active)
        active.route = None

    def _drop(self, active: ActiveRequest) -> None:
        active.cancelled = True
        self._active.remove(active)
        self._keep_context(active)
        self._leave_route(active)
        self._wake.set()


def _smoothed(before: float | None, now: float) -> float:
    return now if before is None else before + SMOOTHING * (now - before)
