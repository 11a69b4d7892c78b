"""blocktrain's side: two workers send updates over HTTPS, the coordinator checks and merges them.

    PYTHONPATH=src:bench python bench/peers/ours.py NUMBERS CODEC

A round ends when both workers have the new version in memory. The coordinator is `blocktrain
coordinator`. A worker is the real one without training: noise is added to its block. It requests
its next lease as often as the coordinator says.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from learned import LOOKED_AT, WORKERS, check, learned, mean_of
from side import Peer, all_peers, answer_rounds, follow, say

from blocktrain.config import from_toml
from blocktrain.protocol.identity import WorkerKey, update_text
from blocktrain.protocol.invite import Invite
from blocktrain.protocol.messages import (
    Lease,
    LeaseProgress,
    LeaseRequest,
    Predecessor,
    UpdateClaim,
    UpdateOffer,
    Wait,
)
from blocktrain.storage.tensor_file import Tensors
from blocktrain.training.device import resolve
from blocktrain.worker.client import Client
from blocktrain.worker.lease_trainer import LeaseTrainer, Recorder, Trained
from blocktrain.worker.local_block import LocalBlock
from blocktrain.worker.transfer import BlobCache, Transfer
from coordinator_server import found

HOUR = 3600.0
COORDINATOR = [
    sys.executable,
    "-m",
    "blocktrain.cli.main",
    "coordinator",
    "--json",
    "--no-validate",
]


class Untrained(LeaseTrainer):
    """Has a block in memory of its own, as a trainer has, and hands back what it was given."""

    def __init__(self, block: int) -> None:
        self.block = block
        self._weights: Tensors = {}

    def run(
        self,
        lease: Lease,
        base: Tensors | None,
        predecessors: Callable[[Predecessor], Tensors],
        on_report: Callable[[LeaseProgress], None],
        should_stop: Callable[[], bool],
        ends_early: Callable[[], bool] = lambda: False,
        recorder: Recorder | None = None,
    ) -> Trained:
        assert base is not None, "the other's update is in the new version too"
        for name, array in base.items():
            np.copyto(self._weights.setdefault(name, np.empty_like(array)), array)
        return Trained(self._weights, 1.0, lease.steps)


class Holder(LocalBlock):
    def _trainer_of(self, block: int) -> LeaseTrainer:
        self._trainer = self._trainer or Untrained(block)
        return self._trainer


class Worker:
    def __init__(self, invite: str, number: int, folder: Path) -> None:
        self.number, self.rounds = number, 0
        self.key = WorkerKey.create()
        self.client = Client(Invite.decode(invite), self.key)
        self.joined = self.client.join(f"worker {number}", "none")
        self.codec = from_toml(self.joined.description.config).swarm.codec
        self.transfer = Transfer(self.client, BlobCache(folder / "chunks"))
        self.held = self._holder(folder)
        self.expected = np.zeros(0, np.float32)
        self._next_version()

    def train(self) -> None:
        weights = self.trained.weights["w"]
        before = weights[:LOOKED_AT].copy()
        self.expected = mean_of([before + learned(w, self.rounds, LOOKED_AT) for w in WORKERS])
        weights += learned(self.number, self.rounds, weights.size)
        self.rounds += 1

    def average(self) -> None:
        """Send what was trained, and have what both made of it."""
        lease, deadline = self.lease, self.client.deadline(HOUR)
        if self.held.encodes:
            recipe = self.held.encode(self.held.learned(self.trained), final=False)
        else:
            recipe = self.held.write(self.trained)
        claim = UpdateClaim(
            run=self.joined.description.run,
            worker=self.joined.worker,
            lease=lease.lease,
            fence=lease.fence,
            block=lease.block,
            base_version=lease.base_version,
            codec=self.codec,
            recipe=recipe,
            loss=self.trained.loss,
        )
        offer = UpdateOffer(claim=claim, signature=self.key.sign(update_text(claim)))
        receipt = self.transfer.send(offer, deadline)
        self.held.settle(lease, accepted=receipt.state != "refused")
        self._next_version()

    def check(self) -> None:
        """Only what travels whole arrives exactly."""
        if self.codec == "none":
            check(self.trained.weights["w"], self.expected)
        self.transfer.cache.keep_only([self.lease.base])

    def _next_version(self) -> None:
        answer = self.client.lease(LeaseRequest(held_block=0)).answer
        while isinstance(answer, Wait):
            time.sleep(answer.seconds)
            answer = self.client.lease(LeaseRequest(held_block=0)).answer
        assert isinstance(answer, Lease)
        trained = self.held.train(answer, self.client.deadline(HOUR), lambda _: None, lambda: False)
        assert trained
        self.lease, self.trained = answer, trained

    def _holder(self, folder: Path) -> Holder:
        config = from_toml(self.joined.description.config)
        nothing = None  # no text is read
        compute = resolve("cpu", "fp32")
        return Holder(config, nothing, compute, self.transfer, folder, self._led_astray)  # type: ignore[arg-type]

    def _led_astray(self, text: str) -> None:
        raise AssertionError(text)


def work(invite: str, number: int, folder: Path) -> None:
    torch.set_num_threads(1)
    worker = Worker(invite, number, folder)
    say("ready")
    follow(train=worker.train, average=worker.average, check=worker.check)


def main(numbers: int, codec: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        home = folder / "coordinator"
        home.mkdir()
        found(
            home, f"sqlite:///{home / 'ledger.db'}", numbers,
            blocks=1, quorum=2, codec=codec, shortest_deadline=HOUR,
        )  # fmt: skip
        place = ["--data-dir", str(home), "--listen", "127.0.0.1:0"]
        peers = [Peer([*COORDINATOR, *place])]
        try:
            invite = json.loads(peers[0].heard())["invite"]
            command = [sys.executable, __file__, invite]
            workers = [Peer([*command, str(n), str(folder / f"worker-{n}")]) for n in (0, 1)]
            peers += workers
            for worker in workers:
                worker.heard()
            answer_rounds(lambda step: all_peers(workers, step))
        finally:
            for peer in reversed(peers):
                peer.end()


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        main(int(sys.argv[1]), sys.argv[2])
    else:
        work(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
