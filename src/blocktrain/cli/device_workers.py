"""One worker per device of this machine, each in a process and a folder of its own."""

import json
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from blocktrain.environment import PROGRAM, machine_threads
from blocktrain.errors import BlocktrainError

POLL_SECONDS = 0.2
INTERRUPTED = 130  # the exit code of a worker that was stopped

OnEvent = Callable[[str, dict[str, Any]], None]  # gets a device and an event of its worker


def all_devices() -> list[str]:
    """Every GPU of this machine; without one, its MPS device or its CPU."""
    import torch

    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return gpus or ["mps" if torch.backends.mps.is_available() else "cpu"]


def work_on_all(
    invite: str,
    devices: Sequence[str],
    options: Sequence[str],
    folder: Path,
    on_event: OnEvent,
    should_stop: Callable[[], bool],
) -> bool:
    """Run a worker on each device until the run is over. `options`: those of `blocktrain worker`.
    Returns False if they were stopped. If one fails, stop the others and raise its error."""
    threads = str(max(1, machine_threads() // len(devices)))
    names = [f"{number}-{device.replace(':', '-')}" for number, device in enumerate(devices)]
    workers = [
        _DeviceWorker(
            name,
            invite,
            ["--device", device, "--folder", str(folder / name), "--threads", threads, *options],
            on_event,
        )
        for name, device in zip(names, devices, strict=True)
    ]
    stopping = False
    while any(worker.is_running for worker in workers):
        failed = any(worker.failed for worker in workers)
        if (should_stop() or failed) and not stopping:
            stopping = True
            for worker in workers:
                worker.stop()
        time.sleep(POLL_SECONDS)
    for worker in workers:
        worker.close()
    for worker in workers:
        worker.raise_error()
    return not stopping


class _DeviceWorker:
    def __init__(self, name: str, invite: str, options: Sequence[str], on_event: OnEvent) -> None:
        self._name, self._on_event, self._errors = name, on_event, [""]
        self._process = subprocess.Popen(
            [*PROGRAM, "worker", "-", *options, "--json"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,  # Ctrl-C reaches this process only, which stops the workers
        )
        assert self._process.stdin
        self._process.stdin.write(f"{invite}\n")  # not an argument, which other users could see
        self._process.stdin.close()
        self._readers = [threading.Thread(target=read) for read in (self._show, self._keep_errors)]
        for reader in self._readers:
            reader.start()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def failed(self) -> bool:
        return self._process.poll() not in (None, 0, INTERRUPTED)

    def stop(self) -> None:
        if self.is_running:
            self._process.terminate()

    def close(self) -> None:
        for reader in self._readers:
            reader.join()
        with self._process:  # closes its streams
            pass

    def raise_error(self) -> None:
        """Raise the error that ended the worker, if any."""
        if self.failed:
            reason = self._errors[-1].strip().removeprefix("error: ")
            kind = BlocktrainError.of_exit_code(self._process.returncode)
            raise kind(f"{self._name}: {reason}")

    def _show(self) -> None:
        for line in self._process.stdout or ():
            self._on_event(self._name, json.loads(line))

    def _keep_errors(self) -> None:
        self._errors += self._process.stderr or ()
