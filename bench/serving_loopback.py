"""Measures many requests at once, and a stage killed mid-stream, in a ring on this machine.

Not run by itself: it is the parts `concurrency` and `failover` of bench/serving.py.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.support.processes import Processes
from tests.support.ring import Ring

CLIENT = Path(__file__).with_name("serving_client.py")
STREAMED_BEFORE_KILL = 20


@contextmanager
def ring(run: Path, folder: Path, stages: dict[str, str]) -> Iterator[Ring]:
    folder.mkdir(parents=True, exist_ok=True)
    with Processes(folder) as processes, closing(Ring(processes, run, stages)) as found:
        found.wait(len(stages))
        yield found


def at_once(found: Ring, counts: list[int], prompt: str, most_bytes: int) -> list[dict[str, Any]]:
    """Bytes per second of all together, for so many requests at once."""
    client = subprocess.Popen(
        [sys.executable, str(CLIENT), str(found.client.base_url)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert client.stdin and client.stdout
    request = {"prompt": prompt, "max_tokens": most_bytes, "mode": "ar", "temperature": 1.0}
    told = []
    for count in [counts[-1], *counts]:  # the first warms everything up, and is not counted
        client.stdin.write(json.dumps({"at_once": count, "request": request}) + "\n")
        client.stdin.flush()
        answer = json.loads(client.stdout.readline())
        told.append({"requests": count, "bytes_per_second": answer["bytes"] / answer["seconds"]})
    client.stdin.close()
    client.wait()
    return told[1:]


def failovers(found: Ring, times: int, prompt: str, most_bytes: int) -> list[dict[str, Any]]:
    """The longest pause of an answer whose stage dies, and whether it said what it would have."""
    fields = {"prompt": prompt, "max_tokens": most_bytes, "mode": "ar", "temperature": 1.0}
    told = []
    for seed in range(times):
        found.mend()
        undisturbed = found.text(**fields, seed=seed)
        text, moments = "", []
        for piece in found.stream(**fields, seed=seed):
            text += piece
            moments.append(time.monotonic())
            if len(moments) == STREAMED_BEFORE_KILL:
                found.busy().kill()
        pause = max(after - before for before, after in pairwise(moments))
        told.append({"pause_seconds": pause, "same": text == undisturbed})
    return told
