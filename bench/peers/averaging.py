"""One averaging round of a block between two workers: ours beside hivemind and Flower.

    PYTHONPATH=src:bench python bench/peers/averaging.py --out DIR [--numbers 12500000] [--rounds 5]
        [--only "blocktrain, none" "hivemind 1.1.12"]

Every system runs on this machine, in a virtual environment of its own that is made under --venvs
once; one that cannot be installed is left out, and said so. All are started first and keep their
connections as they do; then they make rounds in turn, each time in another order, so that what else
the machine does, and what each leaves of its memory to the next, hits all of them alike. A round is
from two blocks in the memory of two workers to their mean in the memory of both (Flower: on the
server, which had sent both the last one). Bytes are those on the loopback device, of a network
namespace of the system's own where this runs as root. A system whose round fails is started anew,
and its failures are counted. Writes averaging.json into DIR, prints a table last.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from side import Peer, PeerError

from quality import provenance

HERE = Path(__file__).resolve().parent
TORCH = "torch==2.13.0"  # the pinned one comes without gigabytes of CUDA packages
END_SECONDS = 60.0
IN_NAMESPACE = ["unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh"]


@dataclass(frozen=True)
class System:
    name: str
    script: str
    arguments: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()  # none: this interpreter has it


SYSTEMS = (
    System("blocktrain, none", "ours.py", ("none",)),
    System("blocktrain, bf16", "ours.py", ("bf16",)),
    System("blocktrain, int8", "ours.py", ("int8",)),
    System("blocktrain, sparse", "ours.py", ("sparse",)),
    System("hivemind 1.1.12", "with_hivemind.py", (), (TORCH, "hivemind==1.1.12")),
    System("Flower 1.41.0", "with_flower.py", (), ("flwr==1.41.0", "numpy")),
)
NAMES = tuple(system.name for system in SYSTEMS)


def interpreter(system: System, venvs: Path) -> str | None:
    """The Python that has a system; None where it cannot be installed."""
    if not system.packages:
        return sys.executable
    folder = venvs / Path(system.script).stem
    python = folder / "bin" / "python"
    if (folder / "installed").exists():
        return str(python)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    for package in system.packages:
        command = [str(python), "-m", "pip", "install", "--quiet", package]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            print(f"left out: {system.name} cannot be installed: {last}", flush=True)
            return None
    (folder / "installed").touch()
    return str(python)


def own_namespaces() -> bool:
    return os.geteuid() == 0 and shutil.which("ip") is not None


class Side:
    """A system that runs, and runs again where it has failed."""

    def __init__(self, system: System, python: str, numbers: int) -> None:
        command = [python, str(HERE / system.script), str(numbers), *system.arguments]
        self._command = [*(IN_NAMESPACE if own_namespaces() else []), *command]
        self.failures = 0
        self._start()

    def round(self) -> dict[str, Any] | None:
        """What one took; None where it failed."""
        try:
            told = self._peer_round()
        except PeerError as error:
            print(f"failed: {error}", flush=True)
            self.failures += 1
            self.end()
            self._start()
            return None
        return told

    def end(self) -> None:
        self._peer.end(END_SECONDS)

    def _start(self) -> None:
        """The first round, which opens connections, is not counted."""
        self._peer = Peer(self._command)
        self._peer.heard()
        self._peer_round()

    def _peer_round(self) -> dict[str, Any]:
        self._peer.tell("round")
        told: dict[str, Any] = json.loads(self._peer.heard())
        return told


def in_turn(sides: dict[str, Side], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """What every system's rounds took."""
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in random.Random(number).sample(list(sides), len(sides)):
            if told := sides[name].round():
                print(f"{name}: {told['seconds']:.2f} s", flush=True)
                taken[name].append(told)
    return taken


def print_table(taken: dict[str, list[dict[str, Any]]], failures: dict[str, int]) -> None:
    print("| system | seconds, median | fastest | slowest | MB on the wire | rounds | failed |")
    print("|---|---|---|---|---|---|---|")
    for name, told in taken.items():
        seconds = [each["seconds"] for each in told]
        if not seconds:
            print(f"| {name} | - | - | - | - | 0 | {failures[name]} |")
            continue
        moved = statistics.median(each["bytes"] for each in told) / 1e6
        row = f"| {name} | {statistics.median(seconds):.2f} | {min(seconds):.2f}"
        row += f" | {max(seconds):.2f} | {moved:.1f} | {len(seconds)} | {failures[name]} |"
        print(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--venvs", type=Path, default=Path(tempfile.gettempdir()) / "peers")
    parser.add_argument("--numbers", type=int, default=12_500_000, help="float32, of the block")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="SYSTEM")
    args = parser.parse_args()
    sides: dict[str, Side] = {}
    try:
        for system in SYSTEMS:
            if system.name in args.only and (python := interpreter(system, args.venvs)):
                sides[system.name] = Side(system, python, args.numbers)
        load = os.getloadavg()[0]
        taken = in_turn(sides, args.rounds)
    finally:
        for side in sides.values():
            side.end()
    failures = {name: side.failures for name, side in sides.items()}
    args.out.mkdir(parents=True, exist_ok=True)
    report = {
        **provenance(), "cpus": os.cpu_count(), "load_before": load, "numbers": args.numbers,
        "own_namespaces": own_namespaces(), "rounds": taken, "failures": failures,
    }  # fmt: skip
    (args.out / "averaging.json").write_text(json.dumps(report, indent=1))
    print_table(taken, failures)


if __name__ == "__main__":
    main()
