"""Coordinators and workers as real processes, each with a log, that may be killed and started
again; a coordinator keeps its address. All end with the test."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from blocktrain.faults import VARIABLE

COMMAND = (sys.executable, "-m", "blocktrain.cli.main")
KILLED = (-9, 137)
POLL_SECONDS = 0.05
LOG_TAIL = 3000  # characters shown of each log when a test gives up


@dataclass(frozen=True)
class Running:
    name: str
    log: Path
    process: "subprocess.Popen[bytes]"
    faults: str = ""

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        """It does nothing more and says nothing more, but its connections stay."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)


class Processes:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[Running] = []

    def __enter__(self) -> "Processes":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        unharmed = [
            running for running in self._started if running.faults and running.code not in KILLED
        ]
        for running in self._started:
            if running.code is None:
                running.kill()
        assert error or not unharmed, f"these faults never struck: {unharmed}"

    def coordinator(
        self,
        data_dir: Path,
        port: int,
        faults: str = "",
        *more: str,
        checks: tuple[str, ...] = ("--no-validate",),
    ) -> Running:
        """The run of a folder, at this port; whoever needs it waits by asking it."""
        return self._start(
            f"coordinator-{port}", faults,
            "coordinator", "--json", "--data-dir", data_dir, "--listen", f"127.0.0.1:{port}",
            *checks, *more,
        )  # fmt: skip

    def worker(self, invite: str, name: str, faults: str = "", *more: str) -> Running:
        """Started again under its name, it is the same worker."""
        return self._start(
            name, faults,
            "worker", invite, "--json", "--nice", "0", "--name", name, "--device", "cpu",
            "--folder", self.folder / name, *more,
        )  # fmt: skip

    def stage(self, run: Path, name: str, blocks: str, listen: str, keys: Path) -> Running:
        """Some blocks of a run; started again under its name, it is the same stage."""
        return self._start(
            name, "",
            "stage", run, "--name", name, "--block", blocks, "--listen", listen, "--keys", keys,
            "--device", "cpu", "--precision", "fp32",
        )  # fmt: skip

    def serve(self, run: Path, listen: str, *more: str | Path) -> Running:
        """A run behind an OpenAI-compatible API; whoever needs it waits by asking it."""
        return self._start(
            "router", "",
            "serve", run, "--listen", listen, "--device", "cpu", "--precision", "fp32", *more,
        )  # fmt: skip

    def wait_for(self, what: str, happened: Callable[[], bool], seconds: float = 30.0) -> None:
        ends = time.monotonic() + seconds
        while not happened():
            if time.monotonic() > ends:
                raise AssertionError(f"{what}: not within {seconds} s\n{self._logs()}")
            time.sleep(POLL_SECONDS)

    def wait_for_kill(self, running: Running) -> None:
        """Its fault has struck."""
        self.wait_for(f"{running.name} dies", lambda: running.code is not None)
        assert running.code in KILLED, f"{running.name} left with {running.code}\n{self._logs()}"

    def wait_for_end(self, running: Running) -> None:
        """It was told that the run is over."""
        self.wait_for(f"{running.name} ends", lambda: running.code is not None)
        assert running.code == 0, f"{running.name} left with {running.code}\n{self._logs()}"

    def _start(self, name: str, faults: str, *arguments: str | Path) -> Running:
        log = self.folder / f"{name}.log"
        environment = {**os.environ, VARIABLE: faults, "OMP_NUM_THREADS": "1"}
        with log.open("ab") as file:
            process = subprocess.Popen(
                [*COMMAND, *map(str, arguments)], stdout=file, stderr=file, env=environment
            )
        running = Running(name, log, process, faults)
        self._started.append(running)
        return running

    def _logs(self) -> str:
        logs = dict.fromkeys(running.log for running in self._started)
        return "\n".join(f"--- {log.name}\n{log.read_text()[-LOG_TAIL:]}" for log in logs)


@contextmanager
def full_disk(running: Running) -> Iterator[None]:
    """As long as this lasts, not a byte that the process writes into any file gets there. A test
    looks for itself whether that was noticed."""
    import resource  # not on Windows

    pid, kind = running.process.pid, resource.RLIMIT_FSIZE
    before = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (0, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, kind, before)


def free_port() -> int:
    """One that nobody has now; nearly always nobody takes it before it is used."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
