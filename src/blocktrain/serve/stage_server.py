"""A stage as a process: blocks loaded, a port, and a life until a signal."""

import asyncio
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blocktrain.errors import ConfigError
from blocktrain.protocol.listening import bound_socket, host_and_port
from blocktrain.serve import fingerprint
from blocktrain.serve.compute import StageCompute
from blocktrain.serve.connection import Connection, dial, listen
from blocktrain.serve.keys import STAGE, Contexts, contexts
from blocktrain.serve.stage import Stage
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
    most_requests: int
    cache_bytes: int
    until_stdin_closes: bool


def serve_stage(settings: StageSettings, tell: Callable[[str], None]) -> None:
    """Load, listen, and say where; returns when a signal ends it."""
    run = RunDir.open(settings.run)
    last = run.config.units - 1
    if settings.blocks[-1] > last or settings.blocks[0] < 1:
        raise ConfigError(
            f"a stage of this run can hold blocks 1 to {last}: the router holds block 0"
            if last
            else "this run is one block, which the router holds: it needs no stage"
        )
    secured = contexts(settings.keys, STAGE, settings.name) if settings.keys else None
    hello = {
        "settings": fingerprint.of_settings(run.config),
        "blocks": list(settings.blocks),
        "weights": [fingerprint.of_block(run, block) for block in settings.blocks],
        "address": settings.announce,
    }
    compute = StageCompute.load(
        run,
        settings.blocks,
        resolve(settings.device, settings.precision),
        most_requests=settings.most_requests,
        most_bytes=settings.cache_bytes,
    )
    asyncio.run(_serve(settings, compute, secured, hello, tell))


async def _serve(
    settings: StageSettings,
    compute: StageCompute,
    secured: Contexts | None,
    hello: dict[str, Any],
    tell: Callable[[str], None],
) -> None:
    listener = bound_socket(*host_and_port(settings.listen))
    host, port = listener.getsockname()[:2]
    address = settings.announce or f"{host}:{port}"

    async def reach(hop: str) -> Connection:
        return await dial(hop, secured and secured.client, {**hello, "name": address}, check)

    def check(said: dict[str, Any]) -> str | None:
        """A router says what it wants to run; another stage, what it holds."""
        if said.get("settings") != hello["settings"]:
            return "this stage holds blocks of another model"
        return None

    stage = Stage(address, compute, reach)
    server = await listen(listener, secured and secured.server, hello, check, stage.attend)
    running = asyncio.ensure_future(stage.run())
    _stop_on_signals(running)
    if settings.until_stdin_closes:
        _stop_with_stdin(running, asyncio.get_running_loop())
    tell(f"{host}:{port}")
    try:
        await running
    except asyncio.CancelledError:
        pass
    finally:
        await server.close()


def _stop_on_signals(running: "asyncio.Future[None]") -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            asyncio.get_running_loop().add_signal_handler(number, running.cancel)
        except NotImplementedError:  # Windows: Ctrl-C raises KeyboardInterrupt instead
            pass


def _stop_with_stdin(running: "asyncio.Future[None]", loop: asyncio.AbstractEventLoop) -> None:
    """A local stage ends with the process that started it, however that ended."""

    def watch() -> None:
        sys.stdin.buffer.read()
        loop.call_soon_threadsafe(running.cancel)

    threading.Thread(target=watch, daemon=True).start()
