"""What tests of the worker agree on: one run, one key, a client with short timeouts."""

from random import Random

import httpx

from blocktrain.protocol.identity import WorkerKey
from blocktrain.protocol.messages import Joined, RunDescription

RUN, WORKER, SECRET = "run00001", "worker01", "c2VjcmV0"
KEY = WorkerKey.create()


class Eager(Random):
    """Draws a very short pause every time."""

    def uniform(self, a: float, b: float) -> float:
        return a + (b - a) / 100


SHORT_TIMEOUT = httpx.Timeout(1.0)


def described(**changes: object) -> RunDescription:
    fields = {"config": "", "corpus": {}, "corpus_digests": {}, "whole_bytes": 0, **changes}
    return RunDescription(run=RUN, protocol=1, **fields)  # type: ignore[arg-type]


def joined(**changes: object) -> Joined:
    fields = {"role": "train", "token_seconds": 100, "description": described(), **changes}
    return Joined(worker=WORKER, token="token1", **fields)  # type: ignore[arg-type]
