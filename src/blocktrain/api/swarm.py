"""Runs on several machines, from Python: start, join, watch and fetch.

Coordinator and workers are processes of their own, with their logs in a folder. They are stopped
when the swarm is closed or this process ends.
"""

import json
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from blocktrain.api.display import Bar, bars, stop_on_signal
from blocktrain.environment import PROGRAM, machine_threads
from blocktrain.errors import BlocktrainError
from blocktrain.protocol.identity import WorkerKey
from blocktrain.protocol.invite import Invite
from blocktrain.worker.client import Client

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console

    from blocktrain.config import Config
    from blocktrain.protocol.status_messages import Status

POLL_SECONDS = 0.5
STOP_SECONDS = 30.0
Row = dict[str, Any]


class Swarm:
    """A run on several machines, named by its invite.

    `Swarm.start` starts a run whose coordinator is on this machine; `Swarm(invite)` is a run that
    someone else started. `folder`: for logs and the workers' keys and caches; default: a temporary
    one.

    >>> import blocktrain as bt
    >>> with bt.Swarm.start("tiny", folder / "swarm", settings={"train.steps": 4}) as swarm:
    ...     swarm.join(workers=2)
    ...     swarm.watch()
    ...     run = swarm.fetch(folder / "fetched")
    True
    >>> model = bt.load(run)
    """

    def __init__(self, invite: str, folder: str | Path | None = None) -> None:
        self.invite = invite
        self.page: str | None = None  # the run page for the operator, if the run was started here
        self._client = Client(Invite.decode(invite), WorkerKey.create())
        self.folder = Path(folder or tempfile.mkdtemp(prefix="blocktrain-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self._coordinators: list[subprocess.Popen[str]] = []
        self._workers: list[subprocess.Popen[str]] = []
        self._stop = weakref.finalize(self, _stop, self._workers, self._coordinators, self._client)

    @classmethod
    def start(
        cls,
        config: "Config | str | Path",
        folder: str | Path,
        settings: Mapping[str, Any] | None = None,
        *,
        listen: str = "127.0.0.1:0",
    ) -> Self:
        """Start a run's coordinator on this machine, or resume the run in this folder.

        `listen`: with 0.0.0.0:7077, for example, other machines can join by `invite`, and this one
        also checks their updates. By default only this machine can join.
        """
        from blocktrain.api.models import read_config

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        stored = folder / "config.toml"
        stored.write_text(read_config(config, settings).to_toml(), encoding="utf-8")
        command = ["coordinator", "--json", "--listen", listen, "--config", str(stored)]
        command += ["--data-dir", str(folder / "coordinator")]
        command += ["--no-validate"] if listen.startswith("127.") else []
        log = folder / "coordinator.log"
        process = _started(command, log, stdout=subprocess.PIPE)
        assert process.stdout
        try:
            if not (line := process.stdout.readline()):
                kind = BlocktrainError.of_exit_code(process.wait())
                raise kind(f"the coordinator did not start: {_last_line(log)}")
            printed = json.loads(line)
            swarm = cls(printed["invite"], folder)
            swarm.page = printed["page"]
        except BaseException:
            _end([process])
            raise
        swarm._coordinators.append(process)
        return swarm

    def join(
        self,
        workers: int = 1,
        *,
        device: str = "auto",
        threads: int | None = None,
        data: str | None = None,
    ) -> None:
        """Start workers on this machine. `threads`: of each; default: an equal share of the cores.
        `data`: this machine's copy of the run's text, written as `data.source`."""
        share = threads or max(1, machine_threads() // workers)
        for number in range(len(self._workers), len(self._workers) + workers):
            command = ["worker", self.invite, "--name", f"worker {number}", "--device", device]
            command += ["--threads", str(share), "--folder", str(self.folder / f"worker-{number}")]
            command += ["--data", data] if data else []
            self._workers.append(_started(command, self.folder / f"worker-{number}.log"))

    def status(self) -> list[Row]:
        """One row per block: its version, progress, score and traffic."""
        return [_row(block) for block in self.read_status().blocks]

    def workers(self) -> list[Row]:
        """One row per worker of the run, on any machine."""
        return [_row(worker) for worker in self.read_status().workers]

    @property
    def finished(self) -> bool:
        return self.read_status().state == "finished"

    def watch(
        self,
        seconds: float | None = None,
        *,
        should_stop: Callable[[], bool] | None = None,
        console: "Console | None" = None,
    ) -> bool:
        """Show the progress of every block until the run is finished, for some seconds, or until
        `should_stop` says so (default: until an interrupt, which does not end the run). Returns
        whether the run is finished."""
        deadline = None if seconds is None else time.monotonic() + seconds
        signals = nullcontext(should_stop) if should_stop else stop_on_signal()
        with signals as stop, bars(console) as show:
            while True:
                status = self.read_status()
                for block in status.blocks:
                    note = f"version {block.version}"
                    note += "" if block.ce is None else f", CE {block.ce:.3f}"
                    note += ", training" if block.replicas else ""
                    percent = 100 * block.progress
                    show(f"block {block.index}", Bar(percent, 100, note))
                if status.state == "finished":
                    return True
                if stop() or (deadline is not None and time.monotonic() >= deadline):
                    return False
                time.sleep(POLL_SECONDS)

    def fetch(self, out: str | Path) -> Path:
        """Download the newest version of every block as a run folder, and return it. This works at
        any time during a run."""
        from blocktrain.worker.downloads import fetch_model

        return fetch_model(self._client, Path(out)).run.path

    def read_status(self) -> "Status":
        """The coordinator's whole status message. Raises if every worker started here failed."""
        if not self._stop.alive:
            raise BlocktrainError("the swarm is closed; Swarm.start with its folder resumes it")
        if self._workers and all(worker.poll() not in (None, 0) for worker in self._workers):
            log = self.folder / "worker-0.log"
            raise BlocktrainError(f"every worker failed; {log} ends with: {_last_line(log)}")
        return self._client.status()

    def close(self) -> None:
        """Stop the workers, which return their leases, and then the coordinator. The run can be
        resumed with `Swarm.start` and the same folder."""
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _started(command: list[str], log: Path, stdout: int | None = None) -> "subprocess.Popen[str]":
    """A process of blocktrain, in a group of its own: Ctrl-C in a notebook interrupts the whole
    group of its kernel."""
    with log.open("w") as file:
        return subprocess.Popen(
            [*PROGRAM, *command], stdout=stdout or file, stderr=file, text=True, process_group=0
        )


def _stop(
    workers: "list[subprocess.Popen[str]]",
    coordinators: "list[subprocess.Popen[str]]",
    client: Client,
) -> None:
    _end(workers)  # first, since they return their leases
    _end(coordinators)
    client.close()


def _end(processes: "list[subprocess.Popen[str]]") -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout:
            process.stdout.close()


def _last_line(log: Path) -> str:
    lines = log.read_text().strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else "(nothing)"


def _row(message: "BaseModel") -> Row:
    """A message as one flat row: the fields of an inner message have its name as a prefix."""
    row: Row = {}
    for name, value in message.model_dump().items():
        inner = value.items() if isinstance(value, dict) else ()
        row |= {f"{name}_{key}": each for key, each in inner} if inner else {name: value}
    return row
