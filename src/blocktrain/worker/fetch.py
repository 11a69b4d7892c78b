"""A run's current model, downloaded and assembled into a run directory."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from blocktrain.config import from_toml
from blocktrain.errors import RefusedError
from blocktrain.storage import tensor_file
from blocktrain.storage.blobs import Blobs
from blocktrain.storage.chunks import LocalChunks
from blocktrain.storage.run_dir import RunDir
from blocktrain.storage.tensor_file import Tensors
from blocktrain.worker.bandwidth import Throttle, TrafficCounter
from blocktrain.worker.client import Client
from blocktrain.worker.transfer import Transfer

PATIENCE_SECONDS = 3600.0


@dataclass(frozen=True)
class Fetched:
    run: RunDir
    versions: list[int]
    bytes_moved: int


def fetch_model(client: Client, out: Path) -> Fetched:
    """Every block as it stands when its turn comes; blocks never wait for each other, so versions
    may differ. On disk is a block beside the model, in memory the model once."""
    config, traffic = from_toml(client.run().config), TrafficCounter()
    run = RunDir.create_exported(out, config)
    with tempfile.TemporaryDirectory(dir=out, prefix=".", suffix=".partial") as scratch:
        cache = Blobs(LocalChunks(Path(scratch), sync=False))
        transfer = Transfer(client, cache, Throttle(None, client.clock), traffic)
        blocks = [_newest(client, transfer, index) for index in range(config.block_count)]
    run.write_exported([weights for _, weights in blocks], fetched=True)
    return Fetched(run, [version for version, _ in blocks], traffic.down)


def _newest(client: Client, transfer: Transfer, index: int) -> tuple[int, Tensors]:
    """A version that is replaced while it is fetched may be gone before its end: then a newer."""
    patience, before = client.patience(PATIENCE_SECONDS), -1
    while True:
        block = client.status(patience).blocks[index]
        try:
            weights = tensor_file.decode(transfer.read(block.weights, patience))
        except RefusedError as refused:
            if refused.code != "not_found" or block.version == before:
                raise
            before = block.version
        else:
            transfer.keep_only([])
            return block.version, weights
