"""Trains the leases of one block for all virtual workers in turn, with one trainer.

A worker's optimizer moments wait here for its next lease of the block. Who leaves loses those of
the block it has in memory; those of blocks it trained before it has put away, as in
worker/held_block.py. Unlike there, one that says goodbye between two leases loses them too, and
they know nothing of leases whose updates never counted, because those are not trained at all.
"""

from blocktrain.config import Config
from blocktrain.data.corpus import Corpus
from blocktrain.rehearse.start import FrozenVersions, Start
from blocktrain.simulate.block import VirtualLease
from blocktrain.storage.run_dir import Tensors
from blocktrain.train.assemble import load_block
from blocktrain.train.device import Compute
from blocktrain.train.trainer import BlockTrainer


class Practice:
    def __init__(
        self, config: Config, block: int, corpus: Corpus, compute: Compute, before: FrozenVersions
    ) -> None:
        # A captured step would go on with the moments of whoever trained first.
        plain = config.with_settings(train__cuda_graph=False)
        self._trainer = BlockTrainer(plain, block, corpus, compute, None, before)
        self._trainer.restore()
        self._reads_others = self._trainer.predecessors is not None
        self._moments: dict[
            str, tuple[int, Tensors]
        ] = {}  # by worker: after how many losses, and they

    def weights(self) -> Tensors:
        """The block as it was last trained, or at first as every worker starts from it."""
        return {name: array.copy() for name, array in self._trainer.weights().items()}

    def train(self, lease: VirtualLease, start: Start) -> Tensors:
        trainer = self._trainer
        load_block(trainer.module, start.base.weights, f"version {start.base.number}")
        self._take_moments(lease.worker, start.losses)
        if self._reads_others:
            trainer.build_on(start.before, lease.first_batch + lease.steps)
        trainer.step = lease.first_batch
        trainer.module.train()
        for step in range(lease.steps):
            trainer.train_step(lease.schedule_start + step * lease.schedule_stride)
        trainer.refuse_divergence()
        if trainer.predecessors:
            trainer.predecessors.close()
        self._moments[lease.worker] = (start.losses, trainer.moments())
        return self.weights()

    def _take_moments(self, worker: str, losses: int) -> None:
        made_after, moments = self._moments.get(worker, (losses, None))
        if moments is not None and made_after == losses:
            self._trainer.take_moments(moments)
        else:
            self._trainer.optimizer.state.clear()
