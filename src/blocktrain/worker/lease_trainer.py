"""Trains one block by leases: a range of batches from given weights, again and again.

Between leases of the same block the optimizer's moments stay, whatever happened to the weights;
put away, they wait on disk for a worker that comes back to the block. Knows no network: weights
come in and go out as arrays. One worker that is given every lease of a block in order ends with the
weights that training the block in one go would have given it.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from blocktrain.config import Config
from blocktrain.core import faults
from blocktrain.data.corpus import Corpus
from blocktrain.errors import DeviceError, DivergedError, ProtocolError
from blocktrain.protocol.messages import Lease, Predecessor
from blocktrain.storage.run_dir import Tensors
from blocktrain.train.assemble import load_block
from blocktrain.train.device import Compute
from blocktrain.train.prefix import Published
from blocktrain.train.trainer import BlockTrainer
from blocktrain.worker.kept_moments import KeptMoments

REPORT_EVERY = 10  # steps; a report waits for the device, so not after each where there is one
# Torch has one generator for all threads: between seeding it and drawing, nobody else may.
ONE_DRAWS = threading.Lock()

WeightsOf = Callable[[Predecessor], Tensors]


@dataclass(frozen=True)
class LeaseReport:
    """How far a lease has come; `loss` is the mean so far, None where every step was skipped."""

    steps_done: int
    loss: float | None


@dataclass(frozen=True)
class Trained:
    """The block after the lease. The arrays are the block's own: use them before the next."""

    weights: Tensors
    loss: float


class LeasedVersions:
    """The blocks before, at the versions a lease names: they do not change while it runs."""

    def __init__(self, lease: Lease, weights_of: WeightsOf) -> None:
        self._named = {named.block: named for named in lease.predecessors}
        self._weights_of = weights_of
        missing = sorted(set(range(lease.block)) - set(self._named))
        if missing:
            raise ProtocolError(f"the lease of block {lease.block} names no block {missing[0]}")

    def version(self, block: int) -> int:
        return self._named[block].version

    def weights(self, block: int) -> Mapping[str, Tensor]:
        arrays = self._weights_of(self._named[block])
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


class LeaseTrainer:
    """Holds one block between its leases."""

    def __init__(
        self, config: Config, block: int, corpus: Corpus, compute: Compute, scratch: Path
    ) -> None:
        """`scratch`: a folder of this run, for moments put away and for a cascade's features."""
        self.config, self.block, self.corpus = config, block, corpus
        self.compute, self.scratch = compute, scratch
        self._trainer: BlockTrainer | None = None
        self._moments = KeptMoments(scratch / f"moments-{block}.safetensors")

    def run(
        self,
        lease: Lease,
        base: Tensors | None,
        predecessors: WeightsOf,
        on_report: Callable[[LeaseReport], None],
        should_stop: Callable[[], bool],
    ) -> Trained | None:
        """Train a lease from `base`, or where it is None, from the block as the last lease left
        it. None: stopped before the end, and the block is no longer at any version."""
        try:
            with ONE_DRAWS:
                trainer = self._prepared(lease, base, predecessors)
            del base  # it may be as large as the block, which has it now
            return self._train(trainer, lease, on_report, should_stop)
        except torch.OutOfMemoryError:
            raise DeviceError(
                f"block {lease.block} does not fit into the memory of {self.compute.device};"
                " say how much it has (--memory), or choose smaller blocks (--blocks)"
            ) from None

    def _prepared(
        self, lease: Lease, base: Tensors | None, predecessors: WeightsOf
    ) -> BlockTrainer:
        assert lease.block == self.block, "a lease of another block"
        reads_others = self.config.objective.kind == "cascade" and lease.block > 0
        published = LeasedVersions(lease, predecessors) if reads_others else None
        trainer = self._trainer or self._new_trainer(published)
        assert base is not None or self._trainer, "nothing is held yet"
        if base is not None:
            load_block(trainer.module, base, f"version {lease.base_version} of block {self.block}")
        if published:
            trainer.build_on(published, lease.first_batch + lease.steps)
        trainer.step = lease.first_batch
        self._trainer = trainer
        return trainer

    def _new_trainer(self, published: Published | None) -> BlockTrainer:
        """With the moments it had when this worker last trained the block, if it did."""
        trainer = BlockTrainer(
            self.config, self.block, self.corpus, self.compute, None, published, self.scratch
        )
        if moments := self._moments.load(trainer.moment_shapes()):
            trainer.take_moments(moments)
        return trainer

    def put_away(self) -> None:
        """Keep the optimizer's moments on disk: the worker goes on with another block."""
        if self._trainer:
            self._moments.save(self._trainer.moments())

    def forget(self) -> None:
        """Never go on from the moments that are kept: they led nowhere."""
        self._moments.remove()

    def _train(
        self,
        trainer: BlockTrainer,
        lease: Lease,
        on_report: Callable[[LeaseReport], None],
        should_stop: Callable[[], bool],
    ) -> Trained | None:
        losses = _Losses()
        every = 1 if self.compute.device.type == "cpu" else REPORT_EVERY
        trainer.module.train()
        trainer.take_sums()  # what a lease that was stopped left behind
        try:
            for step in range(lease.steps):
                if should_stop():
                    return None
                with ONE_DRAWS:
                    trainer.train_step(lease.schedule_start + step * lease.schedule_stride)
                faults.reached("step")
                if (step + 1) % every == 0 or step + 1 == lease.steps:
                    loss, _, counted = trainer.take_sums()
                    losses.add(loss, counted)
                    trainer.refuse_divergence()
                    on_report(LeaseReport(step + 1, losses.mean))
        finally:
            if trainer.predecessors:
                trainer.predecessors.close()
        if losses.mean is None:
            raise DivergedError(
                f"block {self.block}: every step from {lease.first_batch} to {trainer.step - 1} had"
                " a non-finite loss or gradient"
            )
        return Trained(trainer.weights(), losses.mean)


class _Losses:
    def __init__(self) -> None:
        self._sum, self._counted = 0.0, 0

    def add(self, loss: float, counted: int) -> None:
        self._sum += loss
        self._counted += counted

    @property
    def mean(self) -> float | None:
        return self._sum / self._counted if self._counted else None
