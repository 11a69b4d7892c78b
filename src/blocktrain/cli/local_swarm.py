"""A coordinator and its workers as processes on this machine."""

import json
import subprocess
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from blocktrain import threads
from blocktrain.cli.options import PROGRAM
from blocktrain.errors import BlocktrainError

if TYPE_CHECKING:
    from blocktrain.config import Config
    from blocktrain.protocol.messages import Status

STOP_SECONDS = 30.0


class LocalSwarm:
    def __init__(self, config: "Config", folder: Path, workers: int) -> None:
        self.config, self.folder, self.count = config, folder, workers
        self.invite = ""
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "LocalSwarm":
        from blocktrain.protocol.identity import WorkerKey
        from blocktrain.protocol.invite import Invite
        from blocktrain.worker.client import Client

        self.folder.mkdir(parents=True, exist_ok=True)
        self.invite = self._start_coordinator()
        share = max(1, threads.machine_threads() // self.count)
        for number in range(self.count):
            self._start_worker(number, share)
        self.client = Client(Invite.decode(self.invite), WorkerKey.create())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the workers first, so that they can still return their leases."""
        for process in reversed(self._processes):
            process.terminate()
        for process in reversed(self._processes):
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout:
                process.stdout.close()
        self.client.close()

    def status(self) -> "Status":
        """The state of the run; an error if every worker has died."""
        workers = self._processes[1:]
        failed = [worker for worker in workers if worker.poll() not in (None, 0)]
        if len(failed) == len(workers):
            log = self.folder / "worker-0.log"
            raise BlocktrainError(f"every worker died; {log} ends with: {_last_line(log)}")
        return self.client.status()

    def _start_coordinator(self) -> str:
        settings = self.folder / "config.toml"
        settings.write_text(self.config.to_toml(), encoding="utf-8")
        command = [*PROGRAM, "coordinator", "--json", "--listen", "127.0.0.1:0"]
        command += ["--config", str(settings), "--data-dir", str(self.folder / "coordinator")]
        with (self.folder / "coordinator.log").open("w") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        self._processes.append(process)
        assert process.stdout
        line = process.stdout.readline()
        if not line:
            process.wait()
            reason = _last_line(self.folder / "coordinator.log")
            raise BlocktrainError(f"the coordinator did not start: {reason}")
        invite: str = json.loads(line)["invite"]
        return invite

    def _start_worker(self, number: int, share: int) -> None:
        command = [*PROGRAM, "worker", self.invite, "--name", f"worker {number}"]
        command += ["--folder", str(self.folder / f"worker-{number}")]
        command += ["--device", self.config.train.device, "--data", self.config.data.source]
        command += ["--threads", str(share)]
        with (self.folder / f"worker-{number}.log").open("w") as log:
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log, text=True))


def _last_line(log: Path) -> str:
    lines = log.read_text().strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else "(nothing)"
