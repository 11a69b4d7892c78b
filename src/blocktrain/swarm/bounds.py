"""How far one update may move each tensor of a block.

There are two limits. The first is what the optimizer can do with the lease's learning rates. The
second is a multiple of what is usual for the block: the median of its last merged updates, or of
the updates that are merged together while there are few of those. An update above the first limit,
or far above the second, is refused. Between usual and that it is scaled down, tensor by tensor.

Pure decisions: no clock, no files.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from blocktrain.codec import REGISTRY
from blocktrain.config import Config, TrainConfig
from blocktrain.numerics import Doubles
from blocktrain.numerics.tensors import Sizes

# Multiples of the usual size. The first update of a worker that is new to a block may be 5 times as
# large as usual, since Adam's first steps are. It counts, scaled down.
REFUSED_ABOVE = 8.0
CLIPPED_ABOVE = 1.5
# The size of a tensor varies by about 1 / sqrt(its numbers). So much of that is allowed on top.
VARIATION = 3.0
# A tensor that has hardly moved so far may always move by this share of what the optimizer can do.
LEAST_SHARE = 0.1

HISTORY = 64  # how many merged updates to compare with
LEAST_HISTORY = 16
LEAST_REPLICAS = 3

# Full leases in which a number moves before the codec sparse sends it.
LEFT_OUT_LEASES = 4
ROUNDING = 1e-4  # relative to the weights: every step rounds them to float32
# Muon (train/optimizer.py) makes a step of a matrix orthogonal and gives its numbers this size. The
# singular values end up below 1.21 (Newton-Schulz), or a little more in bfloat16.
MUON_SIZE = 0.2
LARGEST_SINGULAR = 1.25
BY_MUON = re.compile(r"(layers|tail)\.\d+\.(.+\.)?weight")  # if it is a matrix


class TensorForm(NamedTuple):
    name: str
    shape: tuple[int, ...]


class LeaseSchedule(Protocol):
    """What of a lease gives its steps' learning rates."""

    @property
    def block(self) -> int: ...
    @property
    def schedule_start(self) -> int: ...
    @property
    def schedule_stride(self) -> int: ...
    @property
    def steps(self) -> int: ...


@dataclass(frozen=True)
class Move:
    """How far an update moves a block's tensors. `rates`: the sum of its steps' learning rates.
    `room`: how much larger it may be than others because its codec sends more numbers."""

    rates: float
    sizes: Sizes
    room: float = 1.0

    def scaled(self, factors: Doubles) -> "Move":
        return Move(self.rates, Sizes(*(factors * sizes for sizes in self.sizes)), self.room)

    def to_json(self) -> str:
        rms, largest = ([float(f"{size:.5g}") for size in sizes] for sizes in self.sizes)
        return json.dumps([self.rates, self.room, rms, largest], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Move":
        rates, room, rms, largest = json.loads(text)
        return cls(rates, Sizes(np.array(rms), np.array(largest)), room)


def balanced(moves: Sequence[tuple[str, Move]]) -> list[Move]:
    """Moves with their workers, newest first, of which no worker has more than all others together:
    otherwise one that hardly moves a block would define what is usual, and honest updates would be
    refused. One worker alone counts in full."""
    counts = Counter(worker for worker, _ in moves)
    [(most, count)] = counts.most_common(1) or [("", 0)]
    left = len(moves) - count or count
    kept = []
    for worker, move in moves:
        if worker == most:
            if not left:
                continue
            left -= 1
        kept.append(move)
    return kept


class Bounds:
    """The limits for updates of one block. `form`: its tensors, in order."""

    def __init__(self, config: Config, form: Sequence[TensorForm]) -> None:
        self._train, self._names = config.train, [each.name for each in form]
        codec = REGISTRY.get(config.swarm.codec)
        self._left_out = codec.left_out if codec else 0.0
        self._reach = optimizer_reach(config.train, form)
        self._residual = self._largest_residual(config.swarm.most_steps * config.train.lr)
        counts = [max(1, math.prod(each.shape)) for each in form]
        self._variation = 1 + VARIATION / np.sqrt(counts)

    def fault(self, move: Move, history: Sequence[Move], base: Sizes | None = None) -> str:
        """Why an update is refused; empty if it is not. `base`: the sizes of the weights that it
        starts from. Without them the limits are a little lower, because decay and rounding grow
        with the weights."""
        fault = self._excess(move.sizes, self.limit(move.rates, base), "its steps can move it")
        if fault or len(history) < LEAST_HISTORY:
            return fault
        limit = _each(lambda usual: REFUSED_ABOVE * usual, self._usual(move, history))
        if base:
            limit = _each(lambda most, size: most + ROUNDING * size, limit, base)
        return self._excess(move.sizes, limit, "by the block's last updates it may move")

    def clip_factors(self, move: Move, others: Sequence[Move]) -> Doubles | None:
        """By how much to scale each tensor of an update so that it is not much larger than others;
        None: it counts as it is."""
        limit = _each(lambda usual: CLIPPED_ABOVE * usual, self._usual(move, others))
        factors = _each(lambda most, size: most / np.maximum(most, size), limit, move.sizes)
        smallest: Doubles = np.minimum(*factors)
        return smallest if (smallest < 1).any() else None

    def limit(self, rates: float, base: Sizes | None = None) -> Sizes:
        """The most that training can move each tensor. With a codec, an update may also contain
        what earlier ones left out."""
        decay = rates * self._train.weight_decay
        limit = _each(
            lambda reach, residual: (1 + decay) * rates * reach + residual,
            self._reach,
            self._residual,
        )
        if base is None:
            return limit
        return _each(lambda most, size: most + (decay + ROUNDING) * size, limit, base)

    def _largest_residual(self, rates: float) -> Sizes:
        """The most that an update with these learning rates leaves out."""
        if self._left_out == 1.0:
            return _each(lambda reach: LEFT_OUT_LEASES * rates * reach, self._reach)
        # Numbers are rounded relative to the largest one near them, perhaps in another tensor; and
        # the next update is rounded too.
        rounding = 2 * self._left_out * rates * self._reach.largest.max(initial=0.0)
        return _each(lambda reach: np.full_like(reach, rounding), self._reach)

    def _usual(self, like: Move, others: Sequence[Move]) -> Sizes:
        """The median of other updates, each as large as it would be with the same learning rates.

        Twice the learning rate, or twice the steps, moves weights at most twice as far, and at
        least sqrt(2) times, if the steps are a random walk. The larger estimate counts. What a
        codec has left out does not depend on the steps at all.
        """
        ratios = np.array([like.rates / move.rates if move.rates else 1.0 for move in others])
        fewer = np.ones_like(ratios) if self._left_out == 1.0 else np.sqrt(ratios)
        growth = np.where(ratios >= 1, ratios, fewer)
        rooms = np.array([like.room / move.room for move in others])
        rms = np.array([move.sizes.rms for move in others]) * (growth * rooms)[:, None]
        largest = np.array([move.sizes.largest for move in others]) * growth[:, None]
        medians = Sizes(np.median(rms, axis=0), np.median(largest, axis=0))
        least = LEAST_SHARE * like.rates
        return _each(
            lambda median, reach: np.maximum(median, least * reach) * self._variation,
            medians,
            self._reach,
        )

    def _excess(self, sizes: Sizes, limits: Sizes, reason: str) -> str:
        """A description of the first tensor above its limit; empty if none is."""
        for kind, size, limit in zip(("rms", "largest number"), sizes, limits, strict=True):
            for index in np.flatnonzero(~(size <= limit)):
                return (
                    f"the update moves tensor {self._names[index]!r} by {size[index]:.3g} ({kind}),"
                    f" but {reason} by {limit[index]:.3g} at most; train from the base version of"
                    " the lease"
                )
        return ""


def compared_with(history: Sequence[Move], merged: Sequence[Move]) -> Sequence[Move]:
    """The updates that define what is usual for those that are `merged` together: the block's last
    ones, or themselves while there are few of those. None if there are few of both. An update that
    is merged alone is not scaled down, so one worker's block stays what it trains."""
    if len(merged) < 2:
        return ()
    if len(history) >= LEAST_HISTORY:
        return history
    return merged if len(merged) >= LEAST_REPLICAS else ()


def optimizer_reach(train: TrainConfig, form: Sequence[TensorForm]) -> Sizes:
    """The most that one step with learning rate 1 moves each tensor, without weight decay."""
    adam = _largest_adam_step(train)
    rms, largest = np.full(len(form), adam), np.full(len(form), adam)
    for index, (name, shape) in enumerate(form):
        if train.optimizer == "muon" and len(shape) == 2 and BY_MUON.fullmatch(name):
            rms[index] = MUON_SIZE * LARGEST_SINGULAR
            largest[index] = rms[index] * math.sqrt(max(shape))
    return Sizes(rms, largest)


def lease_rates(config: Config, lease: LeaseSchedule) -> float:
    """The sum of a lease's learning rates."""
    positions = (lease.schedule_start + i * lease.schedule_stride for i in range(lease.steps))
    return math.fsum(config.learning_rate(lease.block, position) for position in positions)


def _largest_adam_step(train: TrainConfig) -> float:
    """The most by which a step of AdamW can move a number, in learning rates, for any gradients
    (Cauchy-Schwarz on its two moments); 1.2 with default settings."""
    ratio = min(train.beta1**2 / max(train.beta2, 1e-12), 1.0 - 1e-12)
    return max(1.0, (1.0 - train.beta1) / math.sqrt((1.0 - train.beta2) * (1.0 - ratio)))


def _each(function: Callable[..., Doubles], *sizes: Sizes) -> Sizes:
    """Apply a function to the root mean squares, and to the largest numbers."""
    return Sizes(*map(function, *sizes))
