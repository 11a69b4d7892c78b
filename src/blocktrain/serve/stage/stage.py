"""A stage: steps and prefills come in over many connections, one thread computes them in turn, and
results go on to the next stage or back to the router.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from blocktrain.errors import BlocktrainError, CacheFullError, ProtocolError
from blocktrain.protocol.framing import FrameKind, FrameMessage
from blocktrain.protocol.ring_keys import ROUTER
from blocktrain.serve.ring.connection import ConnectionPool, Dial, RingConnection
from blocktrain.serve.ring.envelope import (
    StepEnvelope,
    failure_message,
    read_prefill,
    read_release,
    read_step,
    result_message,
    step_message,
    takes_bare_steps,
)
from blocktrain.serve.stage.batch import Row, is_finite, joined, split_rows
from blocktrain.serve.stage.compute import StageCompute

MAX_WAITING = 256  # steps not yet computed before their connections have to wait
PATIENCE_SECONDS = 5.0  # for a prefill that takes another route than the step that needs it
MAX_REMEMBERED = 10_000  # requests whose context is known to have been here

T = TypeVar("T")
log = logging.getLogger(__name__)


class EarlySteps:
    """Steps that arrived before the context they need; each waits for a bounded time."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._waiting: dict[int, tuple[float, StepEnvelope]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, step: StepEnvelope, now: float) -> None:
        """A step of one row; it replaces an older one of the same request."""
        self._waiting[step.activations.rows[0].request] = (now + self._patience, step)

    def take(self, requests: Collection[int]) -> list[StepEnvelope]:
        """Remove and return the steps of these requests."""
        waiting = [request for request in requests if request in self._waiting]
        return [self._waiting.pop(request)[1] for request in waiting]

    def take_expired(self, now: float) -> list[StepEnvelope]:
        late = [request for request, (until, _) in self._waiting.items() if until <= now]
        return [self._waiting.pop(request)[1] for request in late]

    def forget(self, request: int) -> None:
        self._waiting.pop(request, None)


class RecentRequests:
    """The requests added last, up to `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._requests: dict[int, None] = {}

    def __contains__(self, request: int) -> bool:
        return request in self._requests

    def add(self, requests: Iterable[int]) -> None:
        for request in requests:
            self._requests.pop(request, None)
            self._requests[request] = None
        while len(self._requests) > self._limit:
            del self._requests[next(iter(self._requests))]


class Stage:
    def __init__(
        self,
        name: str,
        compute: StageCompute,
        dial: Dial,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._compute = compute
        self._peers = ConnectionPool(dial)
        self._clock = clock
        self._routers: dict[str, RingConnection] = {}
        self._steps: list[StepEnvelope] = []
        self._prefills: list[Row] = []
        self._released: list[int] = []
        self._seen = RecentRequests(MAX_REMEMBERED)
        self._refused = RecentRequests(MAX_REMEMBERED)
        self._early = EarlySteps(PATIENCE_SECONDS)
        self._wake = asyncio.Event()
        self._room = asyncio.Condition()
        self._sending: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(1, "compute")

    async def serve(self, connection: RingConnection) -> None:
        """Serve one connection until it ends."""
        router = connection.hello["name"] if connection.peer.role == ROUTER else ""
        if router:
            self._routers[router] = connection
        try:
            while True:
                await self._take(await connection.receive(), from_router=bool(router))
        except ProtocolError as error:
            connection.refuse(error)
            raise
        finally:
            if self._routers.get(router) is connection:
                del self._routers[router]

    async def run(self) -> None:
        """Compute until cancelled."""
        try:
            while True:
                await self._wait()
                await self._turn()
        finally:
            self._peers.close()
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _take(self, message: FrameMessage, *, from_router: bool) -> None:
        if message.kind is FrameKind.STEP:
            async with self._room:
                await self._room.wait_for(lambda: len(self._steps) < MAX_WAITING)
            self._steps.append(read_step(message))
        elif not from_router:
            raise ProtocolError("a stage may send steps only")
        elif message.kind is FrameKind.PREFILL:
            self._prefills += read_prefill(message)
        elif message.kind is FrameKind.RELEASE:
            self._released += read_release(message)
        elif message.kind is FrameKind.DIAL:
            self._start(self._connect(str(message.meta.get("address", ""))))
        else:
            raise ProtocolError(f"a stage does not accept {message.kind.name}")
        self._wake.set()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS if self._early else None):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    async def _turn(self) -> None:
        """Everything that has arrived: releases, then prefills, then the steps that need them."""
        released, self._released = self._released, []
        prefills, self._prefills = self._prefills, []
        steps, self._steps = self._steps, []
        async with self._room:
            self._room.notify_all()
        if released:
            await self._in_thread(self._release, released)
        if prefills:
            await self._prefill(prefills)
        steps += self._early.take({row.request for row in prefills})
        for expired in self._early.take_expired(self._clock()):
            self._fail([expired], "missing_prefix", "the context of this step did not arrive")
        by_route = defaultdict(list)
        for step in steps:
            by_route[step.route].append(step)
        for together in by_route.values():
            await self._advance(self._with_context(together))

    def _release(self, requests: Sequence[int]) -> None:
        for request in requests:
            self._compute.release(request)
            self._early.forget(request)

    async def _prefill(self, rows: Sequence[Row]) -> None:
        """As far as there is room; the steps of the other requests will be refused."""
        try:
            await self._in_thread(self._compute.prefill, rows)
        except CacheFullError as error:
            self._refused.add(error.requests)
            if rest := [row for row in rows if row.request not in error.requests]:
                await self._prefill(rest)
        except (BlocktrainError, RuntimeError):
            log.exception("a prefill failed")  # its steps will find no context

    def _with_context(self, steps: Sequence[StepEnvelope]) -> list[StepEnvelope]:
        """Steps of one row each whose context is cached; the others wait for it, or fail."""
        ready, lost, full = [], [], []
        for step in steps:
            for single in self._split(step):
                row = single.activations.rows[0]
                if row.start <= self._compute.cached(row.request):
                    ready.append(single)
                elif row.request in self._refused:
                    full.append(single)
                elif row.request in self._seen:
                    lost.append(single)
                else:
                    self._early.add(single, self._clock())
        self._fail(lost, "missing_prefix", "the cache dropped the context of this step")
        self._fail(
            full,
            "cache_full",
            f"all {self._compute.max_requests} slots of the cache are in use",
        )
        return ready

    def _split(self, step: StepEnvelope) -> list[StepEnvelope]:
        """A step for every row."""
        carried = [self._compute.carried(row) for row in step.activations.rows]
        return [step.carrying(part) for part in split_rows(step.activations, carried)]

    async def _advance(self, steps: Sequence[StepEnvelope]) -> None:
        if not steps:
            return
        started = self._clock()
        try:
            together = joined([step.activations for step in steps])
            activations = await self._in_thread(self._compute.step, together)
        except CacheFullError as error:
            self._fail(steps, "cache_full", str(error))
        except (BlocktrainError, RuntimeError, ValueError) as error:
            log.exception("a step failed")
            self._fail(steps, "failed", str(error))
        else:
            seconds = self._clock() - started
            self._seen.add(row.request for row in activations.rows)
            self._start(self._send(steps[0].after(activations, self.name, seconds)))

    async def _send(self, step: StepEnvelope) -> None:
        """On to the next stage, or back to the router that waits."""
        if not is_finite(step.activations):
            self._isolate(step)
        elif step.hops:
            await self._send_on(step)
        elif router := self._routers.get(step.router):
            await self._send_back(router, result_message(step))

    async def _send_on(self, step: StepEnvelope) -> None:
        hop, rest = step.next_hop()
        try:
            connection = await self._peers.to(hop)
            message = step_message(rest, bare=takes_bare_steps(connection.hello))
            await connection.send(message)
        except BlocktrainError as error:
            self._fail([step], "unreachable", f"{self.name} does not reach {hop}: {error}", hop)

    def _isolate(self, step: StepEnvelope) -> None:
        """Fail the requests that have a NaN; the others go on without them."""
        if len(step.activations.rows) == 1:
            self._fail([step], "failed", f"{self.name} produced NaN or Inf")
            return
        for single in self._split(step):
            self._start(self._send(single))

    async def _connect(self, address: str) -> None:
        try:
            await self._peers.to(address)
        except BlocktrainError as error:
            log.warning("cannot connect to %s in advance: %s", address, error)

    def _fail(self, steps: Sequence[StepEnvelope], code: str, text: str, hop: str = "") -> None:
        """Tell the routers that wait, as far as they are still connected."""
        for step in steps:
            router = self._routers.get(step.router)
            if router is not None:
                requests = [row.request for row in step.activations.rows]
                self._start(self._send_back(router, failure_message(requests, code, text, hop)))

    async def _send_back(self, router: RingConnection, message: FrameMessage) -> None:
        try:
            await router.send(message)
        except BlocktrainError as error:
            log.info("a router left before its result: %s", error)

    def _start(self, sending: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(sending)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _in_thread(self, function: Callable[..., T], *inputs: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *inputs)
