"""Measures how long a block takes to be rebuilt without a worker's updates, and its memory.

    PYTHONPATH=src:. python bench/unmerge.py [--megabytes 50] [--versions 16] [--replicas 2]
        [--codecs none int8 sparse]

Makes a run with a block of this size in a temporary folder, merges a version of one update per
replica at a time, and removes the updates of one worker, which is in every version. Prints the
seconds of one merge and of the rebuild, the most memory that Python allocated meanwhile, and the
size of all stored chunks. A second rebuild, in a copy without that worker, must give the same bytes
with a codec; tests/unit/coordinator/test_unmerger.py checks that for many runs.
"""

import argparse
import json
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np
from tests.support.coordinator import Member, SetClock, join, running

from blocktrain.codec import update_codec
from blocktrain.codec.frames import encode
from blocktrain.coordinator.service import Service
from blocktrain.coordinator.unmerger import Unmerger
from quality import provenance

NUMBER_BYTES = 4


def send(member: Member, change: np.ndarray, weights: np.ndarray) -> None:
    lease, codec = member.lease(blocks=(0,)), update_codec(member.service.run.config.swarm)
    if codec is None:
        made = member.signer.update(lease, {"w": weights + change})
    else:
        data = b"".join(encode(change, codec))
        made = member.signer.update_of_bytes(lease, data, codec=codec.name)
    assert member.send(made).state == "pending"


def merged(service: Service, versions: int, replicas: int, weights: np.ndarray) -> float:
    """Merge versions; the seconds of one merge."""
    members, draws, spent = [join(service) for _ in range(replicas)], np.random.default_rng(0), 0.0
    for _ in range(versions):
        for member in members:
            change = draws.standard_normal(weights.size, np.float32) * np.float32(1e-3)
            send(member, change, weights)
        began = time.perf_counter()
        assert service.merger.merge_due() == 1
        spent += time.perf_counter() - began
    return spent / versions


def measure(codec: str, megabytes: float, versions: int, replicas: int) -> dict[str, object]:
    weights = np.random.default_rng(1).standard_normal(int(megabytes * 1e6 / NUMBER_BYTES))
    weights = weights.astype(np.float32)
    settings = {
        "swarm__codec": codec,
        "swarm__keep_updates": versions,
        "swarm__quorum": replicas,
        "train__steps": 10_000,
    }
    first = [{"w": weights}, {"w": weights[:10]}]
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder), SetClock(), weights=first, **settings) as service,
    ):
        merge_seconds = merged(service, versions, replicas, weights)
        with service.run.ledger.read() as tx:
            worker = min(row.worker for row in tx.updates.merged_after(0, 0))
        stored = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
        tracemalloc.start()
        done = Unmerger(service.run).unmerge(0, lambda row: row.worker == worker, "a measurement")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert done is not None and len(done.removed) == versions
        return {
            "codec": codec, "megabytes": megabytes, "versions": versions, "replicas": replicas,
            "merge_seconds": round(merge_seconds, 2), "unmerge_seconds": round(done.seconds, 2),
            "peak_megabytes": round(peak / 1e6, 1), "stored_megabytes": round(stored / 1e6, 1),
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--megabytes", type=float, default=50)
    parser.add_argument("--versions", type=int, default=16)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--codecs", nargs="+", default=["none", "int8", "sparse"])
    args = parser.parse_args()
    for codec in args.codecs:
        found = measure(codec, args.megabytes, args.versions, args.replicas)
        print(json.dumps({**found, **provenance()}), flush=True)


if __name__ == "__main__":
    main()
