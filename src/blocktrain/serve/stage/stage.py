"""Steps that came before the context they need, each for a bounded time; and what was here once."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from blocktrain.errors import BlocktrainError, CacheFullError, ProtocolError
from blocktrain.protocol.framing import FrameMessage, Kind
from blocktrain.protocol.ring_keys import ROUTER
from blocktrain.serve.ring.connection import Dial, RingConnection, StageLinks
from blocktrain.serve.ring.envelope import (
    StepEnvelope,
    failure_message,
    read_prefill,
    read_release,
    read_step,
    step_message,
)
from blocktrain.serve.stage.batch import Row, apart, joined
from blocktrain.serve.stage.compute import StageCompute


class EarlySteps:
    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._waiting: dict[int, tuple[float, StepEnvelope]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def enter(self, step: StepEnvelope, now: float) -> None:
        """A step of one row; a newer one of the same request takes the older one's place."""
        self._waiting[step.work.rows[0].request] = (now + self._patience, step)

    def leave(self, requests: Collection[int]) -> list[StepEnvelope]:
        """The steps whose context has come."""
        here = [request for request in requests if request in self._waiting]
        return [self._waiting.pop(request)[1] for request in here]

    def expired(self, now: float) -> list[StepEnvelope]:
        """The steps that have waited long enough."""
        late = [request for request, (until, _) in self._waiting.items() if until <= now]
        return [self._waiting.pop(request)[1] for request in late]

    def forget(self, request: int) -> None:
        self._waiting.pop(request, None)


class RecentContexts:
    """The last numbers that were added, and no more than so many."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[int, None] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._held

    def add(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._held.pop(number, None)
            self._held[number] = None
        while len(self._held) > self._most:
            del self._held[next(iter(self._held))]


MOST_WAITING = 256  # steps taken in before the connections they come by have to wait
PATIENCE_SECONDS = 5.0  # for a prefill that comes by another way than the step that needs it

MOST_REMEMBERED = 10_000  # requests whose context is known to have been here

T = TypeVar("T")
log = logging.getLogger(__name__)


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
        self._links = StageLinks(dial)
        self._clock = clock
        self._routers: dict[str, RingConnection] = {}
        self._steps: list[StepEnvelope] = []
        self._prefills: list[Row] = []
        self._released: list[int] = []
        self._seen = RecentContexts(MOST_REMEMBERED)
        self._refused = RecentContexts(MOST_REMEMBERED)
        self._parking = EarlySteps(PATIENCE_SECONDS)
        self._news = asyncio.Event()
        self._room = asyncio.Condition()
        self._sending: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(1, "compute")

    async def attend(self, connection: RingConnection) -> None:
        """One connection's life: take what it says until it ends."""
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
        """Compute, for as long as the stage lives."""
        try:
            while True:
                await self._wait_for_news()
                await self._turn()
        finally:
            self._links.close()
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _take(self, message: FrameMessage, *, from_router: bool) -> None:
        if message.kind is Kind.STEP:
            async with self._room:
                await self._room.wait_for(lambda: len(self._steps) < MOST_WAITING)
            self._steps.append(read_step(message))
        elif not from_router:
            raise ProtocolError("a stage may send steps and nothing else")
        elif message.kind is Kind.PREFILL:
            self._prefills += read_prefill(message)
        elif message.kind is Kind.RELEASE:
            self._released += read_release(message)
        elif message.kind is Kind.DIAL:
            self._start(self._warm(str(message.meta.get("address", ""))))
        else:
            raise ProtocolError(f"a stage does not take {message.kind.name}")
        self._news.set()

    async def _wait_for_news(self) -> None:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS if self._parking else None):
                await self._news.wait()
        except TimeoutError:
            pass
        self._news.clear()

    async def _turn(self) -> None:
        """Everything that waits: what is over, then contexts, then the steps that need them."""
        released, self._released = self._released, []
        prefills, self._prefills = self._prefills, []
        steps, self._steps = self._steps, []
        async with self._room:
            self._room.notify_all()
        if released:
            await self._in_thread(self._release, released)
        if prefills:
            await self._prefill(prefills)
        steps += self._parking.leave({row.request for row in prefills})
        for late in self._parking.expired(self._clock()):
            self._fail([late], "missing_prefix", "the context of this step never came")
        ways = defaultdict(list)
        for step in steps:
            ways[step.way].append(step)
        for together in ways.values():
            await self._advance(self._with_prefix(together))

    def _release(self, requests: Sequence[int]) -> None:
        for request in requests:
            self._compute.release(request)
            self._parking.forget(request)

    async def _prefill(self, rows: Sequence[Row]) -> None:
        """Of every request that there is room for; the steps of the others will be refused."""
        try:
            await self._in_thread(self._compute.prefill, rows)
        except CacheFullError as error:
            self._refused.add(error.requests)
            if left := [row for row in rows if row.request not in error.requests]:
                await self._prefill(left)
        except (BlocktrainError, RuntimeError):
            log.exception("a context was not read")  # its steps will miss it

    def _with_prefix(self, steps: Sequence[StepEnvelope]) -> list[StepEnvelope]:
        """Steps whose context is here, one per row; the others wait for it, or fail."""
        ready, lost, full = [], [], []
        for step in steps:
            for work in apart(step.work, [self._compute.carried(row) for row in step.work.rows]):
                row, single = work.rows[0], step.of(work)
                if row.start <= self._compute.held(row.request):
                    ready.append(single)
                elif row.request in self._refused:
                    full.append(single)
                elif row.request in self._seen:
                    lost.append(single)
                else:
                    self._parking.enter(single, self._clock())
        self._fail(lost, "missing_prefix", "the context of this step was dropped")
        self._fail(
            full,
            "cache_full",
            f"there is room for {self._compute.most_requests} requests, all in use",
        )
        return ready

    async def _advance(self, steps: Sequence[StepEnvelope]) -> None:
        if not steps:
            return
        started = self._clock()
        try:
            work = await self._in_thread(self._compute.step, joined([s.work for s in steps]))
        except CacheFullError as error:
            self._fail(steps, "cache_full", str(error))
        except (BlocktrainError, RuntimeError, ValueError) as error:
            log.exception("a step failed")
            self._fail(steps, "failed", str(error))
        else:
            seconds = self._clock() - started
            self._seen.add(row.request for row in work.rows)
            self._start(self._push(steps[0].after(work, self.name, seconds)))

    async def _push(self, step: StepEnvelope) -> None:
        """On to the next stage, or back to the router that waits."""
        hop, rest = step.next_hop() if step.hops else ("", step)
        try:
            message = step_message(rest, Kind.STEP if hop else Kind.RESULT)
        except ProtocolError as error:
            return self._push_apart(step, error)
        if not hop:
            if router := self._routers.get(step.router):
                await self._tell(router, message)
            return None
        try:
            await (await self._links.to(hop)).send(message)
        except BlocktrainError as error:
            self._fail([step], "unreachable", f"{self.name} does not reach {hop}: {error}", hop)

    def _push_apart(self, step: StepEnvelope, why: ProtocolError) -> None:
        """Some request's numbers are none: it fails, and the others go on without it."""
        rows = step.work.rows
        if len(rows) == 1:
            self._fail([step], "failed", f"{self.name}: {why}")
            return
        for work in apart(step.work, [self._compute.carried(row) for row in rows]):
            self._start(self._push(step.of(work)))

    async def _warm(self, address: str) -> None:
        try:
            await self._links.to(address)
        except BlocktrainError as error:
            log.warning("%s cannot be reached ahead of time: %s", address, error)

    def _fail(self, steps: Sequence[StepEnvelope], code: str, text: str, hop: str = "") -> None:
        """Tell the routers that wait; one that is gone waits no more."""
        for step in steps:
            router = self._routers.get(step.router)
            if router is not None:
                requests = [row.request for row in step.work.rows]
                self._start(self._tell(router, failure_message(requests, code, text, hop)))

    async def _tell(self, router: RingConnection, message: FrameMessage) -> None:
        try:
            await router.send(message)
        except BlocktrainError as error:
            log.info("a router left before its answer: %s", error)

    def _start(self, sending: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(sending)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _in_thread(self, function: Callable[..., T], *inputs: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *inputs)
