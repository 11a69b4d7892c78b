"""A router as a process: the first block, the stages, and an HTTP port.

Without addresses of stages it starts one as a process of this machine for every block, restarts
those that die, and ends them with itself.
"""

import asyncio
import json
import logging
import secrets
import ssl
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from blocktrain.errors import ConfigError, UnavailableError
from blocktrain.protocol.addresses import bound_socket, join_host_port, split_host_port
from blocktrain.protocol.ring_keys import ROUTER, STAGE, Keyring, client_context
from blocktrain.serve.http.app import ApiSettings
from blocktrain.serve.http.http_server import CertificateFiles, checked_certificate, serve
from blocktrain.serve.http.openai import RequestLimits
from blocktrain.serve.ring.connection import DEFAULT_TERMS, Hello, RingConnection, Terms
from blocktrain.serve.ring.envelope import READS_BARE_STEPS
from blocktrain.serve.ring.handshake import dial
from blocktrain.serve.router.engine import EngineLimits, RingEngine
from blocktrain.serve.router.first_block import FirstBlock
from blocktrain.serve.router.pipeline import Pipeline
from blocktrain.serve.stage.batch import SlotLimits
from blocktrain.serve.stage.compute import (
    BlockSource,
    RunBlockSource,
    settings_fingerprint,
    stage_mismatch,
)
from blocktrain.storage.run_dir import RunDir
from blocktrain.threads import machine_threads
from blocktrain.train.device import resolve

RESTART_SECONDS = 0.2  # before a stage that died is started again
START_SECONDS = 120.0  # a large block takes long to load

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RouterSettings:
    run: Path
    listen: str
    api_keys: tuple[str, ...]
    stages: tuple[str, ...]  # none: processes on this machine, started by `stage_command`
    keys: Path
    plain_tcp: bool
    wire: str
    readout: str
    device: str
    precision: str
    weights: str  # full or int8
    max_requests: int
    max_bytes: int
    patience_seconds: float
    tls_cert: Path | None = None
    tls_key: Path | None = None
    origins: tuple[str, ...] = ()
    stage_command: tuple[str, ...] = ()
    terms: Terms = DEFAULT_TERMS

    @property
    def slots(self) -> int:
        """Of every cache: requests that wait or were just cancelled have contexts too."""
        return 2 * self.max_requests


def serve_router(
    settings: RouterSettings, tell: Callable[[str], None], source: BlockSource | None = None
) -> None:
    """Load the first block, start or find the stages, listen and `tell` where; until a stop signal.

    `source` replaces the run's blocks; the stages then need the same one.
    """
    if settings.stages and not settings.plain_tcp and not settings.keys.is_dir():
        raise ConfigError(
            f"there are no keys at {settings.keys}; make them with `blocktrain keys`, or use"
            " --plain-tcp inside a network you trust"
        )
    tls = checked_certificate(settings.tls_cert, settings.tls_key)
    source = source or RunBlockSource(RunDir.open(settings.run), settings.weights)
    asyncio.run(_serve(settings, source, tls, tell))


async def _serve(
    settings: RouterSettings,
    source: BlockSource,
    tls: CertificateFiles | None,
    tell: Callable[[str], None],
) -> None:
    listener = bound_socket(*split_host_port(settings.listen))
    async with AsyncExitStack() as stack:
        stages, keys = settings.stages, None if settings.plain_tcp else settings.keys
        if not stages:
            keys = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="blocktrain-")))
            local = LocalStages(settings, range(1, source.config.block_count), keys)
            stack.push_async_callback(local.stop)
            stages = tuple(await local.start())
            restarting = asyncio.ensure_future(local.restart())
            stack.push_async_callback(_cancelled, restarting)
        context = client_context(keys, ROUTER) if keys else None
        engine = _engine(settings, source, stages, context)
        running = asyncio.ensure_future(engine.run())
        stack.push_async_callback(_cancelled, running)
        host, port = listener.getsockname()[:2]
        address = f"{'https' if tls else 'http'}://{join_host_port(host, port)}"
        ready = f"serving {engine.model} at {address}/v1, a page to try it at {address}/"
        api = ApiSettings(
            keys=settings.api_keys,
            limits=RequestLimits(output_bytes=settings.max_bytes),
            at_once=settings.max_requests,
            queue=settings.max_requests,
            origins=settings.origins,
        )
        serving = asyncio.ensure_future(serve(engine, api, listener, tls, lambda: tell(ready)))
        await asyncio.wait([running, serving], return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        if running.done():
            running.result()  # the engine only ends by an error


async def _cancelled(task: "asyncio.Future[None]") -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def _engine(
    settings: RouterSettings,
    source: BlockSource,
    stages: tuple[str, ...],
    context: ssl.SSLContext | None,
) -> RingEngine:
    name = secrets.token_hex(8)
    fingerprint = settings_fingerprint(source.config)
    weights = [source.fingerprint(block) for block in range(source.config.block_count)]
    hello = {
        "role": ROUTER,
        "name": name,
        "settings": fingerprint,
        "readout": settings.readout,
        **READS_BARE_STEPS,
    }

    def check(stage_hello: Hello) -> str | None:
        return stage_mismatch(stage_hello, fingerprint, weights)

    async def reach(address: str) -> RingConnection:
        return await dial(address, context, hello, roles=[STAGE], check=check, terms=settings.terms)

    compute = resolve(settings.device, settings.precision)
    slots = SlotLimits(settings.slots)
    first_block = FirstBlock.load(source, compute, settings.readout, slots)
    limits = EngineLimits(settings.slots, settings.patience_seconds)
    pipeline = Pipeline(stages, source.config.block_count, reach)
    model = settings.run.resolve().name
    return RingEngine(model, first_block, pipeline, name, settings.wire, limits)


class LocalStages:
    """A stage process for every block after the first."""

    def __init__(self, settings: RouterSettings, blocks: range, keys: Path) -> None:
        keyring = Keyring(keys)
        keyring.add(ROUTER, ROUTER)
        for block in blocks:
            keyring.add(STAGE, f"stage-{block}")
        self._settings, self._blocks, self._keys = settings, blocks, keys
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._addresses: dict[int, str] = {}

    async def start(self) -> list[str]:
        """Start them all together; their addresses in the order of the blocks."""
        await asyncio.gather(*(self._start(block, "127.0.0.1:0") for block in self._blocks))
        return [self._addresses[block] for block in self._blocks]

    async def restart(self) -> None:
        """Start every stage that dies again, at its old address, until cancelled."""
        async with asyncio.TaskGroup() as watchers:
            for block in self._blocks:
                watchers.create_task(self._watch(block))

    async def stop(self) -> None:
        """Kill them: a stage has nothing to save."""
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()
        for process in self._processes.values():
            await process.wait()

    async def _watch(self, block: int) -> None:
        while True:
            code = await self._processes[block].wait()
            log.warning("the stage of block %s ended with %s; starting it again", block, code)
            await asyncio.sleep(RESTART_SECONDS)
            try:
                await self._start(block, self._addresses[block])
            except UnavailableError as error:
                log.warning("%s", error)

    async def _start(self, block: int, listen: str) -> None:
        process = await asyncio.create_subprocess_exec(
            *self._command(block, listen),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the router alone, which ends them later
        )
        self._processes[block] = process
        assert process.stdout
        async with asyncio.timeout(START_SECONDS):
            line = await process.stdout.readline()
        if not line:
            raise UnavailableError(
                f"the stage of block {block} did not start; it ended with {await process.wait()}"
            )
        self._addresses[block] = json.loads(line)["listening"]

    def _command(self, block: int, listen: str) -> list[str]:
        settings = self._settings
        command = [*settings.stage_command, str(settings.run), "--block", str(block), "--json"]
        command += ["--listen", listen, "--keys", str(self._keys), "--name", f"stage-{block}"]
        command += ["--device", settings.device, "--precision", settings.precision]
        command += ["--weights", settings.weights, "--readout", settings.readout]
        share = max(1, machine_threads() // (len(self._blocks) + 1))
        command += ["--threads", str(share)]
        return [*command, "--most-requests", str(settings.slots), "--until-stdin-closes"]
