"""One block on this machine: trained lease by lease, and turned into updates.

The optimizer's moments stay on disk for a worker that comes back to a block. They are a cache: what
cannot be read, or has other shapes, counts as missing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from blocktrain import faults
from blocktrain.codec.frames import encode_with_residual
from blocktrain.codec.registry import update_codec
from blocktrain.config import Config
from blocktrain.data.corpus import Corpus
from blocktrain.errors import DeviceError, DivergedError, ProtocolError
from blocktrain.files import write_bytes
from blocktrain.protocol.messages import Blob, Lease, Predecessor, Recipe
from blocktrain.storage import tensor_file
from blocktrain.storage.tensor_file import Tensors
from blocktrain.train.cascade import Published
from blocktrain.train.device import Compute
from blocktrain.train.loading import load_block
from blocktrain.train.trainer import BlockTrainer
from blocktrain.worker.residual import ResidualFile
from blocktrain.worker.timing import Deadline
from blocktrain.worker.transfer import Transfer
from blocktrain.worker.versions import Versions

REPORT_EVERY = 10  # steps on a GPU: a report waits for the device

WeightsOf = Callable[[Predecessor], Tensors]


class MomentsFile:
    def __init__(self, path: Path) -> None:
        self._path = path

    def save(self, moments: Tensors) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(self._path, b"".join(tensor_file.encode(moments)))

    def load(self, shapes: Mapping[str, tuple[int, ...]]) -> Tensors | None:
        """Moments of exactly these shapes, if there are any."""
        try:
            moments = tensor_file.decode(bytearray(self._path.read_bytes()))
        except (OSError, ProtocolError):
            return None
        fits = {name: moment.shape for name, moment in moments.items()} == shapes
        return moments if fits else None

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


@dataclass(frozen=True)
class LeaseReport:
    """How far a lease has come. `loss`: the mean so far, None if every step was skipped."""

    steps_done: int
    loss: float | None


@dataclass(frozen=True)
class Trained:
    """The block after a lease. The arrays are the block's own: use them before it is trained on."""

    weights: Tensors
    loss: float


class LeasedVersions:
    """The blocks before, at the versions that a lease names; they do not change while it runs."""

    def __init__(self, lease: Lease, weights_of: WeightsOf) -> None:
        self._named = {named.block: named for named in lease.predecessors}
        self._weights_of = weights_of
        missing = sorted(set(range(lease.block)) - set(self._named))
        if missing:
            raise ProtocolError(
                f"the lease of block {lease.block} does not name a version of block {missing[0]}"
            )

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
        """`scratch`: a folder of this run, for moments and for a cascade's features."""
        self.config, self.block, self.corpus = config, block, corpus
        self.compute, self.scratch = compute, scratch
        self._trainer: BlockTrainer | None = None
        self._moments = MomentsFile(scratch / f"moments-{block}.safetensors")

    def run(
        self,
        lease: Lease,
        base: Tensors | None,
        predecessors: WeightsOf,
        on_report: Callable[[LeaseReport], None],
        should_stop: Callable[[], bool],
    ) -> Trained | None:
        """Train a lease from `base`, or if that is None, from where the last lease ended. None:
        stopped before the end, and the block's weights are of no use."""
        try:
            trainer = self._prepared(lease, base, predecessors)
            del base  # the block has a copy
            return self._train(trainer, lease, on_report, should_stop)
        except torch.OutOfMemoryError:
            raise DeviceError(
                f"block {lease.block} does not fit into the memory of {self.compute.device};"
                " set --memory to what it has, or choose smaller blocks with --blocks"
            ) from None

    def _prepared(
        self, lease: Lease, base: Tensors | None, predecessors: WeightsOf
    ) -> BlockTrainer:
        assert lease.block == self.block, "a lease of another block"
        reads_others = self.config.kind.reads_predecessors and lease.block > 0
        published = LeasedVersions(lease, predecessors) if reads_others else None
        trainer = self._trainer or self._new_trainer(published)
        assert base is not None or self._trainer, "no block is in memory yet"
        if base is not None:
            load_block(trainer.module, base, f"version {lease.base_version} of block {self.block}")
        if published:
            trainer.build_on(published, lease.first_batch + lease.steps)
        self._trainer = trainer
        return trainer

    def _new_trainer(self, published: Published | None) -> BlockTrainer:
        """With the moments from when this worker last trained the block."""
        trainer = BlockTrainer(
            self.config, self.block, self.corpus, self.compute, None, published, self.scratch
        )
        if moments := self._moments.load(trainer.moment_shapes()):
            trainer.take_moments(moments)
        return trainer

    def put_away(self) -> None:
        """Save the optimizer's moments: the worker goes on with another block."""
        if self._trainer:
            self._moments.save(self._trainer.moments())

    def forget(self) -> None:
        """Delete the saved moments, because training diverged."""
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
        trainer.take_sums()  # discards those of an interrupted lease

        def after_step(stopping: bool) -> None:
            faults.reached("step")
            steps_done = trainer.step - lease.first_batch
            if steps_done % every == 0 or steps_done == lease.steps:
                loss, _, counted = trainer.take_sums()
                losses.add(loss, counted)
                trainer.refuse_divergence()
                on_report(LeaseReport(steps_done, losses.mean))

        steps = range(lease.steps)
        positions = [lease.schedule_start + step * lease.schedule_stride for step in steps]
        try:
            if should_stop() or not trainer.run(
                lease.first_batch, lease.steps, after_step, should_stop, positions
            ):
                return None
        finally:
            trainer.close()
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


@dataclass(frozen=True)
class StoredUpdate:
    """An update in the cache: a trained block, or the encoded delta."""

    blob: Blob
    recipe: Recipe
    loss: float


@dataclass(frozen=True)
class TrainedLease:
    """A lease at its end. `weights` are the block's own arrays, which change with the next step."""

    lease: Lease
    start: Tensors
    weights: Tensors
    loss: float


@dataclass(frozen=True)
class LearnedDelta:
    """What a lease has learned, with the residual of the updates before it. Its arrays are copies:
    it can be encoded while the block is trained on."""

    lease: Lease
    end: Tensors
    delta: Tensors
    loss: float


class LocalBlock:
    """One block between its leases: in memory, at the end of the last lease if that counts."""

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
        # Where the block stands: at what the last lease learned, or at a blob of the cache.
        self._end: LearnedDelta | Blob | None = None
        self._interrupted = False  # the last lease did not come to its end
        self.fetch_seconds = 0.0  # how long the last download of a base took

    @property
    def index(self) -> int | None:
        return self._trainer.block if self._trainer else None

    @property
    def encodes(self) -> bool:
        """Whether updates are encoded deltas; otherwise they are whole blocks."""
        return self._config.swarm.codec != "none"

    @property
    def ended_lease(self) -> str | None:
        """The lease after which the block can be trained on without a new base."""
        return self._end.lease.lease if isinstance(self._end, LearnedDelta) else None

    def can_train(self, lease: Lease) -> bool:
        """Whether what a lease builds on is here, or can be downloaded."""
        return lease.continues in (None, self.ended_lease)

    def train(
        self,
        lease: Lease,
        deadline: Deadline,
        on_report: Callable[[LeaseReport], None],
        should_stop: Callable[[], bool],
    ) -> TrainedLease | None:
        """Train a lease. None: stopped before its end."""
        if lease.block != self.index:
            self.put_away()  # before the other block takes its memory
        for named in lease.predecessors:
            self.versions.fetch(named.block, named.version, named.weights, deadline)

        def weights_of(predecessor: Predecessor) -> Tensors:
            return tensor_file.decode(self._transfer.read(predecessor.weights, deadline))

        start, base = self._start(lease, deadline)
        self._end, self._interrupted = None, True
        trainer = self._trainer_of(lease.block)
        trained = trainer.run(lease, base, weights_of, on_report, should_stop)
        if trained is None:
            return None
        self._interrupted = False
        return TrainedLease(lease, start, trained.weights, trained.loss)

    def write(self, trained: TrainedLease) -> StoredUpdate:
        """The update without a codec: the block as it is."""
        cache = self._transfer.cache
        blob = self._end = cache.write(tensor_file.encode(trained.weights))
        return StoredUpdate(blob, cache.recipe(blob.name), trained.loss)

    def learned(self, trained: TrainedLease) -> LearnedDelta:
        """What will be encoded: what the lease learned plus the residual of the updates before,
        the last of which must be settled."""
        end = {name: array.copy() for name, array in trained.weights.items()}
        delta = {name: np.subtract(end[name], trained.start[name]) for name in sorted(end)}
        ResidualFile(self._scratch, trained.lease.block).add_to(list(delta.values()))
        self._end = LearnedDelta(trained.lease, end, delta, trained.loss)
        return self._end

    def encode(self, learned: LearnedDelta, *, final: bool) -> StoredUpdate:
        """The update with a codec. A `final` one of a block leaves little out."""
        swarm, cache = self._config.swarm, self._transfer.cache
        codec = update_codec(swarm, final=final)
        assert codec is not None, "an update without a codec is written, not encoded"
        delta = [learned.delta[name] for name in sorted(learned.delta)]
        residual = ResidualFile(self._scratch, learned.lease.block)
        with residual.proposal(learned.lease.lease, sum(part.size for part in delta)) as keep:
            blob = cache.write(encode_with_residual(codec, delta, keep))
        return StoredUpdate(blob, cache.recipe(blob.name), learned.loss)

    def settle(self, lease: Lease, *, accepted: bool | None) -> None:
        """What became of a lease's update, which decides what the residual is. None: unknown."""
        ResidualFile(self._scratch, lease.block).settle(lease.lease, accepted=accepted)

    def put_away(self) -> None:
        """Free the block's memory; the optimizer's moments go to disk for the next time, unless a
        lease was interrupted."""
        if self._trainer and not self._interrupted:
            self._trainer.put_away()
        self._trainer = self._end = None

    def drop(self) -> None:
        """Forget the block and its optimizer for good."""
        if self._trainer:
            self._trainer.forget()
        self._trainer = self._end = None

    def _start(self, lease: Lease, deadline: Deadline) -> tuple[Tensors, Tensors | None]:
        """The weights that a lease starts from, and what has to be loaded into the block for that:
        nothing if it stands there already."""
        end = self._end
        learned = end if isinstance(end, LearnedDelta) and lease.continues else None
        if learned and learned.lease.base == lease.base:
            return learned.end, None
        if end == lease.base:
            return {}, None
        base = self._download_base(lease, learned, deadline)
        return base, base

    def _download_base(
        self, lease: Lease, learned: LearnedDelta | None, deadline: Deadline
    ) -> Tensors:
        clock = self._transfer.client.clock
        began = clock.monotonic()
        data = self.versions.read(lease.block, lease.base_version, lease.base, deadline)
        base = tensor_file.decode(data)
        if learned:  # the base holds only this worker's updates before that one
            for name, delta in learned.delta.items():
                base[name] += delta
        elif self.encodes:
            # What this worker has learned and not yet sent. Without it, the block would learn that
            # again, and it would be sent twice.
            ResidualFile(self._scratch, lease.block).add_to([base[name] for name in sorted(base)])
        self.fetch_seconds = clock.monotonic() - began
        faults.reached("downloaded")
        return base

    def _trainer_of(self, block: int) -> LeaseTrainer:
        self._trainer = self._trainer or LeaseTrainer(
            self._config, block, self._corpus, self._compute, self._scratch
        )
        return self._trainer
