"""The one block a worker has in memory, and the name of the weights it stands at.

Knows what has to be fetched for a lease, and what not because it is here already. Whom the
result goes to is the business of the agent.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from blocktrain.config import Config
from blocktrain.core import faults
from blocktrain.core.codec import codec_named, kept_in_last_words
from blocktrain.core.codec_feedback import encode_and_owe
from blocktrain.data.corpus import Corpus
from blocktrain.protocol import tensors
from blocktrain.protocol.messages import Blob, Lease, Predecessor, Recipe
from blocktrain.storage.run_dir import Tensors
from blocktrain.train.device import Compute
from blocktrain.worker.kept_residual import KeptResidual
from blocktrain.worker.lease_trainer import LeaseReport, LeaseTrainer, Trained
from blocktrain.worker.retry import Patience
from blocktrain.worker.room import Room
from blocktrain.worker.transfer import Transfer
from blocktrain.worker.versions import Versions


@dataclass(frozen=True)
class Update:
    """A trained block, or what it learned, written to the chunk cache."""

    blob: Blob
    recipe: Recipe
    loss: float


@dataclass(frozen=True)
class Learned:
    """A lease's end, and what no update has told yet of the way there: arrays of their own, to be
    encoded while the block is trained on."""

    lease: Lease
    end: Tensors
    news: Tensors
    loss: float


class HeldBlock:
    def __init__(
        self,
        config: Config,
        corpus: Corpus,
        compute: Compute,
        transfer: Transfer,
        scratch: Path,
        on_astray: Callable[[str], None],
    ) -> None:
        self._config, self._corpus, self._compute = config, corpus, compute
        self._transfer, self._scratch = transfer, scratch
        self.versions = Versions(transfer, scratch, config.swarm.codec, on_astray)
        self._trainer: LeaseTrainer | None = None
        self.stands_at: Blob | None = None
        self._room = Room()  # for the versions that leases start from
        self._start: Tensors = {}  # what the lease was trained from, where updates are encoded
        self._learned: Learned | None = None  # at whose end the block stands
        self.fetch_seconds = 0.0  # what the last download of a base took
        self._whole = False  # no lease was broken off in the middle

    @property
    def index(self) -> int | None:
        return self._trainer.block if self._trainer else None

    @property
    def encodes(self) -> bool:
        """Whether updates are what was learned, and not the block."""
        return self._config.swarm.codec != "none"

    @property
    def ended(self) -> Lease | None:
        """The lease from whose end the block can be trained on."""
        return self._learned.lease if self._learned else None

    def can_train(self, lease: Lease) -> bool:
        """Whether what a lease builds on is here, or can be fetched."""
        return lease.continues in (None, self.ended.lease if self.ended else None)

    def train(
        self,
        lease: Lease,
        patience: Patience,
        on_report: Callable[[LeaseReport], None],
        should_stop: Callable[[], bool],
    ) -> Trained | None:
        """Train a lease. None: stopped before the end."""
        if lease.block != self.index:
            self.put_away()  # before another takes its memory
        for before in lease.predecessors:
            self.versions.fetch(before.block, before.version, before.weights, patience)

        def weights_of(predecessor: Predecessor) -> Tensors:
            return tensors.decode(self._transfer.read(predecessor.weights, patience))

        trained = self._trainer_of(lease.block).run(
            lease, self._base(lease, patience), weights_of, on_report, should_stop
        )
        self._whole = trained is not None
        if not self.encodes:  # else what it started from is still needed
            self._room.rest()
        return trained

    def write(self, trained: Trained) -> Update:
        """The block as it was trained, in the cache, to be sent."""
        cache = self._transfer.cache
        blob = self.stands_at = cache.write(tensors.encode(trained.weights))
        return Update(blob, cache.recipe(blob.name), trained.loss)

    def take_learned(self, lease: Lease, trained: Trained) -> Learned:
        """What is to be encoded: what was learned, and what earlier updates left out, the last of
        which is settled. The block may be trained on at once."""
        end = {name: array.copy() for name, array in trained.weights.items()}
        news = {name: np.subtract(end[name], self._start[name]) for name in sorted(end)}
        KeptResidual(self._scratch, lease.block).add_to(list(news.values()))
        self._learned = Learned(lease, end, news, trained.loss)
        return self._learned

    def encode(self, learned: Learned, *, last_words: bool) -> Update:
        """News in few bytes, in the cache. With its last words on a block a worker leaves out
        little."""
        swarm, cache = self._config.swarm, self._transfer.cache
        numbers = kept_in_last_words(swarm.kept) if last_words else swarm.kept
        codec = codec_named(swarm.codec, numbers)
        assert codec is not None, "an update that is not encoded is written"
        news = [learned.news[name] for name in sorted(learned.news)]
        kept = KeptResidual(self._scratch, learned.lease.block)
        with kept.proposal(learned.lease.lease, sum(part.size for part in news)) as owe:
            blob = cache.write(encode_and_owe(codec, news, owe))
        return Update(blob, cache.recipe(blob.name), learned.loss)

    def settled(self, lease: Lease, *, accepted: bool | None) -> None:
        """The news of an update, and with it what is still owed. None: there will be none."""
        KeptResidual(self._scratch, lease.block).settle(lease.lease, accepted=accepted)

    def put_away(self) -> None:
        """Let go of the block; what its optimizer has learned is kept on disk for the next time,
        unless a lease was broken off in the middle."""
        if self._trainer and self._whole:
            self._trainer.put_away()
        self._let_go()

    def drop(self) -> None:
        """Forget the block and its optimizer for good."""
        if self._trainer:
            self._trainer.forget()
        self._let_go()

    def _let_go(self) -> None:
        self._trainer, self.stands_at, self._learned, self._start = None, None, None, {}
        self._room = Room()

    def _base(self, lease: Lease, patience: Patience) -> Tensors | None:
        """The weights to start from; None where the block is there already. From here on it is at
        no version, until it is trained."""
        before, self._learned = self._learned, None
        base = None
        if before and lease.continues and before.lease.base == lease.base:
            self._start = before.end
        elif lease.base != self.stands_at:
            clock = self._transfer.client.clock
            began = clock.monotonic()
            data = self._room.of(lease.base.size)
            self.versions.read(lease.block, lease.base_version, lease.base, patience, data)
            base = tensors.decode(data)
            if before and lease.continues:  # the base has all this worker did before that lease
                for name, news in before.news.items():
                    base[name] += news
            elif self.encodes:
                # What this worker's updates have not told of what it learned: begun from the
                # version alone, it would learn that a second time, and tell it twice.
                owed = KeptResidual(self._scratch, lease.block)
                owed.add_to([base[name] for name in sorted(base)])
            self._start = base if self.encodes else {}
            self.fetch_seconds = clock.monotonic() - began
            faults.reached("downloaded")
        self.stands_at, self._whole = None, False
        return base

    def _trainer_of(self, block: int) -> LeaseTrainer:
        self._trainer = self._trainer or LeaseTrainer(
            self._config, block, self._corpus, self._compute, self._scratch
        )
        return self._trainer
