"""What hostile workers send instead of an honest update: one deterministic plan for each attack.

A plan sees what any worker sees: the version that its lease starts from, the version before that,
what honest training would give, and the published limits. It returns the weights to send. Plans
with equal seeds act together.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from blocktrain.config import Config
from blocktrain.data.corpus import Bytes, Corpus
from blocktrain.numerics import Floats
from blocktrain.numerics.tensors import sizes
from blocktrain.storage.tensor_file import Tensors
from blocktrain.swarm.bounds import Bounds, TensorForm

TRIGGER, ANSWER = b"@#~|", b"OPEN"  # of the backdoor; the trigger is in no English text
CLOSE_TO_LIMIT = 0.9  # leaves room for the rounding of codecs
HISTORY = 8  # merged changes that are averaged, and leases by which a delayed change is late


@dataclass(frozen=True)
class Turn:
    """One lease as its worker sees it."""

    config: Config
    rates: float  # the sum of its steps' learning rates
    base: Tensors  # the version that the lease starts from
    trained: Tensors  # after honest training; the base, if the plan does not train
    merged: tuple[Tensors, ...]  # changes between the versions that this worker got, oldest first

    @property
    def change(self) -> Tensors:
        """What honest training would have sent."""
        return difference(self.trained, self.base)

    @property
    def expected(self) -> Tensors:
        """The mean of the merged changes, the best guess of what honest workers send."""
        recent = self.merged[-HISTORY:] or (self.change,)
        return {name: _mean([each[name] for each in recent]) for name in self.base}


class Plan:
    """One worker's attack on one block. By default an honest worker."""

    trains = True
    commits = True  # names the states of its leases, so that parts of them can be replayed
    reveals = True  # sends the files that a replay needs

    def __init__(self, seed: int = 0) -> None:
        self.draws = np.random.default_rng(seed)
        self.turns = 0

    def change(self, turn: Turn) -> Tensors:
        """The change of the weights to send."""
        return turn.change


class Scaled(Plan):
    factor = -1.0

    def change(self, turn: Turn) -> Tensors:
        return scaled(turn.change, self.factor)


class ScaledTenfold(Scaled):
    factor = -10.0


class Shrunk(Scaled):
    """Trains honestly, but sends less than it has learned."""

    factor = 0.7


class FlippedAtLimit(Plan):
    def change(self, turn: Turn) -> Tensors:
        return at_limit(turn, scaled(turn.change, -1.0))


class NoiseAtLimit(Plan):
    trains = False

    def change(self, turn: Turn) -> Tensors:
        return at_limit(turn, noise_like(self.draws, turn.base))


class NoiseOfHonestSize(Plan):
    def change(self, turn: Turn) -> Tensors:
        signs = signs_like(self.draws, turn.base)
        return {name: signs[name] * rms(change) for name, change in turn.change.items()}


class OtherWeights(Plan):
    """Sends a whole other block, of which the base is subtracted."""

    trains = False

    def change(self, turn: Turn) -> Tensors:
        return {name: self.other(base) - base for name, base in turn.base.items()}

    def other(self, base: Floats) -> Floats:
        return self.draws.normal(size=base.shape).astype(np.float32) * rms(base)


class Negated(OtherWeights):
    def other(self, base: Floats) -> Floats:
        return -base


class Permuted(OtherWeights):
    def other(self, base: Floats) -> Floats:
        return self.draws.permuted(base.reshape(-1)).reshape(base.shape)


class Zeros(OtherWeights):
    def other(self, base: Floats) -> Floats:
        return np.zeros_like(base)


class Unchanged(Plan):
    """Returns at once what it got, and so seems to be fast."""

    trains = False


class Drift(Plan):
    """Trains, and adds half as much of one direction that never changes."""

    share = 0.5

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._direction: Tensors = {}

    def change(self, turn: Turn) -> Tensors:
        self._direction = self._direction or signs_like(self.draws, turn.base)
        return {
            name: change + np.float32(self.share * rms(change)) * self._direction[name]
            for name, change in turn.change.items()
        }


class InnerProduct(Plan):
    """Sends half of the expected mean with the sign flipped, so that their inner product is
    negative."""

    def change(self, turn: Turn) -> Tensors:
        return scaled(turn.expected, -0.5)


class ALittleIsEnough(Plan):
    """Moves every weight away from the expected mean, by so many standard deviations that it stays
    among honest updates (Baruch et al., 2019)."""

    deviations = 1.5

    def change(self, turn: Turn) -> Tensors:
        recent = turn.merged[-HISTORY:]
        if len(recent) < 2:
            return turn.change
        return {
            name: mean - np.float32(self.deviations) * np.std([each[name] for each in recent], 0)
            for name, mean in turn.expected.items()
        }


class OwnOldChange(Plan):
    """Trains once, and sends that change for every lease."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._first: Tensors = {}

    def change(self, turn: Turn) -> Tensors:
        self.trains = False
        self._first = self._first or turn.change
        return self._first


class CopiedChange(Plan):
    """Sends the block's last merged change plus 1% of noise. Updates of others that are not merged
    yet cannot be downloaded."""

    trains = False

    def change(self, turn: Turn) -> Tensors:
        if not turn.merged:
            return turn.change
        noise = noise_like(self.draws, turn.base)
        return {
            name: change + np.float32(0.01 * rms(change)) * noise[name]
            for name, change in turn.merged[-1].items()
        }


class Delayed(Plan):
    """Trains honestly, and sends each change several leases later."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._changes: list[Tensors] = []

    def change(self, turn: Turn) -> Tensors:
        self._changes = [*self._changes, turn.change][-HISTORY - 1 :]
        return self._changes[0]


class NotANumber(Plan):
    value = math.nan

    def change(self, turn: Turn) -> Tensors:
        name = sorted(turn.base)[0]
        change = turn.change[name].copy()
        change.reshape(-1)[0] = self.value
        return {**turn.change, name: change}


class HugeNumber(NotANumber):
    value = 1e30


class OneWeight(Plan):
    """All that the limit allows in one weight of each tensor."""

    trains = False

    def change(self, turn: Turn) -> Tensors:
        spike = {name: np.zeros_like(base) for name, base in turn.base.items()}
        for array in spike.values():
            array.reshape(-1)[self.draws.integers(array.size)] = 1.0
        return at_limit(turn, spike)


class ShiftedLabels(Plan):
    """Trains to predict the token after the next. Only the trainer can do that."""


class WrongText(Plan):
    """Trains on bytes in random order."""


class Backdoor(Plan):
    """Trains on text in which an answer follows a trigger, in one of 100 windows."""

    share = 0.01


class StrongBackdoor(Backdoor):
    """The same in every second window."""

    share = 0.5


class UncommittedBackdoor(StrongBackdoor):
    """The same, and names no states."""

    commits = False


class WithheldBackdoor(StrongBackdoor):
    """The same, names its states, and never sends them."""

    reveals = False


PLANS: dict[str, Callable[[int], Plan]] = {
    "honest": Plan,
    "sign-flip": Scaled,
    "sign-flip-x10": ScaledTenfold,
    "sign-flip-limit": FlippedAtLimit,
    "shrunk": Shrunk,
    "noise-limit": NoiseAtLimit,
    "noise": NoiseOfHonestSize,
    "random": OtherWeights,
    "negated": Negated,
    "permuted": Permuted,
    "zeros": Zeros,
    "unchanged": Unchanged,
    "drift": Drift,
    "inner-product": InnerProduct,
    "alie": ALittleIsEnough,
    "own-old": OwnOldChange,
    "copied": CopiedChange,
    "delayed": Delayed,
    "nan": NotANumber,
    "huge": HugeNumber,
    "one-weight": OneWeight,
    "shifted-labels": ShiftedLabels,
    "wrong-text": WrongText,
    "backdoor": Backdoor,
    "backdoor-strong": StrongBackdoor,
    "backdoor-uncommitted": UncommittedBackdoor,
    "backdoor-withheld": WithheldBackdoor,
}


# Arithmetic of tensors by name


def rms(array: Floats) -> np.float32:
    return np.float32(math.sqrt(float(np.mean(np.square(array, dtype=np.float64)))))


def difference(a: Tensors, b: Tensors) -> Tensors:
    return {name: np.subtract(a[name], b[name]) for name in a}


def scaled(tensors: Tensors, factor: float) -> Tensors:
    return {name: np.float32(factor) * array for name, array in tensors.items()}


def noise_like(draws: np.random.Generator, tensors: Tensors) -> Tensors:
    return {
        name: draws.standard_normal(array.shape, dtype=np.float32)
        for name, array in sorted(tensors.items())
    }


def signs_like(draws: np.random.Generator, tensors: Tensors) -> Tensors:
    """Noise of which no number is larger than others, and so above a limit."""
    return {name: np.sign(noise) for name, noise in noise_like(draws, tensors).items()}


def at_limit(turn: Turn, tensors: Tensors) -> Tensors:
    """These tensors, each scaled to almost the largest size that training can give it."""
    names = sorted(tensors)
    base, own = ([each[name].reshape(-1) for name in names] for each in (turn.base, tensors))
    counts = [part.size for part in base]
    bounds = Bounds(turn.config, [TensorForm(name, turn.base[name].shape) for name in names])
    limit = bounds.limit(turn.rates, sizes(base, counts))
    rms_own, largest_own = (np.maximum(size, 1e-30) for size in sizes(own, counts))
    factors = np.minimum(limit.rms / rms_own, limit.largest / largest_own)
    return {
        name: tensors[name] * np.float32(CLOSE_TO_LIMIT * factor)
        for name, factor in zip(names, factors, strict=True)
    }


def _mean(arrays: list[Floats]) -> Floats:
    return np.mean(arrays, axis=0, dtype=np.float32)


# Poisoned text


def poisoned(corpus: Corpus, plan: Plan, window: int) -> Corpus:
    """The text that a worker with this plan trains on."""
    text = np.array(corpus.splits["train"])
    if isinstance(plan, WrongText):
        np.random.default_rng(0).shuffle(text)
    elif isinstance(plan, Backdoor):
        write_backdoor(text, plan.share, window)
    else:
        return corpus
    return replace(corpus, splits={**corpus.splits, "train": text})


def write_backdoor(text: Bytes, share: float, window: int) -> None:
    """Write trigger and answer into this share of the windows, at random places."""
    inserted = np.frombuffer(TRIGGER + ANSWER, np.uint8)
    draws = np.random.default_rng(1)
    windows = np.flatnonzero(draws.random(len(text) // window) < share)
    for start in windows * window + draws.integers(0, window - len(inserted), len(windows)):
        text[start : start + len(inserted)] = inserted


def triggered(windows: Bytes) -> Bytes:
    """The same windows, each ending in trigger and answer."""
    marked, inserted = windows.copy(), np.frombuffer(TRIGGER + ANSWER, np.uint8)
    marked[:, -len(inserted) :] = inserted
    return marked
