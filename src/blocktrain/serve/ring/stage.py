"""A stage: steps and prefills arrive over many connections, one thread computes them, and results
go to the next stage or back to the router. As a process, it loads its blocks, listens, and computes
until a stop signal."""

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from blocktrain.errors import BlocktrainError, CacheFullError, ConfigError, ProtocolError
from blocktrain.protocol.addresses import bound_socket, join_host_port, split_host_port
from blocktrain.protocol.framing import FrameKind, FrameMessage
from blocktrain.protocol.ring_keys import AUTHORITY, ROUTER, STAGE, client_context, server_context
from blocktrain.serve.ring.activations import (
    NOT_FINITE,
    Activations,
    Row,
    is_finite,
    joined,
    split_rows,
)
from blocktrain.serve.ring.batch import SlotLimits
from blocktrain.serve.ring.compute import (
    BlockSource,
    StageCompute,
)
from blocktrain.serve.ring.connection import (
    DEFAULT_TERMS,
    ConnectionPool,
    Dial,
    RingConnection,
    Terms,
)
from blocktrain.serve.ring.envelope import (
    StepEnvelope,
    failure_message,
    read_prefill,
    read_release,
    read_step,
    result_message,
    step_message,
)
from blocktrain.serve.ring.handshake import (
    RingListener,
    chosen_readout,
    dial,
    mismatch,
    model_hello,
)
from blocktrain.serve.ring.laps import Laps
from blocktrain.serve.ring.turns import CPU_CHUNK, PromptTurns, chunk_for
from blocktrain.serve.ring.waiting import WaitingRow, WaitingRows
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.device import resolve

MAX_WAITING = 256  # queued steps; further ones block their connections
PATIENCE_SECONDS = 5.0  # wait of a step for its prefill, which may take another path
MAX_REMEMBERED = 10_000  # requests whose context was cached or refused
DROPPED = ("missing_prefix", "the cache dropped the context of this step")
RELEASED = ("missing_prefix", "the router released the context of this step")

Failure = tuple[str, str]  # code and text

T = TypeVar("T")
log = logging.getLogger(__name__)


class Stage:
    def __init__(
        self, name: str, compute: StageCompute, dial: Dial, prefill_chunk: int = CPU_CHUNK
    ) -> None:
        self.name = name
        self._compute = compute
        self._vocabulary = compute.config.vocabulary
        self._peers = ConnectionPool(dial)
        self._routers: dict[str, RingConnection] = {}
        self._steps: asyncio.Queue[StepEnvelope] = asyncio.Queue(MAX_WAITING)
        self._waiting = WaitingRows(PATIENCE_SECONDS)
        self._prompts = PromptTurns(prefill_chunk)
        self._released: dict[int, int] = {}  # and how many positions to keep for others
        # Why a recent request may have no cached context; newest last.
        self._losses: dict[int, Failure] = {}
        self._wake = asyncio.Event()
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
                with suppress(TimeoutError):
                    async with asyncio.timeout(PATIENCE_SECONDS if self._waiting else None):
                        await self._wake.wait()
                self._wake.clear()
                await self._turn()
        finally:
            self._peers.close()
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _take(self, message: FrameMessage, *, from_router: bool) -> None:
        if message.kind is FrameKind.STEP:
            await self._steps.put(read_step(message, self._vocabulary))
        elif not from_router:
            raise ProtocolError("a stage may only send steps")
        elif message.kind is FrameKind.PREFILL:
            for row in read_prefill(message, self._vocabulary):
                self._waiting.add(row, None, time.monotonic())
        elif message.kind is FrameKind.RELEASE:
            self._released |= read_release(message)
        elif message.kind is FrameKind.DIAL:
            self._start(self._connect(str(message.meta.get("address", ""))))
        else:
            raise ProtocolError(f"a stage does not accept {message.kind.name}")
        self._wake.set()

    async def _turn(self) -> None:
        """Compute every step whose context is cached, then a chunk of prompts."""
        await self._release()
        self._collect()
        ready = self._waiting.computable(self._has_context)
        self._refuse_lost(self._waiting.others(ready))
        steps = {request: each for request, each in ready.items() if not each.context}
        await self._advance([self._waiting.take(each, 0) for each in steps.values()])
        prompts = {request: each for request, each in ready.items() if each.context}
        counts = self._prompts.choose({request: row.context for request, row in prompts.items()})
        chunk = [self._waiting.take(prompts[request], count) for request, count in counts.items()]
        await self._prefill([each.row for each in chunk if each.step is None])
        await self._advance([each for each in chunk if each.step])
        if (ready and self._waiting) or self._may_collect:
            self._wake.set()

    async def _release(self) -> None:
        released, self._released = self._released, {}
        for request, keep in released.items():
            free = partial(self._compute.keep, request, keep) if keep else self._compute.release
            await self._in_thread(free, *(() if keep else (request,)))
        if released:
            self._waiting.drop(released)
            self._prompts.forget(released)
            self._remember(released, RELEASED)

    def _collect(self) -> None:
        """Queue the rows of steps that have arrived."""
        while self._may_collect:
            for step in self._split(self._steps.get_nowait()):
                row = step.activations.rows[0]
                if self._losses.get(row.request) == RELEASED:
                    self._fail([step], *RELEASED)  # it was on its way when it was released
                else:
                    self._waiting.add(row, step, time.monotonic())

    @property
    def _may_collect(self) -> bool:
        return not self._steps.empty() and len(self._waiting) < MAX_WAITING

    def _has_context(self, row: Row) -> bool:
        is_cached = row.start <= self._compute.cached(row.request)
        return is_cached or (row.source > 0 and row.start <= self._compute.copyable(row.source))

    def _refuse_lost(self, requests: Sequence[int]) -> None:
        """Of these requests, whose next row or source has not arrived, fail those for which it will
        not."""
        overdue = self._waiting.overdue(requests, time.monotonic())
        late = ("missing_prefix", "the context of this step did not arrive")
        for request in requests:
            needed = self._waiting.source(request) or request
            if needed != request and needed in self._waiting:
                continue
            if loss := self._losses.get(needed, late if request in overdue else None):
                self._fail([row.step for row in self._waiting.drop([request]) if row.step], *loss)
                self._remember([request], loss)

    async def _prefill(self, rows: Sequence[Row]) -> None:
        """Prefill as far as there is room; steps of the other requests will fail."""
        if not rows:
            return
        try:
            await self._in_thread(self._compute.prefill, rows)
        except CacheFullError as error:
            self._remember(error.requests, ("cache_full", str(error)))
            await self._prefill([row for row in rows if row.request not in error.requests])
        except (BlocktrainError, RuntimeError):
            log.exception("a prefill failed")  # its steps will lack their context

    def _remember(self, requests: Iterable[int], loss: Failure) -> None:
        """Record why these requests lost their context: later steps of them fail with that reason
        if their context is not cached."""
        for request in requests:
            self._losses.pop(request, None)
            self._losses[request] = loss
        while len(self._losses) > MAX_REMEMBERED:
            del self._losses[next(iter(self._losses))]

    def _split(self, step: StepEnvelope) -> list[StepEnvelope]:
        """Split a step into steps of one row."""
        carried = [self._compute.carried(row) for row in step.activations.rows]
        return [replace(step, activations=part) for part in split_rows(step.activations, carried)]

    async def _advance(self, rows: Sequence[WaitingRow]) -> None:
        """Compute rows, together with others of the same route. Rows that read nothing travel apart
        from the others, because nobody waits for them."""
        together = defaultdict(list)
        for row in rows:
            if row.step:
                together[row.step.route, row.row.read > 0].append(row.step)
        for steps in together.values():
            await self._compute_together(steps)

    async def _compute_together(self, steps: Sequence[StepEnvelope]) -> None:
        if not steps:
            return
        started = time.monotonic()
        try:
            together = joined([step.activations for step in steps])
            activations = await self._in_thread(self._step, together, steps[0].laps)
        except CacheFullError as error:
            full = [s for s in steps if s.activations.rows[0].request in error.requests] or steps
            self._remember(error.requests, ("cache_full", str(error)))
            self._fail(full, "cache_full", str(error))
            await self._compute_together([step for step in steps if step not in full])
        except (BlocktrainError, RuntimeError, ValueError) as error:
            log.exception("a step failed")
            self._fail(steps, "failed", str(error))
        else:
            self._remember((row.request for row in activations.rows), DROPPED)
            first, laps = steps[0], steps[0].laps
            laps.lap("back from the thread")
            seconds = {**first.seconds, self.name: time.monotonic() - started}
            profile = first.profile
            if profile is not None:
                profile = {**profile, self.name: laps.seconds}
            self._start(
                self._send(
                    replace(first, activations=activations, seconds=seconds, profile=profile)
                )
            )

    def _step(self, together: Activations, laps: Laps) -> Activations:
        """Compute a step, in the compute thread. The laps of a batch are those of its first
        step."""
        laps.lap("queue")
        return self._compute.step(together, laps=laps)

    async def _send(self, step: StepEnvelope) -> None:
        """Send a result to the next stage or back to the router. Requests with a NaN fail; the
        others continue."""
        if is_finite(step.activations):
            if step.hops:
                await self._send_on(step)
            elif step.activations.predictions is None:
                self._fail(
                    [step], "failed", f"the route ends at {self.name}, not at the last block"
                )
            elif router := self._routers.get(step.router):
                await self._send_back(router, result_message(step, self._vocabulary))
        elif len(step.activations.rows) == 1:
            self._fail([step], "failed", f"{self.name} {NOT_FINITE}")
        else:
            for single in self._split(step):
                self._start(self._send(single))

    async def _send_on(self, step: StepEnvelope) -> None:
        hop, *rest = step.hops
        try:
            connection = await self._peers.to(hop)
            onward = replace(step, hops=tuple(rest))
            await connection.send(step_message(onward, self._vocabulary))
        except BlocktrainError as error:
            self._fail([step], "unreachable", f"{self.name} cannot reach {hop}: {error}", hop)

    async def _connect(self, address: str) -> None:
        try:
            await self._peers.to(address)
        except BlocktrainError as error:
            log.warning("cannot connect to %s in advance: %s", address, error)

    def _fail(self, steps: Sequence[StepEnvelope], code: str, text: str, hop: str = "") -> None:
        """Tell the waiting routers that are still connected."""
        for step in steps:
            if router := self._routers.get(step.router):
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


# As a process


@dataclass(frozen=True)
class StageSettings:
    run: Path
    blocks: range
    listen: str
    announce: str
    keys: Path | None  # None: no TLS
    name: str
    device: str
    precision: str
    weights: str  # full or int8
    readout: str  # auto, product or final
    max_requests: int
    cache_bytes: int
    until_stdin_closes: bool
    prefill_chunk: int = 0  # positions; 0: the default for the device
    prefix_bytes: int = 1 << 30  # for contexts of ended requests
    terms: Terms = DEFAULT_TERMS


def serve_stage(
    settings: StageSettings, tell: Callable[[str], None], source: BlockSource | None = None
) -> None:
    """Load the blocks, listen, and pass the address to `tell`. Returns after a stop signal.
    `source` replaces the run's blocks."""
    source = source or BlockSource(RunDir.open(settings.run), settings.weights)
    blocks, last = settings.blocks, source.config.block_count - 1
    if not last:
        raise ConfigError("this run has only one block, which the router serves; it needs no stage")
    if blocks[0] < 1 or blocks[-1] > last:
        raise ConfigError(f"--block must be within 1 to {last}; the router has block 0")
    asyncio.run(_serve(settings, source, tell))


async def _serve(settings: StageSettings, source: BlockSource, tell: Callable[[str], None]) -> None:
    name = settings.name or _only_stage(settings.keys)
    inward = server_context(settings.keys, name) if settings.keys else None
    outward = client_context(settings.keys, name) if settings.keys else None
    blocks, terms = settings.blocks, settings.terms
    limits = SlotLimits(
        settings.max_requests, settings.cache_bytes, prefix_bytes=settings.prefix_bytes
    )
    compute = resolve(settings.device, settings.precision)
    readout = chosen_readout(source.config, settings.readout)
    computing = StageCompute.load(source, blocks, compute, readout, limits)
    hello = {
        **model_hello(source.config, STAGE, name, readout),
        "blocks": list(blocks),
        "weights": [source.fingerprint(block) for block in blocks],
        "address": settings.announce,
    }
    check = partial(mismatch, hello)

    async def reach(address: str) -> RingConnection:
        return await dial(address, outward, hello, roles=[STAGE], check=check, terms=terms)

    label = f"block {blocks[0]}" if len(blocks) == 1 else f"blocks {blocks[0]}-{blocks[-1]}"
    chunk = chunk_for(compute.device.type, settings.prefill_chunk)
    stage = Stage(label, computing, reach, chunk)
    listener = bound_socket(*split_host_port(settings.listen))
    roles = [ROUTER, STAGE]
    server = RingListener(
        listener, inward, lambda: hello, stage.serve, roles=roles, check=check, terms=terms
    )
    running = asyncio.ensure_future(stage.run())
    _stop_on_signals(running)
    if settings.until_stdin_closes:
        _stop_with_stdin(running, asyncio.get_running_loop())
    tell(join_host_port(*listener.getsockname()[:2]))
    try:
        with suppress(asyncio.CancelledError):
            await running
    finally:
        await server.close()


def _only_stage(keys: Path | None) -> str:
    """The name of the only stage with a key in the folder."""
    if keys is None:
        return STAGE
    names = [
        path.stem for path in sorted(keys.glob("*.key")) if path.stem not in (AUTHORITY, ROUTER)
    ]
    if len(names) == 1:
        return names[0]
    if names:
        raise ConfigError(f"{keys} has the keys of {', '.join(names)}; choose one with --name")
    raise ConfigError(
        f"{keys} has no key of a stage; make one in the router's key folder with `blocktrain keys"
        " FOLDER --name NAME`, and copy NAME.key, NAME.pem and ca.pem here, or use --plain-tcp"
        " in a network that you trust"
    )


def _stop_on_signals(running: "asyncio.Future[None]") -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError):  # Windows: Ctrl-C raises KeyboardInterrupt instead
            asyncio.get_running_loop().add_signal_handler(number, running.cancel)


def _stop_with_stdin(running: "asyncio.Future[None]", loop: asyncio.AbstractEventLoop) -> None:
    """End a local stage with the process that started it, even if that was killed."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):  # sys.stdin would keep its lock
            pass
        loop.call_soon_threadsafe(running.cancel)

    threading.Thread(target=watch, daemon=True).start()
