"""Trains the leases of one block, which stays in memory between them.

The optimizer's moments outlive the process on disk. A damaged or unsuitable moments file is
ignored.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from blocktrain import faults
from blocktrain.config import Config
from blocktrain.data.corpus import Corpus
from blocktrain.errors import DeviceError, DivergedError, ProtocolError
from blocktrain.files import write_bytes
from blocktrain.memory import is_out_of_memory
from blocktrain.protocol.messages import Lease, LeaseProgress, Predecessor
from blocktrain.storage import tensor_file
from blocktrain.storage.tensor_file import Tensors
from blocktrain.training.device import Compute
from blocktrain.training.frozen import Published
from blocktrain.training.stored_models import load_block
from blocktrain.training.trainer import BlockTrainer

REPORT_EVERY = 10  # steps on a GPU, because a report waits for the device

WeightsOf = Callable[[Predecessor], Tensors]


@dataclass(frozen=True)
class Trained:
    """A block after a lease. `weights` are the block's own arrays: the next step changes them."""

    weights: Tensors
    loss: float
    steps: int  # fewer than leased if the lease ended early


class LeasedVersions:
    """The frozen blocks that a block trains with, in the versions that a lease names, which do not
    change while it runs."""

    def __init__(
        self,
        block: int,
        needed: Iterable[int],
        predecessors: Iterable[Predecessor],
        weights_of: WeightsOf,
    ) -> None:
        self._predecessors = {each.block: each for each in predecessors}
        self._weights_of = weights_of
        missing = sorted(set(needed) - set(self._predecessors))
        if missing:
            raise ProtocolError(
                f"the coordinator's lease of block {block} names no version of block"
                f" {missing[0]}, which that block trains with; tell the operator"
            )

    def version(self, block: int) -> int:
        return self._predecessors[block].version

    def weights(self, block: int) -> Tensors:
        return self._weights_of(self._predecessors[block])


class Recorder(Protocol):
    """Records the states of a lease while it is trained."""

    def begin(self, trainer: BlockTrainer) -> None:
        """Record the state at the start, which may be changed here."""
        ...

    def after_step(self, trainer: BlockTrainer, steps_done: int) -> None: ...

    def end(self, trainer: BlockTrainer, steps_done: int) -> None:
        """Record the state at the end, after fewer steps than leased if the lease ended early."""
        ...


class LeaseTrainer:
    """Trains one block, and keeps it in memory between leases."""

    def __init__(
        self, config: Config, block: int, corpus: Corpus, compute: Compute, scratch: Path
    ) -> None:
        """`scratch`: the run's folder, for moments and for the features of a cascade."""
        self.config, self.block, self.corpus = config, block, corpus
        self.compute, self.scratch = compute, scratch
        self._trainer: BlockTrainer | None = None
        self._moments = scratch / f"moments-{block}.safetensors"

    def run(
        self,
        lease: Lease,
        base: Tensors | None,
        weights_of: WeightsOf,
        on_report: Callable[[LeaseProgress], None],
        should_stop: Callable[[], bool],
        ends_early: Callable[[], bool] = lambda: False,
        recorder: Recorder | None = None,
    ) -> Trained | None:
        """Train a lease from `base`, or from where the last lease ended if `base` is None. Returns
        None if stopped early; the block's weights are then useless. If `ends_early`, the steps so
        far are the result."""
        try:
            trainer = self._prepare(lease, base, weights_of)
            del base  # the block has a copy
            if recorder:
                recorder.begin(trainer)
            trained = self._train(trainer, lease, on_report, should_stop, ends_early, recorder)
            if recorder and trained:
                recorder.end(trainer, trained.steps)
            return trained
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise DeviceError(
                f"{self.compute.device} has too little memory for block {lease.block};"
                " set --memory to what is free, or choose smaller blocks with --blocks"
            ) from None

    def put_away(self) -> None:
        """Write the optimizer's moments to disk."""
        if self._trainer:
            self._moments.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(self._moments, b"".join(tensor_file.encode(self._trainer.moments())))

    def forget(self) -> None:
        """Delete the moments on disk, because training diverged."""
        self._moments.unlink(missing_ok=True)

    def _prepare(self, lease: Lease, base: Tensors | None, weights_of: WeightsOf) -> BlockTrainer:
        published: LeasedVersions | None = None
        if needed := self.config.frozen_blocks(self.block):
            published = LeasedVersions(lease.block, needed, lease.predecessors, weights_of)
        assert base is not None or self._trainer, "no block is in memory yet"
        trainer = self._trainer or self._new_trainer(published)
        if base is not None:
            load_block(trainer.module, base, f"version {lease.base_version} of block {self.block}")
        if published:
            trainer.build_on(published, lease.first_batch + lease.steps)
        self._trainer = trainer
        return trainer

    def _new_trainer(self, published: Published | None) -> BlockTrainer:
        """A trainer with the moments from the last time this worker trained the block."""
        trainer = BlockTrainer(
            self.config, self.block, self.corpus, self.compute, None, published, self.scratch
        )
        if moments := load_moments(self._moments, trainer.moment_shapes()):
            trainer.take_moments(moments)
        return trainer

    def _train(
        self,
        trainer: BlockTrainer,
        lease: Lease,
        on_report: Callable[[LeaseProgress], None],
        should_stop: Callable[[], bool],
        ends_early: Callable[[], bool],
        recorder: Recorder | None,
    ) -> Trained | None:
        every = 1 if self.compute.device.type == "cpu" else REPORT_EVERY
        report = LeaseProgress(fence=lease.fence, steps_done=0)
        loss_sum, counted = 0.0, 0
        trainer.take_sums()  # discard the sums of an interrupted lease

        def after_step(stopping: bool) -> None:
            nonlocal loss_sum, counted, report
            faults.reached("step")
            steps_done = trainer.step - lease.first_batch
            if steps_done % every == 0 or steps_done == lease.steps or stopping:
                loss, _, steps = trainer.take_sums()
                loss_sum, counted = loss_sum + loss, counted + steps
                trainer.refuse_divergence()
                mean = loss_sum / counted if counted else None  # None: every step was skipped
                report = LeaseProgress(fence=lease.fence, steps_done=steps_done, loss=mean)
                on_report(report)
            if recorder:
                recorder.after_step(trainer, steps_done)

        steps = range(lease.steps)
        positions = [lease.schedule_start + step * lease.schedule_stride for step in steps]
        try:
            if should_stop():
                return None
            ended = trainer.run(
                lease.first_batch,
                lease.steps,
                after_step,
                lambda: should_stop() or ends_early(),
                positions,
            )
            if not ended and (should_stop() or not ends_early()):
                return None
        finally:
            trainer.close()
        if report.loss is None:
            raise DivergedError(
                f"block {self.block}: every step from {lease.first_batch} to {trainer.step - 1} had"
                " a non-finite loss or gradient; if this happens again, tell the operator"
            )
        return Trained(trainer.weights(), report.loss, report.steps_done)


def load_moments(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> Tensors | None:
    """The moments in a file, if they have exactly these shapes."""
    try:
        moments = tensor_file.decode(bytearray(path.read_bytes()))
    except (OSError, ProtocolError):
        return None
    fits = {name: moment.shape for name, moment in moments.items()} == shapes
    return moments if fits else None
