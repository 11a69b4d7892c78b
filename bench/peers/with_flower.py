"""Flower's side: a SuperLink and two SuperNodes as in its documentation, without TLS.

A round is one round of its strategy: the block goes to both nodes, both answer with their own, and
the server averages them. A node is a new process for every message, so what it has learned waits
for it in a file, which is written before the round.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from learned import WORKERS, learned
from side import answer_rounds

BIN = Path(sys.executable).parent
APP = Path(__file__).parent / "flower_app"
PORT, FIRST_NODE_PORT = 18000, 18100
LINK = f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{PORT}"\n'
POLL_SECONDS = 0.005
START_SECONDS = 120.0


class Federation:
    def __init__(self, folder: Path, numbers: int) -> None:
        self._folder, self._numbers, self._round = folder, numbers, 1
        self._log = (folder / "flower.log").open("w")
        self._environment = {
            **os.environ,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(APP.parent),
            "FLWR_HOME": str(folder),
            "FLWR_TELEMETRY_ENABLED": "0",
        }
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        (self._folder / "config.toml").write_text(LINK + "insecure = true\n")
        port = ["--port", str(PORT)]
        self._run("flower-superlink", "--disable-runtime-dependency-installation", *port)
        time.sleep(5)  # it has no other sign of being there
        for node in WORKERS:
            own = ["--port", str(FIRST_NODE_PORT + node), "--node-config", f"number={node}"]
            self._run("flower-supernode", "--superlink", f"127.0.0.1:{PORT}", *own)
        settings = f'numbers={self._numbers} folder="{self._folder}"'
        command = [str(BIN / "flwr"), "run", str(APP), "here", "--run-config", settings]
        subprocess.run(
            command, check=True, env=self._environment, stdout=self._log, stderr=self._log
        )
        self._wait_for("waiting")

    def do(self, step: str) -> None:
        if step == "train":
            for node in WORKERS:
                noise = learned(node, self._round, self._numbers)
                np.save(self._folder / f"learned-{node}.npy", noise)
        elif step == "average":
            (self._folder / f"go-{self._round}").touch()
            self._wait_for("done")
            self._round += 1
        elif step == "check":
            self._wait_for("waiting")  # it says so after having looked at the mean

    def end(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
            process.wait()
        self._log.close()

    def _run(self, command: str, *options: str) -> None:
        started = subprocess.Popen(
            [str(BIN / command), "--insecure", *options],
            env=self._environment,
            stdout=self._log,
            stderr=self._log,
        )
        self._processes.append(started)

    def _wait_for(self, word: str) -> None:
        ends = time.monotonic() + START_SECONDS
        while not (self._folder / f"{word}-{self._round}").exists():
            if time.monotonic() > ends:
                sys.exit(f"Flower is not {word}: {(self._folder / 'flower.log').read_text()}")
            time.sleep(POLL_SECONDS)


def main(numbers: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        federation = Federation(Path(scratch), int(numbers))
        try:
            federation.start()
            answer_rounds(federation.do)
        finally:
            federation.end()


if __name__ == "__main__":
    main(sys.argv[1])
