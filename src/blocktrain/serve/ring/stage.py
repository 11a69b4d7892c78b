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
from blocktrain.serve.ring.activations import NOT_FINITE, Row, is_finite, joined, split_rows
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
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.device import resolve

MAX_WAITING = 256  # queued steps; further ones block their connections
PATIENCE_SECONDS = 5.0  # wait of a step for its prefill, which may take another path
MAX_REMEMBERED = 10_000  # requests whose context was cached or refused
DROPPED = ("missing_prefix", "the cache dropped the context of this step")

Failure = tuple[str, str]  # code and text

T = TypeVar("T")
log = logging.getLogger(__name__)


class EarlySteps:
    """Steps that arrived before their context, at most one per request, each with a timeout."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._waiting: dict[int, tuple[float, StepEnvelope]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, step: StepEnvelope, now: float) -> None:
        self._waiting[step.activations.rows[0].request] = (now + self._patience, step)

    def take(self, requests: Iterable[int]) -> list[StepEnvelope]:
        """Remove and return the steps of these requests."""
        return [self._waiting.pop(each)[1] for each in requests if each in self._waiting]

    def take_expired(self, now: float) -> list[StepEnvelope]:
        return self.take([request for request, (end, _) in self._waiting.items() if end <= now])


class Stage:
    def __init__(self, name: str, compute: StageCompute, dial: Dial) -> None:
        self.name = name
        self._compute = compute
        self._vocabulary = compute.config.vocabulary
        self._peers = ConnectionPool(dial)
        self._routers: dict[str, RingConnection] = {}
        self._steps: asyncio.Queue[StepEnvelope] = asyncio.Queue(MAX_WAITING)
        self._prefills: list[Row] = []
        self._released: list[int] = []
        # Why a recent request may have no cached context; newest last.
        self._losses: dict[int, Failure] = {}
        self._early = EarlySteps(PATIENCE_SECONDS)
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
                    async with asyncio.timeout(PATIENCE_SECONDS if self._early else None):
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
            self._prefills += read_prefill(message, self._vocabulary)
        elif message.kind is FrameKind.RELEASE:
            self._released += read_release(message)
        elif message.kind is FrameKind.DIAL:
            self._start(self._connect(str(message.meta.get("address", ""))))
        else:
            raise ProtocolError(f"a stage does not accept {message.kind.name}")
        self._wake.set()

    async def _turn(self) -> None:
        """Process all input: releases, then prefills, then the steps that need them."""
        released, self._released = self._released, []
        prefills, self._prefills = self._prefills, []
        steps = [self._steps.get_nowait() for _ in range(self._steps.qsize())]
        if released:
            await self._in_thread(self._compute.release, *released)
            self._early.take(released)
        if prefills:
            await self._prefill(prefills)
        steps += self._early.take(row.request for row in prefills)
        for expired in self._early.take_expired(time.monotonic()):
            self._fail([expired], "missing_prefix", "the context of this step did not arrive")
        by_route = defaultdict(list)
        for step in steps:
            by_route[step.route].append(step)
        for together in by_route.values():
            await self._advance(self._with_context(together))

    async def _prefill(self, rows: Sequence[Row]) -> None:
        """Prefill as far as there is room; steps of the other requests will fail."""
        try:
            await self._in_thread(self._compute.prefill, rows)
        except CacheFullError as error:
            self._remember(error.requests, ("cache_full", str(error)))
            if rest := [row for row in rows if row.request not in error.requests]:
                await self._prefill(rest)
        except (BlocktrainError, RuntimeError):
            log.exception("a prefill failed")  # its steps will lack their context

    def _with_context(self, steps: Sequence[StepEnvelope]) -> list[StepEnvelope]:
        """Single-row steps whose context is cached. The others wait for it, or fail."""
        ready = []
        for step in (single for several in steps for single in self._split(several)):
            row = step.activations.rows[0]
            if row.start <= self._compute.cached(row.request):
                ready.append(step)
            elif loss := self._losses.get(row.request):
                self._fail([step], *loss)
            else:
                self._early.add(step, time.monotonic())
        return ready

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

    async def _advance(self, steps: Sequence[StepEnvelope]) -> None:
        if not steps:
            return
        started = time.monotonic()
        try:
            together = joined([step.activations for step in steps])
            activations = await self._in_thread(self._compute.step, together)
        except CacheFullError as error:
            self._fail(steps, "cache_full", str(error))
        except (BlocktrainError, RuntimeError, ValueError) as error:
            log.exception("a step failed")
            self._fail(steps, "failed", str(error))
        else:
            self._remember((row.request for row in activations.rows), DROPPED)
            seconds = {**steps[0].seconds, self.name: time.monotonic() - started}
            self._start(self._send(replace(steps[0], activations=activations, seconds=seconds)))

    async def _send(self, step: StepEnvelope) -> None:
        """Send a result to the next stage or back to the router. Requests with a NaN fail; the
        others continue."""
        if is_finite(step.activations):
            if step.hops:
                await self._send_on(step)
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
    limits = SlotLimits(settings.max_requests, settings.cache_bytes)
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
    stage = Stage(label, computing, reach)
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
