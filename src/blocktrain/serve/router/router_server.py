"""The process of `blocktrain serve`: computes the first block, sends steps to the stages for the
other blocks, and answers HTTP requests.

If no stages are given, it starts a local stage process for every other block, restarts those that
die, and ends them when it ends.
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
from functools import partial
from pathlib import Path
from typing import Any

from blocktrain.config import Config
from blocktrain.data.chat_template import ChatTemplate
from blocktrain.data.tokenizer import stored_tokenizer
from blocktrain.environment import machine_threads
from blocktrain.errors import ConfigError, UnavailableError
from blocktrain.protocol.addresses import bound_socket, join_host_port, split_host_port
from blocktrain.protocol.limited_server import ConnectionLimits
from blocktrain.protocol.ring_keys import ROUTER, STAGE, Keyring, client_context
from blocktrain.serve.http.http_server import (
    MOST_CONNECTIONS,
    ApiSettings,
    CertificateFiles,
    checked_certificate,
    web_server,
)
from blocktrain.serve.http.openai import RequestLimits
from blocktrain.serve.http.served_model import ServedModel
from blocktrain.serve.ring.batch import SlotLimits
from blocktrain.serve.ring.compute import (
    BlockSource,
    StageCompute,
)
from blocktrain.serve.ring.connection import DEFAULT_TERMS, Terms
from blocktrain.serve.ring.handshake import chosen_readout, dial, model_hello, stage_mismatch
from blocktrain.serve.ring.turns import chunk_for
from blocktrain.serve.router.engine import EngineLimits, RingEngine
from blocktrain.serve.router.first_block import DraftModel, FirstBlock, check_same_tokens
from blocktrain.serve.router.pipeline import Pipeline
from blocktrain.serve.router.profile import NO_PROFILER, Profiler
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.device import resolve

RESTART_SECONDS = 0.2  # pause before a dead stage is restarted
START_SECONDS = 120.0  # long, because a large block loads slowly

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RouterSettings:
    run: Path
    listen: str
    api_keys: tuple[str, ...]
    stages: tuple[str, ...]  # empty: local processes, started by `stage_command`
    keys: Path
    plain_tcp: bool
    wire: str
    readout: str  # auto, product or final
    device: str
    precision: str
    weights: str  # full or int8
    max_requests: int
    max_tokens: int
    patience_seconds: float
    draft: Path | None = None  # a run whose model writes drafts
    tls_cert: Path | None = None
    tls_key: Path | None = None
    origins: tuple[str, ...] = ()
    request_log: Path | None = None
    long_prompts: str = "truncate"  # or "reject"
    most_connections: int = MOST_CONNECTIONS
    most_connections_per_address: int | None = None
    prefill_chunk: int = 0  # positions; 0: the default for the device
    most_waiting: int = 64  # requests of one API key
    queue_seconds: float = 30.0
    prefix_bytes: int = 1 << 30  # for contexts of ended requests
    stage_command: tuple[str, ...] = ()
    terms: Terms = DEFAULT_TERMS
    profile: Path | None = None  # a file for the trace

    @property
    def slots(self) -> int:
        """Slots of each cache: twice `max_requests`, because waiting and just cancelled requests
        have contexts too."""
        return 2 * self.max_requests


def serve_router(
    settings: RouterSettings, tell: Callable[[str], None], source: BlockSource | None = None
) -> None:
    """Serve until a stop signal. Passes the address to `tell` once requests are accepted.

    `source` replaces the run's blocks; the stages then need the same source.
    """
    if settings.stages and not settings.plain_tcp and not settings.keys.is_dir():
        raise ConfigError(
            f"{settings.keys} has no keys; make them with `blocktrain keys {settings.keys} --stages"
            f" {len(settings.stages)}`, or use --plain-tcp in a network that you trust"
        )
    tls = checked_certificate(settings.tls_cert, settings.tls_key)
    source = source or BlockSource(RunDir.open(settings.run), settings.weights)
    model = _served_model(settings, source.config)
    asyncio.run(_serve(settings, source, model, tls, tell))


async def _serve(
    settings: RouterSettings,
    source: BlockSource,
    model: ServedModel,
    tls: CertificateFiles | None,
    tell: Callable[[str], None],
) -> None:
    listener = bound_socket(*split_host_port(settings.listen))
    profiler = Profiler() if settings.profile else NO_PROFILER
    async with AsyncExitStack() as stack:
        if settings.profile:
            stack.callback(_report, profiler, settings.profile, tell)
        stages, keys = settings.stages, None if settings.plain_tcp else settings.keys
        loading = asyncio.create_task(asyncio.to_thread(_loaded, settings, source))
        stack.push_async_callback(_cancelled, loading)
        if not stages:
            keys = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="blocktrain-")))
            local = LocalStages(settings, range(1, source.config.block_count), keys)
            stack.push_async_callback(local.stop)
            stages = tuple(await local.start())
            restarting = asyncio.ensure_future(local.restart())
            stack.push_async_callback(_cancelled, restarting)
        context = client_context(keys, ROUTER) if keys else None
        engine = _engine(settings, source, stages, context, model, *await loading, profiler)
        if model.template:
            stack.callback(model.template.close)
        running = asyncio.ensure_future(engine.run())
        stack.push_async_callback(_cancelled, running)
        host, port = listener.getsockname()[:2]
        at_once = min(settings.max_requests, engine.slots)
        if at_once < settings.max_requests:
            log.warning(
                "the cache has room for %d requests at once, fewer than --most-requests %d; the"
                " others wait", at_once, settings.max_requests,
            )  # fmt: skip
        address = f"{'https' if tls else 'http'}://{join_host_port(host, port)}"
        ready = f"serving {model.name} at {address}/v1, chat page at {address}/"
        api = ApiSettings(
            keys=settings.api_keys,
            limits=RequestLimits(settings.long_prompts, output_tokens=settings.max_tokens),
            request_log=settings.request_log,
            at_once=at_once,
            queue=settings.most_waiting,
            queue_seconds=settings.queue_seconds,
            origins=settings.origins,
            connections=ConnectionLimits.fitting(
                settings.most_connections, settings.most_connections_per_address
            ),
        )
        server = web_server(engine, model, api, listener, tls, lambda: tell(ready))
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        await asyncio.wait([running, serving], return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        if running.done():
            running.result()  # raises: the engine ends only with an error


async def _cancelled(task: "asyncio.Future[Any]") -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def _engine(
    settings: RouterSettings,
    source: BlockSource,
    stages: tuple[str, ...],
    context: ssl.SSLContext | None,
    model: ServedModel,
    first_block: FirstBlock,
    draft_model: DraftModel | None,
    profiler: Profiler,
) -> RingEngine:
    name, readout = secrets.token_urlsafe(6), chosen_readout(source.config, settings.readout)
    weights = [source.fingerprint(block) for block in range(source.config.block_count)]
    hello = model_hello(source.config, ROUTER, name, readout)
    check = partial(stage_mismatch, hello, weights)
    reach = partial(
        dial, context=context, hello=hello, roles=[STAGE], check=check, terms=settings.terms
    )
    compute = resolve(settings.device, settings.precision)
    limits = EngineLimits(
        settings.slots,
        settings.patience_seconds,
        prefill_chunk=chunk_for(compute.device.type, settings.prefill_chunk),
    )
    pipeline = Pipeline(stages, source.config, reach)
    return RingEngine(
        first_block, pipeline, name, settings.wire, limits, model.tokenizer.token_bytes,
        draft_model, profiler,
    )  # fmt: skip


def _loaded(settings: RouterSettings, source: BlockSource) -> tuple[FirstBlock, DraftModel | None]:
    """What computes on the router's machine."""
    compute = resolve(settings.device, settings.precision)
    slots = SlotLimits(settings.slots, prefix_bytes=settings.prefix_bytes)
    readout = chosen_readout(source.config, settings.readout)
    first = FirstBlock(StageCompute.load(source, range(1), compute, readout, slots))
    if not settings.draft:
        return first, None
    small = BlockSource(RunDir.open(settings.draft), settings.weights)
    blocks, how = range(small.config.block_count), chosen_readout(small.config, "auto")
    return first, DraftModel(StageCompute.load(small, blocks, compute, how, slots))


def _report(profiler: Profiler, path: Path, tell: Callable[[str], None]) -> None:
    profiler.write(path)
    tell(f"{profiler.table()}\ntrace: {path}; open it at https://ui.perfetto.dev")


def _served_model(settings: RouterSettings, config: Config) -> ServedModel:
    """The model as clients see it. Raises ConfigError if the draft model has other tokens."""
    run = RunDir.open(settings.run) if config.vocab.sha256 else None
    files = run.tokenizer_files() if run else {}
    tokenizer, folder = stored_tokenizer(files, config.vocab), settings.run.resolve().name
    if settings.draft:
        draft = RunDir.open(settings.draft)
        drafts_in = stored_tokenizer(draft.tokenizer_files(), draft.config.vocab)
        check_same_tokens(tokenizer, drafts_in, str(settings.draft))
    origin = run.origin if run else None
    return ServedModel(
        origin["source"] if origin and origin["revision"] else folder,
        config,
        tokenizer,
        ChatTemplate.of_tokenizer(files),
        settings.draft.resolve().name if settings.draft else "",
        alias=folder,
    )


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
        """Start all stages at once. Returns their addresses in the order of the blocks."""
        await asyncio.gather(*(self._start(block, "127.0.0.1:0") for block in self._blocks))
        return [self._addresses[block] for block in self._blocks]

    async def restart(self) -> None:
        """Restart every stage that dies, at its old address, until cancelled."""
        await asyncio.gather(*map(self._watch, self._blocks))

    async def stop(self) -> None:
        """Kill all stages, which have nothing to save."""
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()
        await asyncio.gather(*(process.wait() for process in self._processes.values()))

    async def _watch(self, block: int) -> None:
        while True:
            code = await self._processes[block].wait()
            log.warning("the stage of block %s exited with code %s; restarting it", block, code)
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
            start_new_session=True,  # only the router gets Ctrl-C, and ends them
        )
        self._processes[block] = process
        assert process.stdout
        try:
            async with asyncio.timeout(START_SECONDS):
                line = await process.stdout.readline()
        except TimeoutError:
            process.kill()
            raise UnavailableError(
                f"the stage of block {block} did not start within {START_SECONDS:g} s; see the"
                " lines above, or start it by hand with `blocktrain stage`"
            ) from None
        if not line:
            raise UnavailableError(
                f"the stage of block {block} exited with code {await process.wait()} before it"
                " listened; see its error in the lines above"
            )
        self._addresses[block] = json.loads(line)["listening"]

    def _command(self, block: int, listen: str) -> list[str]:
        settings = self._settings
        options = {
            "--block": block, "--listen": listen, "--keys": self._keys, "--name": f"stage-{block}",
            "--device": settings.device, "--precision": settings.precision,
            "--weights": settings.weights, "--readout": settings.readout,
            "--threads": max(1, machine_threads() // (len(self._blocks) + 1)),
            "--most-requests": settings.slots, "--prefill-chunk": settings.prefill_chunk,
            "--prefix-gb": settings.prefix_bytes / 1e9,
        }  # fmt: skip
        words = [str(word) for option in options.items() for word in option]
        run = str(settings.run)
        return [*settings.stage_command, run, *words, "--force", "--json", "--until-stdin-closes"]
