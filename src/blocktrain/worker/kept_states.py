"""Files that show how this worker has trained its last leases, kept for a while.

A commitment names the states of a lease. The coordinator may ask for some of the files later, to
have a part of the lease trained again (docs/PROTOCOL.md, Commitments).
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ParamSpec

from blocktrain.errors import BlocktrainError, RefusedError
from blocktrain.protocol.messages import Blob, Commitment, Hash, Lease, Reveal
from blocktrain.storage import tensor_file
from blocktrain.storage.tensor_file import Tensors
from blocktrain.swarm import replay
from blocktrain.training.trainer import BlockTrainer
from blocktrain.worker.client import Client
from blocktrain.worker.machine import Bandwidth
from blocktrain.worker.transfer import BlobCache, Transfer

KEPT_LEASES = 4
MOST_BYTES = 16 << 30  # of all states
REVEAL_SECONDS = 3600.0

P = ParamSpec("P")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeaseStates:
    """The named states of a lease: weights and moments at its cuts."""

    weights: tuple[Blob, ...] = ()
    moments: tuple[Blob, ...] = ()
    learned: Blob | None = None
    residual: Blob | None = None
    predecessors: tuple[int, ...] = ()

    @property
    def blobs(self) -> set[Blob]:
        named = {*self.weights, *self.moments, self.learned, self.residual}
        return {blob for blob in named if blob}

    def commitment(self) -> Commitment:
        def name(blob: Blob | None) -> Hash | None:
            return blob.name if blob else None

        return Commitment(
            weights=tuple(blob.name for blob in self.weights),
            moments=tuple(blob.name for blob in self.moments),
            learned=name(self.learned),
            residual=name(self.residual),
            predecessors=self.predecessors,
        )


class Pace:
    """How long naming a state takes, and training a step; measured on the last lease."""

    def __init__(self) -> None:
        self._state_seconds = self._step_seconds = 0.0

    def segments(self, steps: int) -> int:
        """Into how many segments to cut a lease. The first lease has one."""
        seconds = steps * self._step_seconds
        return replay.affordable_segments(steps, seconds, self._state_seconds) if seconds else 1

    def measured(self, state_seconds: float, step_seconds: float) -> None:
        self._state_seconds, self._step_seconds = state_seconds, step_seconds


class KeptStates:
    def __init__(self, client: Client, folder: Path, bandwidth: Bandwidth) -> None:
        self.blobs = BlobCache(folder / "states")
        self._transfer = Transfer(client, self.blobs, bandwidth)
        self._client = client
        self._leases: dict[str, LeaseStates] = {}  # oldest first
        self._asked_for: set[Blob] = set()  # files that the coordinator has asked for last
        self._lock = threading.Lock()
        self._sending = threading.Thread()  # not started
        self.pace = Pace()

    @property
    def wanted(self) -> bool:
        """Whether the coordinator takes commitments."""
        return self._client.takes_commitments

    def write(self, tensors: Tensors) -> Blob:
        return self.blobs.write(tensor_file.encode(tensors))

    def read(self, blob: Blob) -> Tensors | None:
        """A file that is still here; None otherwise."""
        if not self.blobs.has(blob):
            return None
        try:
            reader = self.blobs.reader(blob)
            return tensor_file.decode(bytearray(reader.read(0, blob.size)))
        except BlocktrainError:
            return None

    def get(self, lease: str) -> LeaseStates | None:
        return self._leases.get(lease)

    def put(self, lease: str, states: LeaseStates) -> None:
        """Keep a lease's states, and forget those of older leases if there are too many."""
        with self._lock:
            self._leases.pop(lease, None)
            self._leases[lease] = states
            while len(self._leases) > KEPT_LEASES or (
                self._size > MOST_BYTES and len(self._leases) > 1
            ):
                del self._leases[next(iter(self._leases))]

    def add_residual(self, lease: str, path: Path) -> None:
        """Keep what the encoding of a lease's update has left out, which is in a file."""
        if states := self._leases.get(lease):
            self.put(lease, replace(states, residual=self.blobs.write([path.read_bytes()])))

    def collect(self) -> None:
        """Delete the files of forgotten leases. Call this while no file is being written."""
        if not self._sending.is_alive():
            self.blobs.keep_only(self._kept_blobs)

    @property
    def _kept_blobs(self) -> set[Blob]:
        return self._asked_for.union(*(states.blobs for states in self._leases.values()))

    @property
    def _size(self) -> int:
        return sum(blob.size for blob in self._kept_blobs)

    def start_to_reveal(self, reveal: Reveal) -> None:
        """Send files in a thread, unless others are being sent: the coordinator asks again."""
        if not self._sending.is_alive():
            self._sending = threading.Thread(target=self.reveal, args=(reveal,), daemon=True)
            self._sending.start()

    def reveal(self, reveal: Reveal) -> None:
        """Send files, and keep them until others are asked for: sending them may fail, or take
        longer than the next leases."""
        with self._lock:
            self._asked_for = {blob for blob in self._kept_blobs if blob.name in reveal.files}
        deadline = self._client.deadline(REVEAL_SECONDS)
        recipes = []
        try:
            if self._has_all(reveal):
                recipes = [self.blobs.recipe(name) for name in reveal.files]
            else:  # deleted, or of an earlier process: without an answer, leases would stop
                log.warning("the files of lease %s are gone; it cannot be replayed", reveal.lease)
            self._transfer.reveal(reveal.lease, recipes, deadline)
        except (BlocktrainError, OSError) as error:
            is_over = isinstance(error, RefusedError) and error.code == "not_found"
            level = logging.DEBUG if is_over else logging.WARNING  # they are no longer needed
            log.log(level, "cannot send files of lease %s for a replay: %s", reveal.lease, error)

    def _has_all(self, reveal: Reveal) -> bool:
        return self.blobs.chunks.has(reveal.files) == set(reveal.files)


class StateRecorder:
    """Names the states of one lease while it is trained, and keeps them.

    The names are useless if one is missing: if a file cannot be written, the lease gets none.
    """

    def __init__(
        self,
        kept: KeptStates,
        lease: Lease,
        previous: LeaseStates | None,
        *,
        is_encoded: bool,
        loads_weights: bool,
        loads_moments: bool,
    ) -> None:
        """`previous`: the states of this block's last lease whose update was sent. `loads_weights`,
        `loads_moments`: whether these are loaded for the lease, since those in memory do not fit.
        """
        self._kept, self._lease, self._previous = kept, lease, previous
        self._is_encoded = is_encoded
        self._loads_weights, self._loads_moments = loads_weights, loads_moments
        self._weights: list[Blob] = []
        self._moments: list[Blob] = []
        self._cuts = replay.cuts(lease.steps, kept.pace.segments(lease.steps))
        self._is_complete = True
        self._began, self._naming = time.perf_counter(), 0.0

    def begin(self, trainer: BlockTrainer) -> None:
        self._try(self._record_start, trainer)

    def after_step(self, trainer: BlockTrainer, steps_done: int) -> None:
        if self._is_complete and steps_done in self._cuts[1:-1]:
            self._try(self._record, trainer)

    def end(self, trainer: BlockTrainer, steps_done: int) -> None:
        training = time.perf_counter() - self._began - self._naming
        if steps_done < self._lease.steps:  # the cuts are not those of the shorter lease
            del self._weights[1:], self._moments[1:]
        if self._is_complete:
            self._try(self._record, trainer, is_last=True)
        self._kept.pace.measured(self._naming / len(self._cuts), training / steps_done)

    def finished(self) -> LeaseStates | None:
        """The states of the whole lease. Without a codec, the last weights are the update itself,
        and are missing here."""
        if not self._is_complete:
            return None
        predecessors = tuple(each.version for each in self._lease.predecessors)
        return LeaseStates(tuple(self._weights), tuple(self._moments), predecessors=predecessors)

    def _record_start(self, trainer: BlockTrainer) -> None:
        before = self._previous
        last = before.moments[-1] if before else None
        if last and self._loads_moments:
            moments = self._kept.read(last)
            if moments is None:
                last = None
            elif moments:
                trainer.take_moments(moments)
        self._moments.append(last or self._kept.write(trainer.moments()))
        if not self._is_encoded:
            self._weights.append(self._lease.base)
        elif before and not self._loads_weights:
            self._weights.append(before.weights[-1])
        else:
            self._weights.append(self._kept.write(trainer.weights()))

    def _record(self, trainer: BlockTrainer, *, is_last: bool = False) -> None:
        self._moments.append(self._kept.write(trainer.moments()))
        if self._is_encoded or not is_last:
            self._weights.append(self._kept.write(trainer.weights()))

    def _try(self, record: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        began = time.perf_counter()
        try:
            record(*args, **kwargs)
        except (BlocktrainError, OSError) as error:
            self._is_complete = False
            log.warning("this lease cannot be replayed: its states were not written: %s", error)
        self._naming += time.perf_counter() - began
