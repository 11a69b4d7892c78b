"""A stage process that does not start is an error with its reason, and leaves no process behind."""

import asyncio
import sys
from pathlib import Path

import pytest

from blocktrain.errors import UnavailableError
from blocktrain.serve.router import router_server
from blocktrain.serve.router.router_server import LocalStages, RouterSettings


def start(folder: Path, program: str) -> None:
    settings = RouterSettings(
        run=folder, listen="", api_keys=(), stages=(), keys=folder, plain_tcp=False, wire="fp32",
        readout="product", device="cpu", precision="fp32", weights="full", max_requests=1,
        max_tokens=1, patience_seconds=1.0, stage_command=(sys.executable, "-c", program),
    )  # fmt: skip

    async def started() -> None:
        stages = LocalStages(settings, range(1, 2), folder / "keys")
        try:
            await stages.start()
        finally:
            await stages.stop()

    asyncio.run(started())


def test_a_stage_that_ends_before_it_listens(tmp_path: Path):
    with pytest.raises(UnavailableError, match="block 1 exited with code 3 before it listened"):
        start(tmp_path, "raise SystemExit(3)")


def test_a_stage_that_never_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(router_server, "START_SECONDS", 0.2)
    with pytest.raises(UnavailableError, match=r"block 1 did not start within 0\.2 s"):
        start(tmp_path, "import time; time.sleep(60)")
