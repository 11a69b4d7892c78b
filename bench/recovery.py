"""Measures how long a run stands still after its coordinator is killed with -9 and restarted.

    PYTHONPATH=src python bench/recovery.py --out DIR [--kills 10] [--db postgresql://...]

A real coordinator and real workers on this machine train the `tiny` preset. The coordinator is
killed at random moments and started again at once. Two times are measured from the kill: until it
answers, and until the next update is merged. The usual time between merges is printed beside them,
since a lease in flight takes that long anyway. Writes recovery.json into DIR and prints a table.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from blocktrain.errors import BlocktrainError
from blocktrain.protocol.identity import WorkerKey
from blocktrain.protocol.invite import Invite
from blocktrain.worker.client import Client
from coordinator_server import free_port
from quality import provenance

ROOT = Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, "-m", "blocktrain.cli.main"]
ENDLESS = "train.steps=1000000"
POLL_SECONDS = 0.02


class Coordinator:
    """One address, one folder; may be killed and started again."""

    def __init__(self, folder: Path, db: str | None) -> None:
        self.command = [
            *COMMAND, "coordinator", "--json", "--no-validate",
            "--listen", f"127.0.0.1:{free_port()}",
            "--config", str(ROOT / "configs/tiny.toml"), "--set", ENDLESS,
            "--data-dir", str(folder / "coordinator"),
        ]  # fmt: skip
        self.command += ["--db", db] if db else []
        self.log = (folder / "coordinator.log").open("w")
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.PIPE, stderr=self.log, text=True
        )

    def invite(self) -> str:
        assert self.process.stdout
        told: str = json.loads(self.process.stdout.readline())["invite"]
        return told

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Watch:
    """Looks at the versions from outside, as anybody with an invite can."""

    def __init__(self, invite: str) -> None:
        self.client = Client(Invite.decode(invite), WorkerKey.create())

    def versions(self) -> int | None:
        """Versions of all blocks together; None while nobody answers."""
        try:
            status = self.client.status(self.client.deadline(0.2))
        except BlocktrainError:
            return None
        return sum(block.version for block in status.blocks)

    def seconds_until(self, versions: int) -> tuple[float, float]:
        """Until somebody answers, and until there are so many versions."""
        started = time.perf_counter()
        answered = 0.0
        while (now := self.versions()) is None or now < versions:
            if now is not None and not answered:
                answered = time.perf_counter() - started
            time.sleep(POLL_SECONDS)
        return answered, time.perf_counter() - started


def start_worker(folder: Path, invite: str, number: int) -> subprocess.Popen[bytes]:
    command = [*COMMAND, "worker", invite, "--folder", str(folder / f"worker-{number}")]
    log = (folder / f"worker-{number}.log").open("wb")
    return subprocess.Popen(
        command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def usual_seconds(watch: Watch, merges: int) -> float:
    """Between merges, while nothing happens."""
    first = watch.versions()
    assert first is not None
    return watch.seconds_until(first + merges)[1] / merges


def killed_at(coordinator: Coordinator, watch: Watch, after: float) -> tuple[float, float]:
    time.sleep(after)
    before = watch.versions()
    assert before is not None
    coordinator.kill()
    coordinator.start()
    return watch.seconds_until(before + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--db", help="default: SQLite in a temporary folder")
    args = parser.parse_args()
    draws = random.Random(0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        coordinator = Coordinator(folder, args.db)
        invite = coordinator.invite()
        workers = [start_worker(folder, invite, number) for number in range(args.workers)]
        try:
            watch = Watch(invite)
            watch.seconds_until(args.workers * 4)
            usual = usual_seconds(watch, 20)
            stops = [killed_at(coordinator, watch, draws.uniform(1, 3)) for _ in range(args.kills)]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
            coordinator.kill()
    answers, merges = zip(*stops, strict=True)
    args.out.mkdir(parents=True, exist_ok=True)
    report = {**provenance(), "usual": usual, "answered": answers, "merged": merges}
    (args.out / "recovery.json").write_text(json.dumps(report, indent=1))
    print(f"| {args.kills} kills, {args.workers} workers | median | worst |\n|---|---|---|")
    for name, taken in (("until it answers", answers), ("until the next merge", merges)):
        print(f"| {name} | {statistics.median(taken):.2f} s | {max(taken):.2f} s |")
    print(f"usually a merge every {usual:.2f} s")


if __name__ == "__main__":
    main()
