"""One request on its way through an engine: where it is, and what it waits for."""

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
    Account,
    Decoding,
    Piece,
    Proposal,
    Request,
    TraversalCost,
    new_decoding,
)
from blocktrain.serve.router.decode import Proposal as Asked
from blocktrain.serve.router.front import FirstBlock
from blocktrain.serve.router.pipeline import Pipeline, Route
from blocktrain.serve.stage.batch import Row, Work, apart, finite, joined

MOST_UNREAD = 32  # pieces a client may leave unread before its request rests


@dataclass(eq=False)
class ActiveRequest:
    decoding: Decoding
    pieces: "asyncio.Queue[Piece | BlocktrainError]" = field(default_factory=asyncio.Queue)
    key: int = 0  # names its context in every cache; a fresh context gets a new one
    route: Route | None = None
    row: Row | None = None  # as it went out
    answer: np.ndarray | None = None
    flying: bool = False
    started: float = 0.0
    until: float | None = None  # when a flight, or the wait for a route, has lasted too long
    replays: int = 0
    lost: bool = False  # a cache that held its context is gone
    failure: bool = False
    gone: bool = False

    @property
    def account(self) -> Account:
        return self.decoding.account

    @property
    def complete(self) -> bool:
        """Nothing more will come but what is in the queue already."""
        return (self.decoding.finished or self.failure) and self.pieces.empty()

    @property
    def ready(self) -> bool:
        rests = self.pieces.qsize() >= MOST_UNREAD
        return not (self.flying or rests or self.failure or self.gone or self.decoding.finished)

    def fly(self, row: Row, now: float, seconds: float) -> None:
        self.row, self.flying, self.started, self.until = row, True, now, now + seconds

    def land(self, answer: np.ndarray) -> None:
        self.flying, self.until, self.answer = False, None, answer

    def waits_until(self, moment: float) -> None:
        if self.until is None:
            self.until = moment

    def start_over(self) -> None:
        """From its text, with the next step; an answer that is here already still counts."""
        self.flying, self.until, self.lost = False, None, True

    def next_step(self) -> Proposal:
        step = self.decoding.replay() if self.lost else self.decoding.step()
        assert step is not None  # it is not finished, or it would not be ready
        self.lost = False
        return step

    def fail(self, error: BlocktrainError) -> None:
        self.flying, self.until, self.failure = False, None, True
        self.pieces.put_nowait(error)


MOST_REPLAYS = 5  # in a row, without an answer between them
WATCH_SECONDS = 0.25
SMOOTHING = 1 / 8
OWN_TIME = "block 0"

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineLimits:
    requests: int = 64
    patience_seconds: float = 10.0  # for a stage to come back, when a block has none left
    flight_seconds: float = 30.0  # for a step to come back, while all its stages seem alive


class Engine:
    def __init__(
        self,
        model: str,
        front: FirstBlock,
        pipeline: Pipeline,
        name: str,
        wire: str = "fp32",
        limits: EngineLimits = EngineLimits(),  # noqa: B008 - frozen
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self._front, self._pipeline = front, pipeline
        self._name, self._wire, self._limits, self._clock = name, wire, limits, clock
        self._pace = TraversalCost()
        self._active: list[ActiveRequest] = []
        self._flights: dict[int, ActiveRequest] = {}
        self._keys = itertools.count(1)
        self._over: list[tuple[int, Route]] = []  # contexts that nobody needs any more
        self._news = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "compute")

    async def run(self) -> None:
        """Serve for as long as the process lives."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pipeline.run(self))
                tasks.create_task(self._turns())
                tasks.create_task(self._watch())
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def generate(self, request: Request, account: Account) -> AsyncGenerator[Piece, None]:
        """The answer, piece by piece; closed early, it leaves nothing behind."""
        if len(self._active) >= self._limits.requests:
            raise OverloadedError(f"{len(self._active)} requests are under way")
        window = self._front.first.config.model.window
        active = ActiveRequest(new_decoding(request, window, self._pace, account))
        self._active.append(active)
        try:
            while not active.complete:
                self._news.set()
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
                    "address": place.address,
                    "blocks": list(range(place.first, place.stop)),
                    "requests": place.load,
                }
                for place in self._pipeline.places
            ],
            "missing": self._pipeline.missing,
            "requests": len(self._active),
            "in_the_ring": len(self._flights),
        }

    # What the pipeline tells

    def arrived(self, step: StepEnvelope) -> None:
        for part in apart(step.work, [0] * len(step.work.rows)):
            row = part.rows[0]
            active = self._flights.pop(row.request, None)
            if active is None:
                continue  # cancelled, or started over by another way
            active.land(part.readout_RV)
            active.account.took(dict(step.seconds))
            self._learn_traversal(self._clock() - active.started)
        self._news.set()

    def failed(self, address: str, failure: FailureHead) -> None:
        if failure.hop:
            self._pipeline.keep_apart((address, failure.hop))
        for key in failure.requests:
            active = self._flights.pop(key, None)
            if active is None:
                continue
            if failure.code == "cache_full":
                active.fail(OverloadedError(f"a stage is full: {failure.message}"))
            else:
                self._start_over(active, failure.message)
        self._news.set()

    def lost(self, address: str) -> None:
        for active in self._active:
            if active.route and address in active.route:
                self._start_over(active, f"the stage at {address} is gone")
        self._news.set()

    def joined(self) -> None:
        self._news.set()

    # The loop

    async def _turns(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            await self._forget()
            self._settle([active for active in self._active if active.answer is not None])
            going = [active for active in self._active if active.ready and self._routed(active)]
            if going:
                await self._advance(going)

    async def _forget(self) -> None:
        """Free what is over, here and at the stages."""
        over, self._over = self._over, []
        if over:
            await self._in_thread(self._release, [key for key, _ in over])
        for key, route in over:
            with suppress(BlocktrainError):  # the stage is gone, and the cache with it
                await self._pipeline.release([key], route)

    def _release(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._front.release(key)

    def _settle(self, landed: Sequence[ActiveRequest]) -> None:
        """Bytes out of what came back."""
        for active in landed:
            readout_RV, active.answer = active.answer, None
            assert readout_RV is not None and active.row is not None
            active.pieces.put_nowait(
                active.decoding.take(active.row, self._front.distribution(readout_RV))
            )
            active.replays = 0

    def _routed(self, active: ActiveRequest) -> bool:
        if active.route is None:
            active.route = self._pipeline.route()
            if active.route is None:
                active.waits_until(self._clock() + self._limits.patience_seconds)
                return False
            self._pipeline.enter(active.route)
        return True

    async def _advance(self, going: Sequence[ActiveRequest]) -> None:
        """One step of each, into the ring or, where there is none, around it."""
        steps = {}
        for active in going:
            step = active.next_step()
            if step.start == 0:
                self._leave_context(active)
                active.key = next(self._keys)
            steps[active.key] = step
        rows = {active.key: active for active in going}
        await self._forget()  # before what takes its place arrives
        try:
            await self._prefill_stages(rows, steps)
            started = self._clock()
            work = await self._in_thread(self._front.work, steps)
        except MissingPrefixError as error:
            for key in error.requests:
                self._start_over(rows[key], "the router's own cache made room")
            self._news.set()
            return
        except CacheFullError as error:
            for key in error.requests or rows:
                rows[key].fail(OverloadedError(str(error)))
            self._news.set()
            return
        except (BlocktrainError, RuntimeError) as error:
            log.exception("a batch failed")
            for active in going:
                active.fail(UnavailableError(f"computing failed: {error}"))
            return
        self._learn_draft(self._clock() - started, steps, rows)
        await self._dispatch(work, rows)

    async def _prefill_stages(
        self, rows: dict[int, ActiveRequest], steps: dict[int, Asked]
    ) -> None:
        """Stages that can read a text by themselves do so while the router does. Such a step is
        the first of its context, so no stage can take an older one for it."""
        by_route: dict[Route, list[Row]] = defaultdict(list)
        for row in self._front.prefills(steps):
            if route := rows[row.request].route:
                by_route[route].append(row)
        for route, together in by_route.items():
            try:
                await self._pipeline.prefill(together, route)
            except BlocktrainError as error:
                log.info("a context did not reach a stage: %s", error)  # which `lost` follows

    async def _dispatch(self, work: Work, rows: dict[int, ActiveRequest]) -> None:
        carried = [self._front.first.carried(row) for row in work.rows]
        by_route: dict[Route, list[Work]] = defaultdict(list)
        for part in apart(work, carried):
            active = rows[part.rows[0].request]
            if active.gone or active.route is None:
                continue  # cancelled, or lost a stage, meanwhile
            if not finite(part):
                active.fail(UnavailableError("block 0 computed what is no number"))
                continue
            active.fly(part.rows[0], self._clock(), self._limits.flight_seconds)
            if active.route:
                self._flights[active.key] = active
                by_route[active.route].append(part)
            else:
                active.land(part.readout_RV)
                self._news.set()
        for route, parts in by_route.items():
            step = StepEnvelope(joined(parts), self._name, route[1:], self._wire)
            try:
                await self._pipeline.send(step, route)
            except BlocktrainError as error:
                for part in parts:
                    self._start_over(rows[part.rows[0].request], str(error))
                self._news.set()

    # Losses

    async def _watch(self) -> None:
        """What takes too long is lost, or refused."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = self._clock()
            for active in self._active:
                if active.until is None:
                    continue
                self._news.set()  # stages that were kept apart may be tried again
                if now < active.until:
                    continue
                if active.flying:
                    self._start_over(active, "a step did not come back")
                else:
                    active.fail(UnavailableError(f"no way through: {self._pipeline.missing}"))

    def _start_over(self, active: ActiveRequest, why: str) -> None:
        self._leave_route(active)
        active.replays += 1
        if active.replays > MOST_REPLAYS:
            active.fail(UnavailableError(f"gave up after {MOST_REPLAYS} attempts: {why}"))
        else:
            log.info("a request starts over: %s", why)
            active.start_over()

    def _leave_context(self, active: ActiveRequest) -> None:
        self._flights.pop(active.key, None)
        if active.key:
            self._over.append((active.key, active.route or ()))
            active.key = 0

    def _leave_route(self, active: ActiveRequest) -> None:
        self._leave_context(active)
        if active.route is not None:
            self._pipeline.leave(active.route)
            active.route = None

    def _drop(self, active: ActiveRequest) -> None:
        active.gone = True
        self._active.remove(active)
        self._leave_route(active)
        self._news.set()

    # What drafts and traversals take

    def _learn_draft(
        self, seconds: float, steps: dict[int, Asked], rows: dict[int, ActiveRequest]
    ) -> None:
        rounds = 1 + max(step.drafts for step in steps.values())
        self._pace.draft = _smoothed(self._pace.draft, seconds / rounds)
        for active in rows.values():
            active.account.took({OWN_TIME: seconds})

    def _learn_traversal(self, seconds: float) -> None:
        self._pace.traversal = _smoothed(self._pace.traversal, seconds)

    async def _in_thread(self, function: Callable[..., T], *inputs: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *inputs)


def _smoothed(before: float | None, now: float) -> float:
    return now if before is None else before + SMOOTHING * (now - before)
