"""A stage as a process: loads its blocks, listens, and computes until a stop signal."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from blocktrain.errors import ConfigError
from blocktrain.protocol.addresses import bound_socket, join_host_port, split_host_port
from blocktrain.protocol.ring_keys import AUTHORITY, ROUTER, STAGE, client_context, server_context
from blocktrain.serve.ring.connection import DEFAULT_TERMS, Hello, RingConnection, Terms
from blocktrain.serve.ring.envelope import READS_BARE_STEPS
from blocktrain.serve.ring.handshake import RingListener, dial
from blocktrain.serve.stage.batch import SlotLimits
from blocktrain.serve.stage.compute import (
    BlockSource,
    RunBlockSource,
    StageCompute,
    settings_fingerprint,
)
from blocktrain.serve.stage.stage import Stage
from blocktrain.storage.run_dir import RunDir
from blocktrain.train.device import resolve


@dataclass(frozen=True)
class StageSettings:
    run: Path
    blocks: range
    listen: str
    announce: str
    keys: Path | None  # None: plain TCP
    name: str
    device: str
    precision: str
    weights: str  # full or int8
    readout: str
    max_requests: int
    cache_bytes: int
    until_stdin_closes: bool
    terms: Terms = DEFAULT_TERMS


def serve_stage(
    settings: StageSettings, tell: Callable[[str], None], source: BlockSource | None = None
) -> None:
    """Load the blocks, listen, and `tell` where. Returns after a stop signal. `source` replaces the
    run's blocks."""
    source = source or RunBlockSource(RunDir.open(settings.run), settings.weights)
    _check_blocks(settings.blocks, source.config.block_count - 1)
    asyncio.run(_serve(settings, source, tell))


def _check_blocks(blocks: range, last: int) -> None:
    if not last:
        raise ConfigError("this run has one block, which the router serves: it needs no stage")
    if blocks[0] < 1 or blocks[-1] > last:
        raise ConfigError(f"a stage can have blocks 1 to {last}; block 0 is the router's")


async def _serve(settings: StageSettings, source: BlockSource, tell: Callable[[str], None]) -> None:
    name = settings.name or _only_stage(settings.keys)
    inward = server_context(settings.keys, name) if settings.keys else None
    outward = client_context(settings.keys, name) if settings.keys else None
    limits = SlotLimits(settings.max_requests, settings.cache_bytes)
    compute = resolve(settings.device, settings.precision)
    computing = StageCompute.load(source, settings.blocks, compute, settings.readout, limits)
    hello = {
        "role": STAGE,
        "name": name,
        "settings": settings_fingerprint(source.config),
        "blocks": list(settings.blocks),
        "weights": [source.fingerprint(block) for block in settings.blocks],
        "readout": settings.readout,
        "address": settings.announce,
        **READS_BARE_STEPS,
    }

    def check(other: Hello) -> str | None:
        if other.get("settings") != hello["settings"] or not isinstance(other.get("name"), str):
            return "this stage has blocks of another model"
        if other.get("readout") != hello["readout"]:
            return f"this stage was started with --readout {settings.readout}"
        return None

    async def reach(address: str) -> RingConnection:
        return await dial(address, outward, hello, roles=[STAGE], check=check, terms=settings.terms)

    listener = bound_socket(*split_host_port(settings.listen))
    stage = Stage(_label(settings.blocks), computing, reach)
    server = RingListener(
        listener,
        inward,
        lambda: hello,
        stage.serve,
        roles=[ROUTER, STAGE],
        check=check,
        terms=settings.terms,
    )
    running = asyncio.ensure_future(stage.run())
    _stop_on_signals(running)
    if settings.until_stdin_closes:
        _stop_with_stdin(running, asyncio.get_running_loop())
    tell(join_host_port(*listener.getsockname()[:2]))
    try:
        await running
    except asyncio.CancelledError:
        pass
    finally:
        await server.close()


def _only_stage(keys: Path | None) -> str:
    """The name of the only stage whose key is in the folder."""
    if keys is None:
        return STAGE
    names = [
        path.stem for path in sorted(keys.glob("*.key")) if path.stem not in (AUTHORITY, ROUTER)
    ]
    if len(names) == 1:
        return names[0]
    if names:
        raise ConfigError(f"{keys} has the keys of {', '.join(names)}; choose one with --name")
    raise ConfigError(f"{keys} has no stage's key; make one with `blocktrain keys`")


def _label(blocks: range) -> str:
    return f"block {blocks[0]}" if len(blocks) == 1 else f"blocks {blocks[0]}-{blocks[-1]}"


def _stop_on_signals(running: "asyncio.Future[None]") -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError):  # Windows: Ctrl-C raises KeyboardInterrupt instead
            asyncio.get_running_loop().add_signal_handler(number, running.cancel)


def _stop_with_stdin(running: "asyncio.Future[None]", loop: asyncio.AbstractEventLoop) -> None:
    """A local stage ends with the process that started it, even if that was killed."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):  # sys.stdin's own lock would outlive the thread
            pass
        loop.call_soon_threadsafe(running.cancel)

    threading.Thread(target=watch, daemon=True).start()
