"""The validators that a coordinator starts on its own machine, each as a process of its own.

A validator that ends is started again, after a pause that grows each time. The coordinator itself
never loads torch.
"""

import importlib.util
import json
import logging
import os
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blocktrain.cli.terminal import plain
from blocktrain.environment import PROGRAM, machine_threads

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 300.0  # seconds before a validator is started again
HEALTHY_SECONDS = 600.0  # after this long, the next pause is the first one again
STOP_SECONDS = 10.0
THREADS_SHARE = 4  # validators use a quarter of the cores together
ROUTINE = ("waiting", "checking", "scoring", "scored", "joined", "corpus")  # events logged at debug

log = logging.getLogger(__name__)


def torch_is_installed() -> bool:
    return importlib.util.find_spec("torch") is not None


class LocalValidators:
    """Validators in child processes, from entering the context until it is left."""

    def __init__(self, count: int, invite: str, folder: Path, device: str) -> None:
        """`folder`: a validator keeps its key and its cache in a folder inside of it."""
        threads = max(1, machine_threads() // THREADS_SHARE // max(1, count))
        self._processes = [
            _Validator(
                f"validator {number}",
                [
                    "worker", "-", "--validate", "--json", "--parent", str(os.getpid()),
                    "--name", f"validator {number}", "--device", device,
                    "--threads", str(threads), "--folder", str(folder / f"validator-{number}"),
                ],
                invite,
            )
            for number in range(count)
        ]  # fmt: skip

    def __enter__(self) -> "LocalValidators":
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            process.request_stop()
        for process in self._processes:
            process.join(STOP_SECONDS)


class _Validator:
    """Starts a process again and again, and logs what it prints."""

    def __init__(self, name: str, arguments: Sequence[str], invite: str) -> None:
        self.name, self._command, self._invite = name, [*PROGRAM, *arguments], invite
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self._thread.start()

    def request_stop(self) -> None:
        with self._lock:
            self._stop.set()
            if self._process:
                self._process.terminate()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive() and self._process:
            self._process.kill()
            self._thread.join()

    def _run(self) -> None:
        pause = FIRST_PAUSE
        while not self._stop.is_set():
            began = time.monotonic()
            code = self._run_once()
            if code == 0 or self._stop.is_set():  # the run is finished
                return
            if time.monotonic() - began > HEALTHY_SECONDS:
                pause = FIRST_PAUSE
            log.warning(
                "%s ended with code %s; starting it again in %.0f s", self.name, code, pause
            )
            self._stop.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _run_once(self) -> int | None:
        with self._lock:
            if self._stop.is_set():
                return None
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
        with self._process as process:
            assert process.stdin and process.stdout
            try:
                process.stdin.write(self._invite + "\n")  # not visible in a list of processes
                process.stdin.close()
            except BrokenPipeError:
                pass
            for line in process.stdout:
                self._log(line.rstrip())
        return process.returncode

    def _log(self, line: str) -> None:
        try:
            event: dict[str, Any] = json.loads(line)
            level = logging.DEBUG if event["kind"] in ROUTINE else logging.INFO
            text = event["text"]
        except (ValueError, TypeError, KeyError):  # a line of its log, or an error
            level, text = logging.WARNING, line
        if text:
            log.log(level, "%s: %s", self.name, plain(text))
