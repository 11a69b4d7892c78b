"""A stage as a process: blocks loaded, a port, and a life until a signal."""

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
from blocktrain.serve.ring.connection import Hello, RingConnection
from blocktrain.serve.ring.handshake import RingListener, dial
from blocktrain.serve.stage import served_blocks
from blocktrain.serve.stage.batch import SlotLimits
from blocktrain.serve.stage.compute import StageCompute
from blocktrain.serve.stage.served_blocks import Blocks, StoredBlocks
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
    weights: str  # how they are held: full, or int8
    readout: str
    most_requests: int
    cache_bytes: int
    until_stdin_closes: bool


def serve_stage(
    settings: StageSettings, tell: Callable[[str], None], source: Blocks | None = None
) -> None:
    """Load, listen, and say where; returns when a signal ends it. Blocks are the run's, unless
    they come from elsewhere."""
    source = source or StoredBlocks(RunDir.open(settings.run), settings.weights)
    _check_blocks(settings.blocks, source.config.block_count - 1)
    asyncio.run(_serve(settings, source, tell))


def _check_blocks(blocks: range, last: int) -> None:
    if not last:
        raise ConfigError("this run is one block, which the router holds: it needs no stage")
    if blocks[0] < 1 or blocks[-1] > last:
        raise ConfigError(f"a stage can hold blocks 1 to {last}: the router holds block 0")


async def _serve(settings: StageSettings, source: Blocks, tell: Callable[[str], None]) -> None:
    name = settings.name or _only_stage(settings.keys)
    inward = server_context(settings.keys, name) if settings.keys else None
    outward = client_context(settings.keys, name) if settings.keys else None
    limits = SlotLimits(settings.most_requests, settings.cache_bytes)
    compute = resolve(settings.device, settings.precision)
    computing = StageCompute.load(source, settings.blocks, compute, settings.readout, limits)
    hello = {
        "role": STAGE,
        "name": name,
        "settings": served_blocks.of_settings(source.config),
        "blocks": list(settings.blocks),
        "weights": [source.fingerprint(block) for block in settings.blocks],
        "readout": settings.readout,
        "address": settings.announce,
    }

    def check(said: Hello) -> str | None:
        if said.get("settings") != hello["settings"] or not isinstance(said.get("name"), str):
            return "this stage holds blocks of another model"
        if said.get("readout") != hello["readout"]:
            return f"this stage was started with --readout {settings.readout}"
        return None

    async def reach(address: str) -> RingConnection:
        return await dial(address, outward, hello, roles=[STAGE], check=check)

    listener = bound_socket(*split_host_port(settings.listen))
    stage = Stage(_label(settings.blocks), computing, reach)
    server = RingListener(
        listener, inward, lambda: hello, stage.attend, roles=[ROUTER, STAGE], check=check
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
    """The name of the one stage a folder has the key of."""
    if keys is None:
        return STAGE
    names = [
        path.stem for path in sorted(keys.glob("*.key")) if path.stem not in (AUTHORITY, ROUTER)
    ]
    if len(names) == 1:
        return names[0]
    held = f"has the keys of {', '.join(names)}; choose one with --name" if names else "has no key"
    raise ConfigError(f"{keys} {held}" + ("" if names else "; `blocktrain keys` makes them"))


def _label(blocks: range) -> str:
    return f"block {blocks[0]}" if len(blocks) == 1 else f"blocks {blocks[0]}-{blocks[-1]}"


def _stop_on_signals(running: "asyncio.Future[None]") -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError):  # Windows: Ctrl-C raises KeyboardInterrupt instead
            asyncio.get_running_loop().add_signal_handler(number, running.cancel)


def _stop_with_stdin(running: "asyncio.Future[None]", loop: asyncio.AbstractEventLoop) -> None:
    """A local stage ends with the process that started it, however that ended."""

    def watch() -> None:
        while os.read(
            sys.stdin.fileno(), 4096
        ):  # not by its buffer, whose lock outlives the thread
            pass
        loop.call_soon_threadsafe(running.cancel)

    threading.Thread(target=watch, daemon=True).start()
