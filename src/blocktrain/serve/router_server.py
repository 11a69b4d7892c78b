"""A router as a process: the first block, the stages, and an HTTP port."""

import asyncio
import secrets
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from blocktrain.errors import ConfigError
from blocktrain.protocol.listening import bound_socket
from blocktrain.serve import fingerprint
from blocktrain.serve.api import ApiSettings, create_app
from blocktrain.serve.connection import Connection, Hello
from blocktrain.serve.engine import Engine, Limits
from blocktrain.serve.front import Front
from blocktrain.serve.keys import ROUTER, STAGE, Keyring, client_context
from blocktrain.serve.local_stages import LocalStages
from blocktrain.serve.meeting import dial, parted
from blocktrain.serve.pipeline import Pipeline
from blocktrain.serve.server import serve_http
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
    most_requests: int
    most_bytes: int
    patience_seconds: float
