"""The router's engine: many requests at once, a step of each through the ring, and what to do when
a stage, a step or a cache is lost.
"""

import asyncio
import itertools
import logging
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from blocktrain.errors import (
    BlocktrainError,
    CacheFullError,
    MissingPrefixError,
    OverloadedError,
    UnavailableError,
)
from blocktrain.serve.ring.envelope import FailureHead, StepEnvelope
from blocktrain.serve.router.decode import (
    AnswerCost,
    Decoding,
    GenerationRequest,
    Piece,
    Proposal,
    TraversalCost,
    new_decoding,
)
from blocktrain.serve.router.first_block import FirstBlock
from blocktrain.serve.router.pipeline import Pipeline, Route
from blocktrain.serve.stage.batch import Activations, Row, is_finite, joined, split_rows

MAX_UNREAD = 32  # pieces a client may leave unread before its request pauses
MAX_REPLAYS = 5  # in a row, without a result between them
WATCH_SECONDS = 0.25
SMOOTHING = 1 / 8
OWN_STAGE = "block 0"

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(eq=False)
class ActiveRequest:
    """A request in progress: where its current step is, and what it waits for."""

    decoding: Decoding
    pieces: "asyncio.Queue[Piece | BlocktrainError]" = field(default_factory=asyncio.Queue)
    key: int = 0  # of its context in every cache; a new context gets a new key
    route: Route | None = None
    row: Row | None = None  # as it was sent
    readout_RV: np.ndarray | None = None  # a result that is not taken in yet
    in_ring: bool = False
    sent_at: float = 0.0
    deadline: float | None = None  # of the step in the ring, or of the wait for a route
    replays: int = 0
    lost: bool = False  # a cache that had its context is gone
    failed: bool = False
    cancelled: bool = False

    @property
    def cost(self) -> AnswerCost:
        return self.decoding.cost

    @property
    def complete(self) -> bool:
        """Nothing more will come but what is in the queue already."""
        return (self.decoding.finished or self.failed) and self.pieces.empty()

    @property
    def ready(self) -> bool:
        paused = self.pieces.qsize() >= MAX_UNREAD
        over = self.failed or self.cancelled or self.decoding.finished
        return not (self.in_ring or paused or over)

    def send(self, row: Row, now: float, seconds: float) -> None:
        self.row, self.in_ring, self.sent_at, self.deadline = row, True, now, now + seconds

    def take_result(self, readout_RV: np.ndarray) -> None:
        self.in_ring, self.deadline, self.readout_RV = False, None, readout_RV

    def wait_until(self, deadline: float) -> None:
        if self.deadline is None:
            self.deadline = deadline

    def start_over(self) -> None:
        """Replay the context with the next step; a result that has arrived still counts."""
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
    patience_seconds: float = 10.0  # for a lost stage to come back, if no other has its block
    step_seconds: float = 30.0  # for a step to come back while all its stages seem alive


class RingEngine:
    """Implements `http.answer.AnswerEngine` over the first block and a pipeline of stages."""

    def __init__(
        self,
        model: str,
        first_block: FirstBlock,
        pipeline: Pipeline,
        name: str,
        wire: str = "fp32",
        limits: EngineLimits = EngineLimits(),  # noqa: B008 - frozen
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self._first_block, self._pipeline = first_block, pipeline
        self._name, self._wire_kind, self._limits, self._clock = name, wire, limits, clock
        self._pace = TraversalCost()
        self._active: list[ActiveRequest] = []
        self._in_ring: dict[int, ActiveRequest] = {}
        self._keys = itertools.count(1)
        self._released: list[tuple[int, Route]] = []  # contexts that are no longer needed
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "compute")

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pipeline.run(self))
                tasks.create_task(self._turns())
                tasks.create_task(self._watch())
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def generate(
        self, request: GenerationRequest, cost: AnswerCost
    ) -> AsyncGenerator[Piece, None]:
        """The answer, piece by piece; closing the generator cancels the request."""
        if len(self._active) >= self._limits.requests:
            raise OverloadedError(f"the server is full: {len(self._active)} answers in progress")
        window = self._first_block.first.config.model.window
        active = ActiveRequest(new_decoding(request, window, self._pace, cost))
        self._active.append(active)
        try:
            while not active.complete:
                self._wake.set()
                piece = await active.pieces.get()
                if isinstance(piece, BlocktrainError):
                    raise piece
                if piece.data:
                    yield piece
        finally:
            self._drop(active)

    def status(self) -> dict[str, Any]:
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

    def arrived(self, step: StepEnvelope) -> None:
        for part in split_rows(step.activations, [0] * len(step.activations.rows)):
            active = self._in_ring.pop(part.rows[0].request, None)
            if active is None:
                continue  # cancelled, or started over on another route
            active.take_result(part.readout_RV)
            active.cost.add_seconds(dict(step.seconds))
            self._learn_traversal(self._clock() - active.sent_at)
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
        """Free contexts that are no longer needed, here and at the stages."""
        released, self._released = self._released, []
        if released:
            await self._in_thread(self._release, [key for key, _ in released])
        for key, route in released:
            with suppress(BlocktrainError):  # the stage is gone, and its cache with it
                await self._pipeline.release([key], route)

    def _release(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._first_block.release(key)

    def _take_results(self) -> None:
        for active in self._active:
            readout_RV, active.readout_RV = active.readout_RV, None
            if readout_RV is None:
                continue
            assert active.row is not None
            log_probs_RV = self._first_block.distribution(readout_RV)
            active.pieces.put_nowait(active.decoding.take(active.row, log_probs_RV))
            active.replays = 0

    def _routed(self, active: ActiveRequest) -> bool:
        if active.route is None:
            active.route = self._pipeline.route()
            if active.route is None:
                active.wait_until(self._clock() + self._limits.patience_seconds)
                return False
            self._pipeline.enter(active.route)
        return True

    async def _advance(self, ready: Sequence[ActiveRequest]) -> None:
        """One step of each, through the first block and into the ring."""
        proposals = {}
        for active in ready:
            proposal = active.next_proposal()
            if proposal.start == 0:
                self._leave_context(active)
                active.key = next(self._keys)
            proposals[active.key] = proposal
        by_key = {active.key: active for active in ready}
        await self._forget()  # the old contexts, before new ones need their slots
        try:
            await self._prefill_stages(by_key, proposals)
            started = self._clock()
            activations = await self._in_thread(self._first_block.step, proposals)
        except MissingPrefixError as error:
            for key in error.requests:
                self._start_over(by_key[key], "the router's own cache dropped its context")
            self._wake.set()
            return
        except CacheFullError as error:
            for key in error.requests or by_key:
                by_key[key].fail(OverloadedError(str(error)))
            self._wake.set()
            return
        except (BlocktrainError, RuntimeError) as error:
            log.exception("a batch failed")
            for active in ready:
                active.fail(UnavailableError(f"block 0 failed: {error}"))
            return
        self._learn_draft(self._clock() - started, proposals, by_key)
        await self._dispatch(activations, by_key)

    async def _prefill_stages(
        self, by_key: dict[int, ActiveRequest], proposals: dict[int, Proposal]
    ) -> None:
        """Let stages that can read a context alone do so while the router does. A prefill is always
        the first message of a new key, so no stage can mistake an older context for it."""
        by_route: dict[Route, list[Row]] = defaultdict(list)
        for row in self._first_block.prefills(proposals):
            if route := by_key[row.request].route:
                by_route[route].append(row)
        for route, rows in by_route.items():
            try:
                await self._pipeline.prefill(rows, route)
            except BlocktrainError as error:
                log.info("a context did not reach a stage: %s", error)  # `lost` will follow

    async def _dispatch(self, activations: Activations, by_key: dict[int, ActiveRequest]) -> None:
        by_route: dict[Route, list[Activations]] = defaultdict(list)
        for part in self._first_block.split(activations):
            active = by_key[part.rows[0].request]
            if active.cancelled or active.route is None:
                continue  # or lost a stage in the meantime
            if not is_finite(part):
                active.fail(UnavailableError("block 0 produced NaN or Inf"))
                continue
            active.send(part.rows[0], self._clock(), self._limits.step_seconds)
            if active.route:
                self._in_ring[active.key] = active
                by_route[active.route].append(part)
            else:
                active.take_result(part.readout_RV)
                self._wake.set()
        for route, parts in by_route.items():
            step = StepEnvelope(joined(parts), self._name, route[1:], self._wire_kind)
            try:
                await self._pipeline.send(step, route)
            except BlocktrainError as error:
                for part in parts:
                    self._start_over(by_key[part.rows[0].request], str(error))
                self._wake.set()

    # Losses

    async def _watch(self) -> None:
        """Start over steps that take too long, and fail requests that wait too long for a route."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = self._clock()
            for active in self._active:
                if active.deadline is None:
                    continue
                self._wake.set()  # pairs of stages that failed may be tried again
                if now < active.deadline:
                    continue
                if active.in_ring:
                    self._start_over(active, "a step did not come back")
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
            log.info("a request starts over: %s", why)
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

    # How long drafts and traversals take

    def _learn_draft(
        self,
        seconds: float,
        proposals: dict[int, Proposal],
        by_key: dict[int, ActiveRequest],
    ) -> None:
        rounds = 1 + max(proposal.drafts for proposal in proposals.values())
        self._pace.draft = _smoothed(self._pace.draft, seconds / rounds)
        for active in by_key.values():
            active.cost.add_seconds({OWN_STAGE: seconds})

    def _learn_traversal(self, seconds: float) -> None:
        self._pace.traversal = _smoothed(self._pace.traversal, seconds)

    async def _in_thread(self, function: Callable[..., T], *inputs: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *inputs)


def _smoothed(before: float | None, now: float) -> float:
    return now if before is None else before + SMOOTHING * (now - before)
