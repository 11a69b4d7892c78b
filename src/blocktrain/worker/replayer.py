"""Trains a part of another worker's lease again, and compares the result with what it committed to.

Where no training is involved (what is added to a base, what is encoded), results must be equal bit
for bit on every machine.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping

import numpy as np

from blocktrain.codec import Codec
from blocktrain.codec.frames import UpdateDecoder, encode
from blocktrain.config import Config
from blocktrain.data.corpus import Corpus
from blocktrain.errors import ProtocolError
from blocktrain.numerics import Array, Floats
from blocktrain.protocol.check_messages import (
    Check,
    EncodingLink,
    ReplayCheck,
    ReplayResult,
    StartLink,
    TrainingState,
)
from blocktrain.protocol.messages import Blob, Predecessor
from blocktrain.storage import tensor_file
from blocktrain.storage.tensor_file import Tensors
from blocktrain.training.device import Compute
from blocktrain.training.stored_models import load_block
from blocktrain.training.trainer import BlockTrainer
from blocktrain.worker.lease_trainer import LeasedVersions
from blocktrain.worker.local_block import RESIDUAL
from blocktrain.worker.transfer import BlobCache

# Encoders may choose differently between equal numbers.
ENCODED_ALIKE = 0.01
LEAST_SIZE = 0.05  # of a tensor's change, as a share of the usual one
MOMENTS = ("momentum", "step", "exp_avg", "exp_avg_sq")

Form = Mapping[str, tuple[int, ...]]  # shapes by name
Read = Callable[[Blob], memoryview]
WeightsOf = Callable[[Predecessor], Tensors]


class _CommitmentError(Exception):
    """What is wrong with a file that a worker has committed to."""


class Replayer:
    """`read` fetches a file. `scratch` names files: equal contents have equal names."""

    def __init__(
        self, config: Config, corpus: Corpus, compute: Compute, read: Read, scratch: BlobCache
    ) -> None:
        self.config, self.corpus, self.compute = config, corpus, compute
        self._read, self._scratch = read, scratch

    def replay(self, check: Check, task: ReplayCheck, weights_of: WeightsOf) -> ReplayResult:
        """A file of the worker that is not what it should be is a fault of its own: otherwise
        nobody could replay a worker that commits to nonsense."""
        try:
            return self._replay(check, task, weights_of)
        except _CommitmentError as fault:
            return ReplayResult(
                identical=False, cosine=None, distance=None, moments_distance=None, fault=str(fault)
            )

    def _replay(self, check: Check, task: ReplayCheck, weights_of: WeightsOf) -> ReplayResult:
        trainer = self._trainer(check, weights_of)
        forms = (_form(trainer.weights()), trainer.moment_shapes())
        start, end = self._state(task.start, forms), self._state(task.end, forms)
        if task.opening:
            self._check_opening(task.opening, start[0])
        if task.closing:
            self._check_closing(task.closing, forms[0])
        return compare(start[0], _retrained(trainer, check, task, start), end)

    def _state(self, state: TrainingState, forms: tuple[Form, Form]) -> tuple[Tensors, Tensors]:
        """Weights and moments."""
        weights, moments = self._tensors(state.weights, forms[0]), self._tensors(state.moments)
        if moments and _form(moments) != forms[1]:
            raise _CommitmentError(
                "the moments that the worker has committed to do not fit its block"
            )
        return weights, moments

    def _tensors(self, blob: Blob, form: Form | None = None) -> Tensors:
        data = self._read(blob)
        try:
            tensors = tensor_file.decode(data)
        except ProtocolError as error:
            raise _CommitmentError(
                f"a file that the worker has committed to is damaged: {error}"
            ) from None
        if any(array.dtype != np.float32 for array in tensors.values()):
            raise _CommitmentError("the files that a worker commits to must be F32")
        if form is not None and _form(tensors) != form:
            raise _CommitmentError(
                "the weights that the worker has committed to do not fit its block"
            )
        return tensors

    def _trainer(self, check: Check, weights_of: WeightsOf) -> BlockTrainer:
        text = check.text
        published: LeasedVersions | None = None
        if needed := self.config.frozen_blocks(check.block):
            published = LeasedVersions(check.block, needed, text.predecessors, weights_of)
        trainer = BlockTrainer(
            self.config, check.block, self.corpus, self.compute, None, published, None
        )
        if published:
            trainer.build_on(published, text.first_batch + text.steps)
        return trainer

    # Links

    def _check_opening(self, link: StartLink, start: Tensors) -> None:
        base = self._tensors(link.base)
        if link.added:
            _add(base, self._tensors(link.added))
        if not _equal(base, start):
            raise _CommitmentError(
                "the lease did not begin with its base version plus the residual of earlier updates"
            )

    def _check_closing(self, link: EncodingLink, form: Form) -> None:
        start, end = self._tensors(link.start, form), self._tensors(link.end, form)
        before = self._tensors(link.residual) if link.residual else None
        # Without the residual too: a worker that does not know whether it was sent drops it.
        for residual in (before, None) if before else (None,):
            learned = {name: np.subtract(end[name], start[name]) for name in sorted(end)}
            if residual:
                _add(learned, residual)
            if self._name(learned) == link.learned:
                self._check_encoding(link, learned)
                return
        raise _CommitmentError("the encoded change is not what the lease has learned")

    def _check_encoding(self, link: EncodingLink, learned: Tensors) -> None:
        data = self._read(link.update)
        sent, numbers = decoded_change(data, learned), _flat(learned)
        left_out = np.subtract(numbers, _flat(sent))
        if self._name({RESIDUAL: left_out}) != link.left_out:
            raise _CommitmentError("the residual is not what the encoding has left out")
        codec = _codec_of_update(data, numbers.size)
        own = b"".join(encode(numbers, codec))
        expected = _flat(decoded_change(memoryview(own), learned))
        room = ENCODED_ALIKE * float(np.linalg.norm(expected))
        if float(np.linalg.norm(expected - _flat(sent))) > room:
            raise _CommitmentError("the update is not an encoding of what the lease has learned")

    def _name(self, tensors: Tensors) -> str:
        return self._scratch.write(tensor_file.encode(tensors)).name


def _retrained(
    trainer: BlockTrainer, check: Check, task: ReplayCheck, start: tuple[Tensors, Tensors]
) -> tuple[Tensors, Tensors]:
    load_block(trainer.module, start[0], "the start of a replay")
    if start[1]:
        trainer.take_moments(start[1])
    text, steps = check.text, range(task.first_step, task.first_step + task.steps)
    positions = [text.schedule_start + step * text.schedule_stride for step in steps]
    try:
        trainer.run(text.first_batch + task.first_step, task.steps, positions=positions)
    finally:
        trainer.close()
    return trainer.weights(), trainer.moments()


def compare(
    start: Tensors, own: tuple[Tensors, Tensors], theirs: tuple[Tensors, Tensors]
) -> ReplayResult:
    """Compare a retrained state with a worker's. Both have weights and moments."""
    if _form(own[1]) != _form(theirs[1]):
        raise _CommitmentError(
            "the moments at the end are those of an optimizer that has made no step"
        )
    changes, their_changes = (
        {name: weights[name].astype(np.float64) - start[name] for name in sorted(start)}
        for weights in (own[0], theirs[0])
    )
    flat, their_flat = (
        np.concatenate([each.reshape(-1) for each in part.values()])
        for part in (changes, their_changes)
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        sizes = np.linalg.norm(flat) * np.linalg.norm(their_flat)
        cosine = float(flat @ their_flat / sizes)
    return ReplayResult(
        identical=all(_equal(*pair) for pair in zip(own, theirs, strict=True)),
        cosine=_finite(cosine),
        distance=_finite(_largest_distance(changes, their_changes)),
        moments_distance=_finite(_largest_distance(own[1], theirs[1])),
    )


def _largest_distance(own: Mapping[str, Array], theirs: Mapping[str, Array]) -> float:
    """The largest distance of any tensor, relative to its size or, if it is unusually small, to a
    share of what is usual for its kind."""
    squares: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    norms = {name: float(np.linalg.norm(array.astype(np.float64))) for name, array in own.items()}
    for name, norm in norms.items():
        squares[_kind(name)] += norm**2
        counts[_kind(name)] += own[name].size
    largest = 0.0
    for name, norm in norms.items():
        usual = (squares[_kind(name)] / counts[_kind(name)] * own[name].size) ** 0.5
        apart = float(np.linalg.norm(theirs[name].astype(np.float64) - own[name]))
        if apart != 0.0:  # also if it is NaN
            size = max(norm, LEAST_SIZE * usual)
            largest = max(largest, apart / size) if size and np.isfinite(apart) else np.inf
    return largest


def _kind(name: str) -> str:
    """Of a moment, which of the optimizer's; of a weight, nothing."""
    kind = name.rpartition(".")[2]
    return kind if kind in MOMENTS else ""


def _add(numbers: Tensors, added: Tensors) -> None:
    """Add a residual (one array) or a change (by tensor)."""
    flat = added[RESIDUAL] if added.keys() == {RESIDUAL} else _flat(added)
    if flat.size != sum(array.size for array in numbers.values()):
        raise _CommitmentError("the change to add and the weights differ in size")
    at = 0
    for name in sorted(numbers):
        array = numbers[name]
        numbers[name] = array + flat[at : at + array.size].reshape(array.shape)
        at += array.size


def _flat(tensors: Tensors) -> Floats:
    """All numbers in the order of a file. Adam's counts of steps are numbers too."""
    parts = [tensors[name].reshape(-1) for name in sorted(tensors)]
    return np.concatenate(parts).astype(np.float32, copy=False) if parts else np.empty(0, "f4")


def _form(tensors: Tensors) -> Form:
    return {name: array.shape for name, array in tensors.items()}


def _equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(
        one[name].shape == other[name].shape and one[name].tobytes() == other[name].tobytes()
        for name in one
    )


def _finite(number: float) -> float | None:
    return number if np.isfinite(number) else None


def decoded_change(data: memoryview, like: Tensors) -> Tensors:
    """The change that an update contains, as tensors of these names and shapes."""
    names = sorted(like)
    sizes = [like[name].size for name in names]
    numbers = np.concatenate(list(_update_decoder(data, sum(sizes)).frames()))
    parts = np.split(numbers, np.cumsum(sizes)[:-1])
    return {name: part.reshape(like[name].shape) for name, part in zip(names, parts, strict=True)}


def _codec_of_update(data: memoryview, count: int) -> Codec:
    """The codec of an update of this many numbers."""
    return _update_decoder(data, count).codec


def _update_decoder(data: memoryview, count: int) -> UpdateDecoder:
    def read(start: int, length: int) -> bytes:
        return bytes(data[start : start + length])

    return UpdateDecoder(read, len(data), count)
