"""One system in a comparison: a process that makes a round for every line it reads.

Standard library only, since it is imported in every system's own virtual environment. A side starts
its peers, each a process that exchanges lines over its pipes. It answers every line with the time
of the round and the bytes that passed over loopback meanwhile. In a network namespace of its own
these are the system's own bytes.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PATIENCE_SECONDS = 180.0  # for a line; starting takes the longest


class PeerError(Exception):
    """A peer has ended, or says nothing any more."""


class Peer:
    """A process of the system, which says when it is ready and when its part of a round is done."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def heard(self) -> str:
        """Its next line; a peer never says two at once."""
        assert self._process.stdout
        if not select.select([self._process.stdout], [], [], PATIENCE_SECONDS)[0]:
            raise PeerError(f"a peer said nothing for {PATIENCE_SECONDS:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise PeerError("a peer has ended")
        return line.strip()

    def tell(self, line: str) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerError("a peer has ended") from None

    def end(self, patience: float = 2.0) -> None:
        """Its input ends; after so many seconds, so does whatever it has started."""
        assert self._process.stdin
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def all_peers(peers: Sequence[Peer], line: str) -> list[str]:
    """Tell all of them at once; what they say when they are done."""
    for peer in peers:
        peer.tell(line)
    return [peer.heard() for peer in peers]


def answer_rounds(do: Callable[[str], object]) -> None:
    """Until there are no more lines to read. Only the averaging is timed: what is averaged is made
    before it, and looked at after it."""
    say({"ready": True})
    for _ in sys.stdin:
        do("train")
        before, began = loopback_bytes(), time.perf_counter()
        do("average")
        told = {"seconds": time.perf_counter() - began, "bytes": loopback_bytes() - before}
        do("check")
        say(told)


def follow(**steps: Callable[[], None]) -> None:
    """A peer's own side of it: does what it is told by name, until there is nothing more."""
    for line in sys.stdin:
        steps[line.strip()]()
        say("done")


def say(message: Any) -> None:
    print(json.dumps(message), flush=True)


def loopback_bytes() -> int:
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.strip().startswith("lo:"))
