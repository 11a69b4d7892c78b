"""The one block a worker has in memory, and the name of the weights it stands at.

Knows what has to be fetched for a lease, and what not because it is here already. Whom the
result goes to is the business of the agent.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from blocktrain.config import Config
from blocktrain.core import faults
from blocktrain.core.codec import Codec, codec_named, framed
from blocktrain.core.codec_feedback import encode_and_owe
from blocktrain.core.codec_numbers import Floats
from blocktrain.data.corpus import Corpus
from blocktrain.errors import CorruptFileError
from blocktrain.protocol import tensors
from blocktrain.protocol.messages import Blob, Lease, Predecessor, Recipe
from blocktrain.protocol.tensors import canonical
from blocktrain.storage.run_dir import Tensors
from blocktrain.storage.weights_file import all_numbers, weights_form
from blocktrain.train.device import Compute
from blocktrain.worker.kept_residual import KeptResidual
from blocktrain.worker.lease_trainer import LeaseReport, LeaseTrainer, Trained
from blocktrain.worker.retry import Patience
from blocktrain.worker.transfer import Transfer
from blocktrain.worker.versions import Versions


@dataclass(frozen=True)
class Update:
    """A trained block, or what it learned, written to the chunk cache."""

    blob: Blob
    recipe: Recipe
    loss: float


class HeldBlock:
    def __init__(
        self, config: Config, corpus: Corpus, compute: Compute, transfer: Transfer, scratch: Path
    ) -> None:
        self._config, self._corpus, self._compute = config, corpus, compute
        self._transfer, self._scratch = transfer, scratch
        self.versions = Versions(transfer, scratch, config.swarm.codec)
        self._trainer: LeaseTrainer | None = None
        self.stands_at: Blob | None = None
        self.fetch_seconds = 0.0  # what the last download of a base took
        self._whole = False  # no lease was broken off in the middle

    @property
    def index(self) -> int | None:
        return self._trainer.block if self._trainer else None

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
        return trained

    def write(self, lease: Lease, trained: Trained, patience: Patience) -> Update:
        """What is to be sent for a lease, in the cache. The update before it was settled."""
        swarm, cache = self._config.swarm, self._transfer.cache
        codec = codec_named(swarm.codec, swarm.kept)
        if codec is None:
            blob = self.stands_at = cache.write(tensors.encode(trained.weights))
        else:
            blob = self._write_encoded(lease, trained.weights, codec, patience)
        return Update(blob, cache.recipe(blob.name), trained.loss)

    def settled(self, lease: Lease, *, accepted: bool) -> None:
        """The news of an update: whether what it left out is still owed."""
        KeptResidual(self._scratch, lease.block).settle(lease.lease, accepted=accepted)

    def put_away(self) -> None:
        """Let go of the block; what its optimizer has learned is kept on disk for the next time,
        unless a lease was broken off in the middle."""
        if self._trainer and self._whole:
            self._trainer.put_away()
        self._trainer, self.stands_at = None, None

    def drop(self) -> None:
        """Forget the block and its optimizer for good."""
        if self._trainer:
            self._trainer.forget()
        self._trainer, self.stands_at = None, None

    def _write_encoded(
        self, lease: Lease, weights: Tensors, codec: Codec, patience: Patience
    ) -> Blob:
        """What the weights are ahead of the base, in few bytes: what was learned now, and what
        earlier updates left out, because training began with it."""
        count = sum(tensor.size for tensor in weights.values())
        kept, cache = KeptResidual(self._scratch, lease.block), self._transfer.cache
        self._transfer.fetch(lease.base, patience)
        try:
            with kept.proposal(lease.lease, count) as owe:
                return cache.write(encode_and_owe(codec, self._ahead(lease, weights), owe))
        except CorruptFileError:
            self._transfer.read(lease.base, patience)  # which fetches again what went bad
            with kept.proposal(lease.lease, count) as owe:
                return cache.write(encode_and_owe(codec, self._ahead(lease, weights), owe))

    def _ahead(self, lease: Lease, weights: Tensors) -> Iterator[Floats]:
        """How far the weights are ahead of the base, frame by frame."""
        reader = self._transfer.cache.reader(lease.base)
        base = all_numbers(reader, len(canonical(weights_form(reader))))
        trained = framed(weights[name] for name in sorted(weights))
        for here, before in zip(trained, base, strict=True):
            yield np.subtract(here, before)

    def _base(self, lease: Lease, patience: Patience) -> Tensors | None:
        """The weights to start from; None where the block is there already. From here on it is at
        no version, until it is trained."""
        base = None
        if lease.base != self.stands_at:
            clock = self._transfer.client.clock
            began = clock.monotonic()
            base = tensors.decode(
                self.versions.read(lease.block, lease.base_version, lease.base, patience)
            )
            if self._config.swarm.codec != "none":
                # What this worker's updates have not told of what it learned: begun from the
                # version alone, it would learn that a second time, and tell it twice.
                owed = KeptResidual(self._scratch, lease.block)
                owed.add_to([base[name] for name in sorted(base)])
            self.fetch_seconds = clock.monotonic() - began
            faults.reached("downloaded")
        self.stands_at, self._whole = None, False
        return base

    def _trainer_of(self, block: int) -> LeaseTrainer:
        self._trainer = self._trainer or LeaseTrainer(
            self._config, block, self._corpus, self._compute, self._scratch
        )
        return self._trainer
