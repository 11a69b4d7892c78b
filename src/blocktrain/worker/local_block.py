"""The block that this worker trains: from the weights of a lease's base to an encoded update.

A lease is trained from the base version that it names, or from the weights in memory. An update is
the change of the weights plus the residual of earlier updates; without a codec, it is the weights
themselves. When the worker changes to another block, it writes the optimizer's moments to disk, and
reads them when it comes back. The residual is what encoded updates have left out so far, on disk.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path

import numpy as np

from blocktrain import faults
from blocktrain.codec import update_codec
from blocktrain.codec.frames import encode
from blocktrain.config import Config
from blocktrain.data.corpus import Corpus
from blocktrain.errors import ProtocolError
from blocktrain.files import UNFINISHED, atomic_write
from blocktrain.numerics import Floats
from blocktrain.protocol.messages import (
    Blob,
    Commitment,
    Lease,
    LeaseProgress,
    Predecessor,
    Recipe,
)
from blocktrain.storage import tensor_file
from blocktrain.storage.tensor_file import Tensors
from blocktrain.training.device import Compute
from blocktrain.worker.downloads import LocalVersions
from blocktrain.worker.kept_states import KeptStates, LeaseStates, StateRecorder
from blocktrain.worker.lease_trainer import LeaseTrainer, Trained
from blocktrain.worker.machine import Deadline
from blocktrain.worker.transfer import Transfer

RESIDUAL = "residual"  # name of the only tensor in its file
PIECE = 1 << 16  # numbers of a residual in memory at a time


@dataclass(frozen=True)
class TrainedLease(Trained):
    """A trained block with its lease. `start`: the weights that the lease started from; {} if no
    delta is needed."""

    lease: Lease
    start: Tensors


@dataclass(frozen=True)
class LearnedDelta:
    """What a lease has learned plus the residual of earlier updates. The arrays are copies, so they
    can be encoded while the block trains on."""

    lease: Lease
    end: Tensors
    delta: Tensors


class LocalBlock:
    """One block between leases. Its weights stay in memory as its last lease left them, if that
    lease was completed."""

    def __init__(
        self,
        config: Config,
        corpus: Corpus,
        compute: Compute,
        transfer: Transfer,
        scratch: Path,
        on_astray: Callable[[str], None],
        kept: KeptStates | None = None,
    ) -> None:
        """`kept`: keeps the states that commitments name; None: updates carry no commitment."""
        self._config, self._corpus, self._compute, self._kept = config, corpus, compute, kept
        self._transfer, self._scratch = transfer, scratch
        self.versions = LocalVersions(transfer, scratch, config.swarm.codec, on_astray)
        self._trainer: LeaseTrainer | None = None
        # The weights in memory: what the last lease learned, or a blob in the cache.
        self._end: LearnedDelta | Blob | None = None
        self._interrupted = False  # the last lease ended early
        self._states: dict[int, LeaseStates] = {}  # of the last lease that was handed in, by block
        self._moved = False  # the moments in memory are those of a lease that was not handed in
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
        """The lease after which training can continue without a new base."""
        return self._end.lease.lease if isinstance(self._end, LearnedDelta) else None

    def train(
        self,
        lease: Lease,
        deadline: Deadline,
        on_report: Callable[[LeaseProgress], None],
        should_stop: Callable[[], bool],
        ends_early: Callable[[], bool] = lambda: False,
    ) -> TrainedLease | None:
        """Train a lease. Returns None if it was stopped early, and the steps so far if it
        `ends_early`."""
        self._check_blocks(lease)
        if lease.block != self.index:
            self.put_away()  # frees memory for the other block
        if self._commits and self._moved:
            self._trainer = None  # the moments that it began with are loaded again
        for each in lease.predecessors:
            self.versions.fetch(each.block, each.version, each.weights, deadline)

        def weights_of(predecessor: Predecessor) -> Tensors:
            return tensor_file.decode(self._transfer.read(predecessor.weights, deadline))

        start, base = self._start(lease, deadline)
        self._end, self._interrupted = None, True
        recorder = self._new_recorder(lease, loads_weights=base is not None)
        trainer = self._trainer_of(lease.block)
        trained = trainer.run(lease, base, weights_of, on_report, should_stop, ends_early, recorder)
        if trained is None:
            return None
        self._interrupted = False
        if recorder and self._kept and (states := recorder.finished()):
            self._kept.put(lease.lease, states)
        return TrainedLease(trained.weights, trained.loss, trained.steps, lease, start)

    def commitment(self, lease: Lease) -> Commitment | None:
        """What shows how a lease was trained; None if that was not recorded."""
        states = self._kept.get(lease.lease) if self._kept else None
        return states.commitment() if states else None

    @property
    def _commits(self) -> bool:
        return self._kept is not None and self._kept.wanted

    def _new_recorder(self, lease: Lease, *, loads_weights: bool) -> StateRecorder | None:
        self._moved = True
        if self._kept is None or not self._commits:
            return None
        return StateRecorder(
            self._kept,
            lease,
            self._states.get(lease.block),
            is_encoded=self.encodes,
            loads_weights=loads_weights,
            loads_moments=self._trainer is None,
        )

    def _hand_in(
        self, lease: Lease, complete: Callable[[KeptStates, LeaseStates], LeaseStates]
    ) -> None:
        """The update of a lease is going to be sent, so the next lease may start where it ended.
        `complete` adds files that are known only now."""
        self._moved = False
        if self._kept and (states := self._kept.get(lease.lease)):
            states = self._states[lease.block] = complete(self._kept, states)
            self._kept.put(lease.lease, states)
        else:  # the next lease does not start where an earlier one has ended
            self._states.pop(lease.block, None)

    def _check_blocks(self, lease: Lease) -> None:
        config, named = self._config, [each.block for each in lease.predecessors]
        if lease.block >= config.block_count or named not in (
            [],
            [*config.frozen_blocks(lease.block)],
        ):
            raise ProtocolError(
                f"the coordinator's lease of block {lease.block} names blocks that the run does not"
                " have, or not once each; tell the operator"
            )

    def write(self, trained: TrainedLease) -> Recipe:
        """Write the update of a run without a codec to the cache: the weights themselves."""
        cache = self._transfer.cache
        self._end = blob = cache.write(tensor_file.encode(trained.weights))
        self._hand_in(
            trained.lease, lambda _, states: replace(states, weights=(*states.weights, blob))
        )
        return cache.recipe(blob.name)

    def learned(self, trained: TrainedLease) -> LearnedDelta:
        """What the lease has learned plus the residual of earlier updates, which must be
        settled."""
        end = {name: array.copy() for name, array in trained.weights.items()}
        delta = {name: np.subtract(end[name], trained.start[name]) for name in sorted(end)}
        ResidualFile(self._scratch, trained.lease.block).add_to(list(delta.values()))
        self._end = LearnedDelta(trained.lease, end, delta)
        self._hand_in(
            trained.lease, lambda kept, states: replace(states, learned=kept.write(delta))
        )
        return self._end

    def encode(self, learned: LearnedDelta, *, final: bool) -> Recipe:
        """Write the encoded update to the cache. A `final` update leaves little out."""
        swarm, cache = self._config.swarm, self._transfer.cache
        codec = update_codec(swarm, final=final)
        assert codec is not None, "an update without a codec is written, not encoded"
        delta = [learned.delta[name] for name in sorted(learned.delta)]
        residual = ResidualFile(self._scratch, learned.lease.block)
        with residual.proposal(learned.lease.lease, sum(part.size for part in delta)) as keep:
            blob = cache.write(encode(delta, codec, keep))
        if self._kept:
            self._kept.add_residual(learned.lease.lease, residual.proposed(learned.lease.lease))
        return cache.recipe(blob.name)

    def settle(self, lease: Lease, *, accepted: bool | None) -> None:
        """Update the residual once it is known whether a lease's update was accepted. None:
        unknown."""
        ResidualFile(self._scratch, lease.block).settle(lease.lease, accepted=accepted)

    def put_away(self) -> None:
        """Free the block's memory. The optimizer's moments go to disk, unless a lease was
        interrupted."""
        if self._trainer and not self._interrupted and not (self._commits and self._moved):
            self._trainer.put_away()
        self._trainer = self._end = None

    def drop(self) -> None:
        """Discard the block and its optimizer state."""
        if self._trainer:
            self._trainer.forget()
        self._trainer = self._end = None

    def _start(self, lease: Lease, deadline: Deadline) -> tuple[Tensors, Tensors | None]:
        """The weights that a lease starts from ({} if no delta will be computed), and those to load
        into the block (None if it has them)."""
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
        if learned:  # the base does not contain this worker's last update yet
            for name, delta in learned.delta.items():
                base[name] += delta
        elif self.encodes:
            # Add what is learned but not sent yet. Otherwise it would be learned and sent twice.
            ResidualFile(self._scratch, lease.block).add_to([base[name] for name in sorted(base)])
        self.fetch_seconds = clock.monotonic() - began
        faults.reached("downloaded")
        return base

    def _trainer_of(self, block: int) -> LeaseTrainer:
        self._trainer = self._trainer or LeaseTrainer(
            self._config, block, self._corpus, self._compute, self._scratch
        )
        return self._trainer


class ResidualFile:
    """The residual of a block on disk: what the encoded updates have left out so far.

    A lease's new residual replaces the old one once its update is accepted. Until then it is stored
    under the lease's name; a restarted process asks the coordinator what became of the update. If
    that is unknown, both residuals are dropped: sending a change twice does harm, while a change
    that is never sent is learned again. An unreadable residual is ignored. Residuals are read and
    written in pieces.
    """

    def __init__(self, folder: Path, block: int) -> None:
        self._path = folder / f"residual-{block}.safetensors"

    def add_to(self, parts: Sequence[Floats]) -> None:
        """Add the residual to these arrays in order, unless its size differs."""
        try:
            with FileIO(self._path) as file:
                if _has_count(file, sum(part.size for part in parts)):
                    for part in parts:
                        _add(part.reshape(-1), file)
        except (OSError, ProtocolError):
            return

    @contextmanager
    def proposal(self, lease: str, count: int) -> Iterator[Callable[[Floats], object]]:
        """A writer for the residual that replaces the old one if the lease's update is accepted.
        Deletes the proposals of earlier leases, whose updates are settled."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        for stale in self._path.parent.glob(f"{self._path.name}.*"):
            stale.unlink(missing_ok=True)
        with atomic_write(self.proposed(lease), sync=False) as file:
            file.write(tensor_file.header_bytes([(RESIDUAL, "F32", (count,))]))
            yield lambda piece: file.write(piece.astype("<f4", copy=False).data)

    def settle(self, lease: str, *, accepted: bool | None) -> None:
        """Keep what a lease proposed if its update was accepted, otherwise delete that proposal. If
        `accepted` is None (unknown), delete the old residual too."""
        _settle(self.proposed(lease), accepted)

    def proposed(self, lease: str) -> Path:
        """Where the residual that a lease proposes is stored."""
        return self._path.with_name(f"{self._path.name}.{lease}")


def settle_leftover_residuals(folder: Path, was_accepted: Callable[[str], bool | None]) -> None:
    """Settle the residuals of updates that were being sent when an earlier process ended.
    `was_accepted` tells whether the update of a lease was accepted; if it raises, the rest stays
    for the next start."""
    for waiting in sorted(folder.glob("residual-*.safetensors.*")):
        if waiting.suffix == UNFINISHED:  # a process was killed while writing it
            waiting.unlink()
            continue
        _settle(waiting, was_accepted(waiting.suffix.removeprefix(".")))


def _settle(waiting: Path, accepted: bool | None) -> None:
    residual = waiting.with_suffix("")
    if accepted and waiting.exists():
        waiting.replace(residual)
    elif accepted is None and waiting.exists():
        residual.unlink(missing_ok=True)
    waiting.unlink(missing_ok=True)


def _has_count(file: FileIO, count: int) -> bool:
    """Whether a file has a residual of this size. If so, seeks to its first number."""
    size = file.seek(0, 2)

    def read(offset: int, length: int) -> bytes:
        file.seek(offset)
        return file.read(length)

    specs = tensor_file.parse_header(read, size)
    if [(spec.name, spec.dtype, spec.shape) for spec in specs] != [(RESIDUAL, "F32", (count,))]:
        return False
    file.seek(specs[0].start)
    return True


def _add(numbers: Floats, file: FileIO) -> None:
    buffer = np.empty(min(PIECE, numbers.size), "<f4")
    for start in range(0, numbers.size, PIECE):
        here = numbers[start : start + PIECE]
        residual = buffer[: here.size]
        file.readinto(residual.data)
        np.add(here, residual, out=here)
