"""A router as a process: the first block, the stages, and an HTTP port."""

import asyncio
import secrets
import ssl
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from blocktrain.errors import ConfigError
from blocktrain.protocol.addresses import bound_socket, join_host_port, split_host_port
from blocktrain.protocol.ring_keys import ROUTER, STAGE, Keyring, client_context
from blocktrain.serve.http.app import Settings
from blocktrain.serve.http.http_server import https_context, serve
from blocktrain.serve.http.openai import RequestLimits as ApiLimits
from blocktrain.serve.ring.connection import Hello, RingConnection
from blocktrain.serve.ring.handshake import dial
from blocktrain.serve.router.engine import Engine, EngineLimits
from blocktrain.serve.router.front import FirstBlock
from blocktrain.serve.router.local_stages import LocalStages
from blocktrain.serve.router.pipeline import Pipeline
from blocktrain.serve.stage import served_blocks
from blocktrain.serve.stage.batch import SlotLimits as CacheLimits
from blocktrain.serve.stage.served_blocks import Blocks, StoredBlocks
from blocktrain.storage.run_dir import RunDir
from blocktrain.train.device import resolve


@dataclass(frozen=True)
class RouterSettings:
    run: Path
    listen: str
    api_keys: tuple[str, ...]
    stages: tuple[str, ...]  # none: processes on this machine
    keys: Path
    plain_tcp: bool
    wire: str
    readout: str
    device: str
    precision: str
    weights: str  # how they are held: full, or int8
    most_requests: int
    most_bytes: int
    patience_seconds: float
    tls_cert: Path | None = None
    tls_key: Path | None = None


def serve_router(
    settings: RouterSettings, tell: Callable[[str], None], source: Blocks | None = None
) -> None:
    """Load, start or find the stages, listen, and say where; returns when a signal ends it. Blocks
    are the run's, unless they come from elsewhere, as those of the stages must then, too."""
    if settings.stages and not settings.plain_tcp and not settings.keys.is_dir():
        raise ConfigError(
            f"no keys at {settings.keys}: `blocktrain keys` makes them, --plain-tcp does without"
        )
    tls = https_context(settings.tls_cert, settings.tls_key)
    source = source or StoredBlocks(RunDir.open(settings.run), settings.weights)
    asyncio.run(_serve(settings, source, tls, tell))


async def _serve(
    settings: RouterSettings,
    source: Blocks,
    tls: ssl.SSLContext | None,
    tell: Callable[[str], None],
) -> None:
    listener = bound_socket(*split_host_port(settings.listen))
    async with AsyncExitStack() as stack:
        stages, keys = settings.stages, None if settings.plain_tcp else settings.keys
        if not stages:
            keys = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="blocktrain-")))
            local = _local_stages(settings, range(1, source.config.block_count), keys)
            stack.push_async_callback(local.stop)
            stages = tuple(await local.start())
            keeping = asyncio.ensure_future(local.keep())
            stack.push_async_callback(_cancelled, keeping)
        engine = _engine(settings, source, stages, keys)
        running = asyncio.ensure_future(engine.run())
        stack.push_async_callback(_cancelled, running)
        host, port = listener.getsockname()[:2]
        address = f"{'https' if tls else 'http'}://{join_host_port(host, port)}"
        about = f"serving {engine.model} at {address}/v1, a page to try it at {address}/"
        api = Settings(
            keys=settings.api_keys,
            limits=ApiLimits(output_bytes=settings.most_bytes),
            at_once=settings.most_requests,
            queue=settings.most_requests,
        )
        serving = asyncio.ensure_future(serve(engine, api, listener, tls, lambda: tell(about)))
        await asyncio.wait([running, serving], return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        if running.done():
            running.result()  # an engine ends by an error alone


async def _cancelled(task: "asyncio.Future[None]") -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def _local_stages(settings: RouterSettings, blocks: range, keys: Path) -> LocalStages:
    keyring = Keyring(keys)
    keyring.add(ROUTER, ROUTER)
    for block in blocks:
        keyring.add(STAGE, f"stage-{block}")
    options = ["--device", settings.device, "--precision", settings.precision]
    options += ["--weights", settings.weights]
    options += ["--readout", settings.readout, "--most-requests", str(2 * settings.most_requests)]
    return LocalStages(settings.run, blocks, keys, options)


def _engine(
    settings: RouterSettings, source: Blocks, stages: tuple[str, ...], keys: Path | None
) -> Engine:
    name = secrets.token_hex(8)
    context = client_context(keys, ROUTER) if keys else None
    hello = {
        "role": ROUTER,
        "name": name,
        "settings": served_blocks.of_settings(source.config),
        "readout": settings.readout,
    }
    weights = [source.fingerprint(block) for block in range(source.config.block_count)]

    def check(said: Hello) -> str | None:
        return served_blocks.mismatch(said, hello["settings"], weights)

    async def reach(address: str) -> RingConnection:
        return await dial(address, context, hello, roles=[STAGE], check=check)

    compute = resolve(settings.device, settings.precision)
    front = FirstBlock.load(
        source, compute, settings.readout, CacheLimits(2 * settings.most_requests)
    )
    limits = EngineLimits(2 * settings.most_requests, settings.patience_seconds)
    pipeline = Pipeline(stages, source.config.block_count, reach)
    model = settings.run.resolve().name
    return Engine(model, front, pipeline, name, settings.wire, limits)
