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
from dataclasses import dataclass, field
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
    Predictions,
    Row,
    is_finite,
    joined,
)
from blocktrain.serve.ring.envelope import FailureHead, StepEnvelope, StepResult
from blocktrain.serve.ring.laps import Laps
from blocktrain.serve.router.decode import (
    AnswerCost,
    Decoding,
    GenerationRequest,
    Proposal,
    TraversalCost,
    new_decoding,
)
from blocktrain.serve.router.first_block import DraftModel, FirstBlock
from blocktrain.serve.router.output import OutputToken, Spell
from blocktrain.serve.router.pipeline import Pipeline, Route
from blocktrain.serve.router.profile import NO_PROFILER, NOT_PROFILED, Profiler, Traversal

MAX_UNREAD = 32  # unread pieces after which a request pauses
MAX_REPLAYS = 5  # consecutive, without a result between them
WATCH_SECONDS = 0.25
SMOOTHING = 1 / 8
OWN_STAGE = "block 0"

log = logging.getLogger(__name__)


@dataclass(eq=False)
class ActiveRequest:
    """A request in progress: its current step, and what it waits for."""

    decoding: Decoding
    pieces: "asyncio.Queue[list[OutputToken] | BlocktrainError]" = field(
        default_factory=asyncio.Queue
    )
    key: int = 0  # names its context in every cache; a new context gets a new key
    route: Route | None = None
    row: Row | None = None  # as it was sent
    predictions: Predictions | None = None  # a result that is not taken in yet
    in_ring: bool = False
    sent_at: float = 0.0
    deadline: float | None = None  # for the step in the ring, or for a route
    replays: int = 0
    lost: bool = False  # a cache with its context is gone
    traversal: Traversal = NOT_PROFILED
    failed: bool = False
    cancelled: bool = False

    @property
    def complete(self) -> bool:
        """Whether the answer has ended and all of its pieces were read."""
        return (self.decoding.finished or self.failed) and self.pieces.empty()

    @property
    def ready(self) -> bool:
        paused = self.pieces.qsize() >= MAX_UNREAD
        over = self.failed or self.cancelled or self.decoding.finished
        return not (self.in_ring or paused or over)

    def send(self, row: Row, now: float, seconds: float) -> None:
        self.row, self.in_ring, self.sent_at, self.deadline = row, True, now, now + seconds

    def take_result(self, predictions: Predictions | None) -> None:
        self.in_ring, self.deadline, self.predictions = False, None, predictions

    def start_over(self) -> None:
        """Replay the context with the next step. A result that has arrived still counts."""
        self.in_ring, self.deadline, self.lost = False, None, True

    def next_proposal(self) -> Proposal:
        proposal = self.decoding.replay() if self.lost else self.decoding.propose()
        assert proposal is not None  # a finished request is not ready
        self.lost = False
        return proposal

    def fail(self, error: BlocktrainError) -> None:
        self.in_ring, self.deadline, self.failed = False, None, True
        self.pieces.put_nowait(error)


@dataclass(frozen=True)
class EngineLimits:
    requests: int = 64
    patience_seconds: float = 10.0  # wait for a lost stage without a replica
    step_seconds: float = 30.0  # wait for a step while all its stages seem alive


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
        self._active: list[ActiveRequest] = []
        self._in_ring: dict[int, ActiveRequest] = {}
        self._keys = itertools.count(1)
        self._released: list[tuple[int, Route]] = []  # contexts that are no longer needed
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

    def status(self) -> dict[str, Any]:
        """The engine's state, for health checks and people. `alive`: whether every block is
        available."""
        return {
            "alive": not self._pipeline.missing,
            "stages": [
                {
                    "address": stage.address,
                    "blocks": list(range(stage.first, stage.stop)),
                    "requests": stage.load,
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
            active = self._in_ring.pop(key, None)
            if active is None:
                continue  # cancelled, or restarted on another route
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
            if ready:
                await self._advance(ready)

    async def _forget(self) -> None:
        """Release contexts that are no longer needed, here and at the stages."""
        released, self._released = self._released, []
        loop = asyncio.get_running_loop()
        for key, route in released:
            await loop.run_in_executor(self._thread, self._release, key)
            with suppress(BlocktrainError):  # the stage and its cache are gone
                await self._pipeline.release(key, route)

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
            active.route = self._pipeline.route()
            if active.route is None:
                patience = self._limits.patience_seconds
                active.deadline = active.deadline or time.monotonic() + patience
                return False
            self._pipeline.enter(active.route)
        return True

    async def _advance(self, ready: Sequence[ActiveRequest]) -> None:
        """Compute the next step of each of these requests in the first block, and send it into the
        ring."""
        proposals, laps = {}, self._profiler.laps()
        for active in ready:
            proposal = active.next_proposal()
            if proposal.start == 0:
                self._leave_context(active)
                active.key = next(self._keys)
            proposals[active.key] = proposal
        by_key = {active.key: active for active in ready}
        await self._forget()  # free the slots of old contexts for the new ones
        try:
            await self._prefill_stages(by_key, proposals)
            started = time.monotonic()
            parts = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._step, proposals, laps
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
            for active in ready:
                active.fail(UnavailableError(f"block 0 failed: {error}"))
        else:
            seconds = time.monotonic() - started
            rounds = 1 + max(proposal.drafts for proposal in proposals.values())
            self._pace.draft = _smoothed(self._pace.draft, seconds / rounds)
            laps.lap("back from the thread")
            for active in ready:
                active.traversal.laps.include(laps, "queue")
                active.decoding.cost.add_seconds({OWN_STAGE: seconds})
            await self._dispatch(parts, by_key)

    def _step(self, proposals: Mapping[int, Proposal], laps: Laps) -> list[Activations]:
        laps.lap("proposals, and waiting for the thread")
        if self._draft_model:
            proposals = self._draft_model.drafted(proposals)
            laps.lap("draft model")
        return self._first_block.step(proposals, laps)

    def _release(self, key: int) -> None:
        self._first_block.first.release(key)
        if self._draft_model:
            self._draft_model.release(key)

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
            active.send(part.rows[0], time.monotonic(), self._limits.step_seconds)
            if active.route:
                self._in_ring[active.key] = active
                by_route[active.route].append(part)
            else:
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
                if active.in_ring:
                    self._start_over(active, "a step did not return in time")
                else:
                    active.fail(
                        UnavailableError(f"the model is unavailable: {self._pipeline.missing}")
                    )

    def _start_over(self, active: ActiveRequest, why: str) -> None:
        self._leave_route(active)
        active.replays += 1
        if active.replays > MAX_REPLAYS:
            active.fail(UnavailableError(f"gave up after {MAX_REPLAYS} attempts: {why}"))
        else:
            log.info("restarting a request: %s", why)
            active.start_over()

    def _leave_context(self, active: ActiveRequest) -> None:
        self._in_ring.pop(active.key, None)
        if active.key:
            self._released.append((active.key, active.route or ()))
            active.key = 0

    def _leave_route(self, active: ActiveRequest) -> None:
        self._leave_context(active)
        if active.route is not None:
            self._pipeline.leave(active.route)
            active.route = None

    def _drop(self, active: ActiveRequest) -> None:
        active.cancelled = True
        self._active.remove(active)
        self._leave_route(active)
        self._wake.set()


def _smoothed(before: float | None, now: float) -> float:
    return now if before is None else before + SMOOTHING * (now - before)
