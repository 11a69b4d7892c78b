"""A run's current model, downloaded and assembled into a run directory."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from blocktrain.config import from_toml
from blocktrain.protocol import tensors
from blocktrain.storage.blobs import Blobs
from blocktrain.storage.chunks import LocalChunks
from blocktrain.storage.run_dir import RunDir
from blocktrain.worker.client import Client
from blocktrain.worker.throttle import Throttle
from blocktrain.worker.traffic import Traffic
from blocktrain.worker.transfer import Transfer

PATIENCE_SECONDS = 3600.0


@dataclass(frozen=True)
class Fetched:
    run: RunDir
    versions: list[int]
    bytes_moved: int


def fetch_model(client: Client, out: Path) -> Fetched:
    """Every block as it stands now; blocks never wait for each other, so versions may differ."""
    config, status = from_toml(client.run().config), client.status()
    traffic = Traffic()
    with tempfile.TemporaryDirectory(prefix="blocktrain-") as scratch:
        cache = Blobs(LocalChunks(Path(scratch), sync=False))
        transfer = Transfer(client, cache, Throttle(None, client.clock), traffic)
        blocks = [
            tensors.decode(transfer.read(block.weights, client.patience(PATIENCE_SECONDS)))
            for block in status.blocks
        ]
        run = RunDir.create(out, config)
        run.write_exported(blocks)
    return Fetched(run, [block.version for block in status.blocks], traffic.down)
