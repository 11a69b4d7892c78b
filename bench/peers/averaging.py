"""Measures one averaging round of a block between two workers: blocktrain, hivemind and Flower.

    PYTHONPATH=src:bench python bench/peers/averaging.py --out DIR [--numbers 12500000] [--rounds 5]
        [--only "blocktrain, none" "hivemind 1.1.12"]

A round starts with a block in the memory of each of two workers and ends with their mean in the
memory of both. (With Flower it starts and ends on the server.) Every system runs on this machine,
in a virtual environment that is made once under --venvs. A system that cannot be installed or
started is left out and named. All systems are started first and keep their connections as they
usually do. Then they take turns, in another order in every round, so that disturbances hit all of
them alike. Bytes are those on the loopback device, in a network namespace of the system's own if
one can be made. A system whose round fails is restarted, and its failures are counted. Writes
averaging.json into DIR, also if it is stopped. Prints tables: every system, and the first against
each other one, round by round.
"""

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from side import Peer, PeerError

from quality import provenance

HERE = Path(__file__).resolve().parent
TORCH = "torch==2.13.0+cpu"  # PyPI's own build brings gigabytes of CUDA packages
CPU_BUILDS = "--extra-index-url=https://download.pytorch.org/whl/cpu"
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
    System("hivemind 1.1.12", "with_hivemind.py", (), (TORCH, "numpy", "hivemind==1.1.12")),
    System("Flower 1.41.0", "with_flower.py", (), ("flwr==1.41.0", "numpy")),
)
Round = dict[str, Any]
Taken = dict[str, list[Round | None]]  # by system; None: that round failed
NAMES = tuple(system.name for system in SYSTEMS)


def interpreter(system: System, venvs: Path) -> str:
    """The Python that has a system; a PeerError where it cannot be installed."""
    if not system.packages:
        return sys.executable
    folder = venvs / Path(system.script).stem
    python = str(folder / "bin" / "python")
    if not (folder / "installed").exists():
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        for package in system.packages:
            _install([python, "-m", "pip", "install", "--quiet", package])
        (folder / "installed").touch()
    return python


def _install(command: list[str]) -> None:
    try:
        _run(command)
    except PeerError:
        _run([*command, CPU_BUILDS])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing was said").splitlines()
        raise PeerError(f"cannot be installed: {said[-1]}")


def own_namespaces() -> bool:
    probe = [*IN_NAMESPACE, "true"]
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare"))):
        return False
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


class Side:
    """A system that runs, and runs again where it has failed."""

    def __init__(self, command: list[str]) -> None:
        self._command, self.failures = command, 0
        self._start()

    def round(self) -> Round | None:
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
        try:
            self._peer.heard()
            self._peer_round()
        except PeerError:
            self.end()
            raise

    def _peer_round(self) -> Round:
        self._peer.tell("round")
        told: Round = json.loads(self._peer.heard())
        return told


def start(systems: Sequence[System], venvs: Path, numbers: int, sides: dict[str, Side]) -> None:
    around = IN_NAMESPACE if own_namespaces() else []
    for system in systems:
        try:
            python = interpreter(system, venvs)
            command = [python, str(HERE / system.script), str(numbers), *system.arguments]
            sides[system.name] = Side([*around, *command])
        except PeerError as error:
            print(f"left out: {system.name}: {error}", flush=True)


def in_turn(sides: dict[str, Side], rounds: int, taken: Taken) -> None:
    """What every system's rounds took; one that does not start again makes no more of them."""
    left = dict(sides)
    for number in range(rounds):
        for name in random.Random(number).sample(list(left), len(left)):
            try:
                told = left[name].round()
            except PeerError as error:
                print(f"{name} does not start again: {error}", flush=True)
                del left[name]
                continue
            if told:
                print(f"{name}: {told['seconds']:.2f} s", flush=True)
            taken[name].append(told)


def print_table(taken: Taken, failures: dict[str, int]) -> None:
    print("| system | seconds, median | fastest | slowest | MB on the wire | rounds | failed |")
    print("|---|---|---|---|---|---|---|")
    for name, rounds in taken.items():
        told = [each for each in rounds if each]
        seconds = [each["seconds"] for each in told]
        if not seconds:
            print(f"| {name} | - | - | - | - | 0 | {failures[name]} |")
            continue
        moved = statistics.median(each["bytes"] for each in told) / 1e6
        row = f"| {name} | {statistics.median(seconds):.2f} | {min(seconds):.2f}"
        row += f" | {max(seconds):.2f} | {moved:.1f} | {len(seconds)} | {failures[name]} |"
        print(row)


def print_pairs(taken: Taken) -> None:
    """The first system against each other one: rounds that both made, in turn."""
    if not taken:
        return
    first, *others = taken
    print(f"\n| {first}, against | rounds faster | s less than it, mean and 95% interval |")
    print("|---|---|---|")
    for other in others:
        both = [(a, b) for a, b in zip(taken[first], taken[other], strict=False) if a and b]
        saved = [theirs["seconds"] - ours["seconds"] for ours, theirs in both]
        if len(saved) > 1:
            half = 1.96 * statistics.stdev(saved) / math.sqrt(len(saved))
            faster = f"{sum(each > 0 for each in saved)} of {len(saved)}"
            print(f"| {other} | {faster} | {statistics.fmean(saved):+.3f} ± {half:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--venvs", type=Path, default=Path(tempfile.gettempdir()) / "peers")
    parser.add_argument("--numbers", type=int, default=12_500_000, help="float32, of the block")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="SYSTEM")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    chosen = [system for system in SYSTEMS if system.name in args.only]
    sides: dict[str, Side] = {}
    taken: Taken = {}
    load = os.getloadavg()[0]
    try:
        start(chosen, args.venvs, args.numbers, sides)
        taken |= {name: [] for name in sides}
        in_turn(sides, args.rounds, taken)
    finally:
        for side in sides.values():
            side.end()
        failures = {name: side.failures for name, side in sides.items()}
        report = {
            **provenance(), "cpus": os.cpu_count(), "load_before": load, "numbers": args.numbers,
            "own_namespaces": own_namespaces(), "rounds": taken, "failures": failures,
        }  # fmt: skip
        (args.out / "averaging.json").write_text(json.dumps(report, indent=1))
    print_table(taken, failures)
    print_pairs(taken)


if __name__ == "__main__":
    main()
