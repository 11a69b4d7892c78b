"""The one block a worker has in memory, and the name of the weights it stands at.

Knows what has to be fetched for a lease, and what not because it is here already. Whom the
result goes to is the business of the agent.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from blocktrain.config import Config
from blocktrain.core import faults
from blocktrain.data.corpus import Corpus
from blocktrain.protocol import tensors
from blocktrain.protocol.messages import Blob, Lease, Predecessor, Recipe
from blocktrain.storage.run_dir import Tensors
from blocktrain.train.device import Compute
from blocktrain.worker.lease_trainer import LeaseReport, LeaseTrainer
from blocktrain.worker.retry import Patience
from blocktrain.worker.transfer import Transfer


@dataclass(frozen=True)
class Update:
    """A trained block, written to the chunk cache."""

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

    @property
    def index(self) -> int | None:
        return self._trainer.block if self._trainer else None

    def train(
        self,
        lease: Lease,
        patience: Patience,
        on_report: Callable[[LeaseReport], None],
        should_stop: Callable[[], bool],
    ) -> Update | None:
        """Train a lease and write the result to the cache. None: stopped before the end."""
        if lease.block != self.index:
            self.put_away()  # before another takes its memory
        for predecessor in lease.predecessors:
            self._transfer.fetch(predecessor.weights, patience)

        def weights_of(predecessor: Predecessor) -> Tensors:
            return tensors.decode(self._transfer.read(predecessor.weights, patience))

        trained = self._trainer_of(lease.block).run(
            lease, self._base(lease, patience), weights_of, on_report, should_stop
        )
        if trained is None:
            return None
        blob = self._transfer.cache.write(tensors.encode(trained.weights))
        self.stands_at = blob
        return Update(blob, self._transfer.cache.recipe(blob.name), trained.loss)

    def put_away(self) -> None:
        """Let go of the block; what its optimizer has learned is kept on disk for the next time,
        unless a lease was broken off in the middle."""
        if self._trainer and self.stands_at:
            self._trainer.put_away()
        self._trainer, self.stands_at = None, None

    def drop(self) -> None:
        """Forget the block and its optimizer for good."""
        if self._trainer:
            self._trainer.forget()
        self._trainer, self.stands_at = None, None

    def _base(self, lease: Lease, patience: Patience) -> Tensors | None:
        """The weights to start from; None where the block is there already. From here on it is at
        no version, until it is trained."""
        base = None
        if lease.base != self.stands_at:
            base = tensors.decode(self._transfer.read(lease.base, patience))
            faults.reached("downloaded")
        self.stands_at = None
        return base

    def _trainer_of(self, block: int) -> LeaseTrainer:
        self._trainer = self._trainer or LeaseTrainer(
            self._config, block, self._corpus, self._compute, self._scratch
        )
        return self._trainer
