"""An optimizer's moments on disk, for a worker that comes back to a block.

A cache, nothing more: what cannot be read, or belongs to a block of another shape, is as good as
not there.
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
from blocktrain.worker.http import Patience
from blocktrain.worker.residual import ResidualFile
from blocktrain.worker.transfer import Transfer
from blocktrain.worker.versions import Versions


class MomentsFile:
    def __init__(self, path: Path) -> None:
        self._path = path

    def save(self, moments: Tensors) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(self._path, b"".join(tensor_file.encode(moments)))

    def load(self, shapes: Mapping[str, tuple[int, ...]]) -> Tensors | None:
        """Moments of exactly these shapes; None where there are none."""
        try:
            found = tensor_file.decode(bytearray(self._path.read_bytes()))
        except (OSError, ProtocolError):
            return None
        fits = {name: moment.shape for name, moment in found.items()} == shapes
        return found if fits else None

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


REPORT_EVERY = 10  # steps; a report waits for the device, so not after each where there is one

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
        self._moments = MomentsFile(scratch / f"moments-{block}.safetensors")

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
        reads_others = self.config.kind.reads_predecessors and lease.block > 0
        published = LeasedVersions(lease, predecessors) if reads_others else None
        trainer = self._trainer or self._new_trainer(published)
        assert base is not None or self._trainer, "nothing is held yet"
        if base is not None:
            load_block(trainer.module, base, f"version {lease.base_version} of block {self.block}")
        if published:
            trainer.build_on(published, lease.first_batch + lease.steps)
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
        trainer.take_sums()  # drop those of a lease that was stopped

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
class EncodedUpdate:
    """A trained block, or what it learned, written to the chunk cache."""

    blob: Blob
    recipe: Recipe
    loss: float


@dataclass(frozen=True)
class LearnedDelta:
    """A lease's end, and what no update has told yet of the way there: arrays of their own, to be
    encoded while the block is trained on."""

    lease: Lease
    end: Tensors
    news: Tensors
    loss: float


class LocalBlock:
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
        self._start: Tensors = {}  # what the lease was trained from, where updates are encoded
        self._learned: LearnedDelta | None = None  # at whose end the block stands
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
            return tensor_file.decode(self._transfer.read(predecessor.weights, patience))

        trained = self._trainer_of(lease.block).run(
            lease, self._base(lease, patience), weights_of, on_report, should_stop
        )
        self._whole = trained is not None
        return trained

    def write(self, trained: Trained) -> EncodedUpdate:
        """The block as it was trained, in the cache, to be sent."""
        cache = self._transfer.cache
        blob = self.stands_at = cache.write(tensor_file.encode(trained.weights))
        return EncodedUpdate(blob, cache.recipe(blob.name), trained.loss)

    def take_learned(self, lease: Lease, trained: Trained) -> LearnedDelta:
        """What is to be encoded: what was learned, and what earlier updates left out, the last of
        which is settled. The block may be trained on at once."""
        end = {name: array.copy() for name, array in trained.weights.items()}
        news = {name: np.subtract(end[name], self._start[name]) for name in sorted(end)}
        ResidualFile(self._scratch, lease.block).add_to(list(news.values()))
        self._learned = LearnedDelta(lease, end, news, trained.loss)
        return self._learned

    def encode(self, learned: LearnedDelta, *, last_words: bool) -> EncodedUpdate:
        """News in few bytes, in the cache. With its last words on a block a worker leaves out
        little."""
        swarm, cache = self._config.swarm, self._transfer.cache
        codec = update_codec(swarm, final=last_words)
        assert codec is not None, "an update that is not encoded is written"
        news = [learned.news[name] for name in sorted(learned.news)]
        kept = ResidualFile(self._scratch, learned.lease.block)
        with kept.proposal(learned.lease.lease, sum(part.size for part in news)) as owe:
            blob = cache.write(encode_with_residual(codec, news, owe))
        return EncodedUpdate(blob, cache.recipe(blob.name), learned.loss)

    def settled(self, lease: Lease, *, accepted: bool | None) -> None:
        """The news of an update, and with it what is still owed. None: there will be none."""
        ResidualFile(self._scratch, lease.block).settle(lease.lease, accepted=accepted)

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
            data = np.empty(lease.base.size, np.uint8).data
            self.versions.read(lease.block, lease.base_version, lease.base, patience, data)
            base = tensor_file.decode(data)
            if before and lease.continues:  # the base has all this worker did before that lease
                for name, news in before.news.items():
                    base[name] += news
            elif self.encodes:
                # What this worker's updates have not told of what it learned: begun from the
                # version alone, it would learn that a second time, and tell it twice.
                owed = ResidualFile(self._scratch, lease.block)
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
