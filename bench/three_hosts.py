"""Measures a run of three hosts across an emulated WAN, beside the same run on one machine.

    PYTHONPATH=src:. python bench/three_hosts.py --out DIR --config configs/demo.toml \
        [--data 'text:wikitext-2/*.txt'] [--round-trips 20 50 100] [--codecs none sparse] [--links]

For every codec and round trip a real coordinator and three real workers train the run over HTTPS.
One host is killed after a third of the run and comes back after half of it. Every host has only
what arrived over its link, the text included. The run at home is `blocktrain train`: every block
alone, on the same bytes.

- Hosts are network namespaces (tests/support/wan.py; Linux and root). With --links neither is
  needed: workers reach the coordinator through a proxy with the same delay and rate
  (tests/support/tcp_link.py), without packet loss.
- Bytes are those of all packets on the workers' links in both directions, headers and
  retransmissions included; with --links, those inside of TCP.
- Waiting is the share of a worker's time, from joining to its final update, without a step.
- CE is on test, of the model fetched at the end.

Writes three-hosts.json, the models and the workers' logs into DIR after every run, and prints a
table. Called again with the same settings it adds to DIR, and does not train at home again.
`--round-trips` without a number trains at home only. --home: the score at home, if it was measured
elsewhere with the same settings and windows.
"""

import argparse
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.tcp_link import TcpLink
from tests.support.wan import Wan, why_not

from blocktrain.config import Config, load_config
from blocktrain.protocol.invite import Invite
from quality import provenance

COMMAND = [sys.executable, "-m", "blocktrain.cli.main"]
COORDINATOR, WORKERS = "coordinator", ("a", "b", "c")
LEAVER = "c"
LEAVES_AT, RETURNS_AT = 1 / 3, 1 / 2  # of the run
PORT = 7070
POLL_SECONDS = 0.2
Event = dict[str, Any]


class Links(ExitStack):
    """Hosts that are processes of this machine, each worker behind a line to the coordinator."""

    def __init__(self, round_trip_ms: float, mbit: float) -> None:
        super().__init__()
        self._lines = {
            host: self.enter_context(TcpLink(PORT, round_trip_ms, mbit)) for host in WORKERS
        }

    def address(self, host: str) -> str:
        return "127.0.0.1"

    def popen(self, host: str, command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
        """Killed at the end, as in a host that ends."""
        process = subprocess.Popen(command, **options)
        self.callback(process.wait)
        self.callback(process.kill)
        return process

    def traffic(self, host: str) -> TcpLink:
        return self._lines[host]

    def invite(self, host: str, invite: str) -> str:
        """To the near end of the host's line."""
        near = f"https://127.0.0.1:{self._lines[host].port}"
        return replace(Invite.decode(invite), addresses=(near,)).encode()


class Swarm:
    """One run: its processes in their hosts, its folder, and what the workers told."""

    def __init__(self, wan: Wan | Links, folder: Path, config: Path, args: Any) -> None:
        self._wan, self._folder, self._config = wan, folder, config
        self._device, self._threads = args.device, args.threads
        self._running: dict[str, subprocess.Popen[Any]] = {}
        self._lives: defaultdict[str, list[Path]] = defaultdict(list)  # the log of each start

    def start_coordinator(self) -> None:
        address = self._wan.address(COORDINATOR)
        command = ["coordinator", "--json", "--no-validate", "--config", self._config]
        command += ["--data-dir", self._folder / "coordinator", "--listen", f"{address}:{PORT}"]
        process = self._start(COORDINATOR, [*command, "--advertise", address])
        self.invite = json.loads(self._first_line(process))["invite"]

    def start_worker(self, host: str) -> None:
        invite = self.invite
        if isinstance(self._wan, Links):
            invite = self._wan.invite(host, invite)
        command = ["worker", invite, "--json", "--name", host, "--device", self._device]
        log = f"{host}-{len(self._lives[host])}"
        self._lives[host].append(self._log(log))
        command += ["--folder", str(self._folder / host)]
        self._running[host] = self._start(host, command, log)

    def kill_worker(self, host: str) -> None:
        self._running[host].kill()
        self._running[host].wait()

    def fetch(self, out: Path) -> None:
        """The model as it is now; fetched where the coordinator is, so that no line carries it."""
        self._start(COORDINATOR, ["fetch", self.invite, "--out", out], log="fetch").wait()

    def moved(self) -> Counter[str]:
        """Bytes of updates and versions, and what they would have been whole, in fp32 (raw)."""
        self._start(COORDINATOR, ["status", self.invite, "--json"], log="status").wait()
        status = json.loads(self._log("status").read_text())
        return sum((Counter(block["moved"]) for block in status["blocks"]), Counter())

    def lives(self, host: str) -> list[list[Event]]:
        """What a worker told, one list for each time it was started and joined."""
        return [life for log in self._lives[host] if (life := told(log.read_text()))]

    def finished(self) -> bool:
        for host, process in self._running.items():
            if process.poll() not in (None, 0, -signal.SIGKILL):
                errors = self._lives[host][-1].with_suffix(".err").read_text()
                raise RuntimeError(f"worker {host} failed: {errors[-2000:]}")
        return all(process.poll() is not None for process in self._running.values())

    def _start(self, host: str, arguments: list[Any], log: str = "") -> "subprocess.Popen[Any]":
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(self._threads),
            "BLOCKTRAIN_CACHE": str(self._folder / f"{host}-cache"),
        }
        told = self._log(log or host)
        with told.open("ab") as out, told.with_suffix(".err").open("ab") as errors:
            return self._wan.popen(
                host, [*COMMAND, *map(str, arguments)], stdout=out, stderr=errors, env=environment
            )

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _first_line(self, process: "subprocess.Popen[Any]") -> str:
        while not (lines := self._log(COORDINATOR).read_text().splitlines()):
            if process.poll() is not None:
                errors = self._log(COORDINATOR).with_suffix(".err").read_text()
                raise RuntimeError(f"the coordinator did not start: {errors[-2000:]}")
            time.sleep(POLL_SECONDS)
        return lines[0]


def told(log: str) -> list[Event]:
    """What a worker told since it joined. The last line may be only half there: it is being
    written, or its worker was killed."""
    whole, _, _ = log.rpartition("\n")
    events = (json.loads(line) for line in whole.splitlines())
    return list(itertools.dropwhile(lambda event: event["kind"] != "joined", events))


def contributed(lives: Sequence[Sequence[Event]]) -> int:
    """Bytes of text in the accepted updates of all lives of a worker."""
    return sum(max(event["contribution"] for event in life) for life in lives)


def waits(life: Sequence[Event]) -> dict[str, float]:
    """Seconds without a step, by what came before them; news of an update that is made and travels
    by itself is no such thing."""
    heard = [event for event in life if event["kind"] not in ("trained", "accepted", "refused")]
    spent: defaultdict[str, float] = defaultdict(float)
    for before, after in itertools.pairwise(heard):
        idle = after["seconds"] - before["seconds"]
        spent[before["kind"]] += idle - (after["training_seconds"] - before["training_seconds"])
    return dict(spent)


def waiting_share(lives: Sequence[Sequence[Event]]) -> float:
    """Of the time from joining to the last word, over all lives of a worker."""
    total = sum(life[-1]["seconds"] - life[0]["seconds"] for life in lives)
    trained = sum(life[-1]["training_seconds"] for life in lives)
    return 1 - trained / total


def train_across(swarm: Swarm, whole: int) -> None:
    """To the end of a run of so many bytes of text, one host away for a while."""
    for host in WORKERS:
        swarm.start_worker(host)
    to_do = [(RETURNS_AT, swarm.start_worker), (LEAVES_AT, swarm.kill_worker)]
    while not swarm.finished():
        time.sleep(POLL_SECONDS)
        done = sum(contributed(swarm.lives(host)) for host in WORKERS) / whole
        if to_do and done >= to_do[-1][0]:
            to_do.pop()[1](LEAVER)
    if to_do:
        raise RuntimeError(f"the run was over before host {LEAVER} had left and come back")


def score(run: Path, windows: int | None, device: str, source: str) -> float:
    command = [*COMMAND, "eval", str(run), "--split", "test", "--json", "--device", device]
    command += ["--windows", str(windows)] if windows else []
    command += ["--data", source]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return float(told["ce"])


def measured(folder: Path, config: Config, args: argparse.Namespace, trip: float) -> dict[str, Any]:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config.to_toml())
    whole = config.block_count * config.train.steps * config.train.batch * config.model.window
    hosts = [COORDINATOR, *WORKERS]
    with (
        Links(trip, args.mbit)
        if args.links
        else Wan(hosts, trip, args.mbit, args.loss, congestion=args.congestion)
    ) as wan:
        swarm = Swarm(wan, folder, folder / "config.toml", args)
        swarm.start_coordinator()
        swarm.fetch(folder / "first")
        began = time.monotonic()
        train_across(swarm, whole)
        seconds = time.monotonic() - began
        swarm.fetch(folder / "model")
        moved = swarm.moved()
        lines = {host: wan.traffic(host) for host in WORKERS}
    lives = {host: swarm.lives(host) for host in WORKERS}
    return {
        "codec": config.swarm.codec,
        "round_trip_ms": trip,
        "untrained": score(folder / "first", args.windows, args.score_device, config.data.source),
        "ce": score(folder / "model", args.windows, args.score_device, config.data.source),
        "seconds": seconds,
        "bytes_up": sum(line.up.bytes for line in lines.values()),
        "bytes_down": sum(line.down.bytes for line in lines.values()),
        "moved": moved,
        "waiting": {host: waiting_share(lives[host]) for host in WORKERS},
        "waits": {host: [waits(life) for life in lives[host]] for host in WORKERS},
        "leases": {h: sum(e["kind"] == "leased" for life in lives[h] for e in life) for h in lives},
    }


def at_home(folder: Path, config: Config, windows: int | None, device: str) -> float:
    """CE of the same blocks, each trained alone on this machine."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config.to_toml())
    command = [*COMMAND, "train", "--config", str(folder / "config.toml")]
    command += ["--out", str(folder / "model"), "--set", f"train.device={device}"]
    command += ["--parallel", str(min(config.block_count, os.cpu_count() or 1))]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return score(folder / "model", windows, device, config.data.source)


def print_table(report: dict[str, Any]) -> None:
    home = report["home"]
    print(
        "| run | CE untrained | CE | against home | MB up | MB down | than fp32, up / down"
        " | waiting (a, b, c) | s of it a lease | minutes |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    print(f"| at home, every block alone | | {home:.4f} | | | | | | | |")
    for run in report["runs"]:
        shares = ", ".join(f"{100 * share:.1f}%" for share in run["waiting"].values())
        print(
            f"| {run['codec']}, {run['round_trip_ms']:.0f} ms | {run['untrained']:.4f}"
            f" | {run['ce']:.4f} | {run['ce'] - home:+.4f} | {run['bytes_up'] / 1e6:.1f}"
            f" | {run['bytes_down'] / 1e6:.1f} | {times_smaller(run['moved'])}"
            f" | {shares} | {waited_per_lease(run):.2f} | {run['seconds'] / 60:.1f} |"
        )


def times_smaller(moved: Mapping[str, int]) -> str:
    """Updates up and versions down, by what the coordinator counted."""
    down = moved["down_whole"] + moved["down_differences"]
    return f"{moved['up_raw'] / moved['up']:.1f} / {moved['down_raw'] / down:.1f}"


def waited_per_lease(run: dict[str, Any]) -> float:
    """Seconds, of all workers and their lives: what a faster machine would lose as well."""
    waited = sum(sum(life.values()) for lives in run["waits"].values() for life in lives)
    return float(waited / sum(run["leases"].values()))


def opened(path: Path, config: Config, args: argparse.Namespace) -> dict[str, Any]:
    """What was measured before with the same settings; runs are added to it."""
    settings = {
        "cpus": os.cpu_count(), "config": config.to_toml(), "windows": args.windows,
        "mbit": args.mbit, "loss": args.loss, "congestion": args.congestion, "links": args.links,
        "device": args.device, "threads": args.threads, "home_device": args.score_device,
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return {**settings, "runs": []}
    before: dict[str, Any] = json.loads(path.read_text())
    if changed := sorted(key for key in settings if settings[key] != before.get(key)):
        sys.exit(f"{path} holds runs with another {', '.join(changed)}: take another --out")
    return before


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--data", help="where the coordinator has text; default: as in the config")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--codecs", nargs="+", default=["none"])
    parser.add_argument("--round-trips", nargs="*", type=float, default=[20.0, 50.0, 100.0])
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--loss", type=float, default=0.001)
    parser.add_argument("--windows", type=int, help="score at most so many of test")
    parser.add_argument("--congestion", choices=["bbr", "cubic", "reno"])
    parser.add_argument("--home", type=float, help="CE at home, where that was measured before")
    parser.add_argument("--links", action="store_true", help="proxies, where there are no hosts")
    parser.add_argument("--device", default="cpu", help="of the workers")
    parser.add_argument("--threads", type=int, default=1, help="of every worker")
    parser.add_argument("--score-device", default="cpu", help="of scores and the run at home")
    return parser.parse_args(arguments)


def main() -> None:
    args = parsed()
    if not args.links and (reason := why_not()):
        sys.exit(f"no WAN can be made here: {reason}")
    config = load_config(args.config, args.set)
    if args.data:
        config = config.with_settings(data__source=args.data)
    kept = args.out / "three-hosts.json"
    report = opened(kept, config, args)
    with tempfile.TemporaryDirectory() as scratch:
        if "home" not in report:
            report["home"] = args.home or at_home(
                Path(scratch) / "home", config, args.windows, args.score_device
            )
            kept.write_text(json.dumps(report, indent=1))
        for codec, trip in itertools.product(args.codecs, args.round_trips):
            folder = Path(scratch) / f"{len(report['runs'])}-{codec}-{trip:.0f}"
            run = measured(folder, config.with_settings(swarm__codec=codec), args, trip)
            for log in folder.glob("?-*.log"):
                shutil.copy(log, args.out / f"{folder.name}-{log.name}")
            shutil.copytree(folder / "model", args.out / f"{folder.name}-model")
            report["runs"].append({**provenance(), **run})
            kept.write_text(json.dumps(report, indent=1))
    print_table(report)


if __name__ == "__main__":
    main()
