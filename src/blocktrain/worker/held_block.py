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
from blocktrain.core.codec import Codec, codec_named
from blocktrain.core.codec_feedback import ErrorFeedback
from blocktrain.data.corpus import Corpus
from blocktrain.protocol import tensors
from blocktrain.protocol.messages import Blob, Lease, Predecessor, Recipe
from blocktrain.storage.run_dir import Tensors
from blocktrain.train.device import Compute
from blocktrain.worker.kept_residual import KeptResidual
from blocktrain.worker.lease_trainer import LeaseReport, LeaseTrainer, Trained
from blocktrain.worker.retry import Patience
from blocktrain.worker.transfer import Transfer


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
        for predecessor in lease.predecessors:
            self._transfer.fetch(predecessor.weights, patience)

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
            blob = cache.write(self._encoded(lease, trained.weights, codec, patience))
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

    def _encoded(
        self, lease: Lease, weights: Tensors, codec: Codec, patience: Patience
    ) -> Iterator[bytes]:
        """What the weights are ahead of the base, in few bytes: what was learned now, and what
        earlier updates left out, because training began with it."""
        base = tensors.decode(self._transfer.read(lease.base, patience))
        owed = np.zeros(sum(tensor.size for tensor in weights.values()), np.float32)
        ahead = (np.subtract(weights[name], base[name]) for name in sorted(weights))
        yield from ErrorFeedback(codec, owed).encode(ahead)
        KeptResidual(self._scratch, lease.block).propose(lease.lease, owed)

    def _base(self, lease: Lease, patience: Patience) -> Tensors | None:
        """The weights to start from; None where the block is there already. From here on it is at
        no version, until it is trained."""
        base = None
        if lease.base != self.stands_at:
            clock = self._transfer.client.clock
            began = clock.monotonic()
            base = tensors.decode(self._transfer.read(lease.base, patience))
            if self._config.swarm.codec != "none":
                base = self._with_owed(lease.block, base)
            self.fetch_seconds = clock.monotonic() - began
            faults.reached("downloaded")
        self.stands_at, self._whole = None, False
        return base

    def _with_owed(self, block: int, base: Tensors) -> Tensors:
        """A version, and what this worker's updates have not told of what it learned: begun from
        the version alone, it would learn that a second time, and tell it twice."""
        owed = KeptResidual(self._scratch, block).load(sum(part.size for part in base.values()))
        names = sorted(base)
        ends = np.cumsum([base[name].size for name in names])
        parts = np.split(owed, ends[:-1])
        return {
            name: base[name] + part.reshape(base[name].shape)
            for name, part in zip(names, parts, strict=True)
        }

    def _trainer_of(self, block: int) -> LeaseTrainer:
        self._trainer = self._trainer or LeaseTrainer(
            self._config, block, self._corpus, self._compute, self._scratch
        )
        return self._trainer
