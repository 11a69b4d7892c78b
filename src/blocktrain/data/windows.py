"""Windows of an array of tokens: batch number i is a pure function of (seed, i).

Training visits every window of an epoch once, in an order no machine has to remember: a keyed
permutation computes which window comes n-th. Each epoch has its own order and its own offset.
Evaluation takes non-overlapping windows from the start of a split.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from blocktrain.data.corpus import Bytes
from blocktrain.numerics.sampling import mixed_seed
from blocktrain.vocabulary import BYTE_VOCABULARY, Vocabulary

Ids = npt.NDArray[np.signedinteger]
Indices = npt.NDArray[np.uint64]

FEISTEL_ROUNDS = 4


@dataclass(frozen=True)
class TrainingWindows:
    data: Bytes
    window: int
    batch: int
    seed: int

    @property
    def per_epoch(self) -> int:
        # One window is given up so that every epoch can start at another offset.
        return max(1, len(self.data) // self.window - 1)

    def __getitem__(self, index: int) -> Bytes:
        """Batch number `index`, shaped batch x window."""
        ranks = np.arange(index * self.batch, (index + 1) * self.batch)
        epochs = ranks // self.per_epoch
        out = np.empty((self.batch, self.window), self.data.dtype)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            starts = self._starts(int(epoch), ranks[rows] % self.per_epoch)
            out[rows] = self.data[starts[:, None] + np.arange(self.window)]
        return out

    def _starts(self, epoch: int, ranks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        key = mixed_seed(self.seed, epoch)
        spare = len(self.data) - self.per_epoch * self.window
        offset = key % (min(spare, self.window) + 1)
        order = permute(ranks.astype(np.uint64), self.per_epoch, key)
        return order.astype(np.int64) * self.window + offset


def permute(ranks: Indices, count: int, key: int) -> Indices:
    """A keyed permutation of 0..count-1, evaluated at `ranks` without building it.

    A Feistel network permutes the next even power of two; results that fall outside are sent
    through again until they land inside (cycle walking), which keeps it a permutation.
    """
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    state = np.random.SeedSequence(key).generate_state(FEISTEL_ROUNDS, np.uint64)
    keys = state.astype(np.uint64)
    result = ranks.copy()
    outside = np.ones(len(ranks), bool)
    while outside.any():
        result[outside] = _feistel(result[outside], half, keys)
        outside = result >= count
    return result


def _feistel(values: Indices, half: np.uint64, keys: Indices) -> Indices:
    low_bits = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & low_bits
    for key in keys:
        left, right = right, left ^ (_scramble(right ^ key) & low_bits)
    return (left << half) | right


def _scramble(x: Indices) -> Indices:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def evaluation_windows(data: Bytes, window: int, most: int | None = None) -> Bytes:
    """Non-overlapping windows from the start, shaped count x window; a short tail is left out."""
    count = len(data) // window
    if most is not None:
        count = min(count, most)
    return np.asarray(data[: count * window]).reshape(count, window)


def shifted(targets: Bytes, vocabulary: Vocabulary = BYTE_VOCABULARY) -> Ids:
    """The context that predicts each token: BOS, then the tokens before it."""
    context = np.empty(targets.shape, vocabulary.id_dtype)
    context[:, 0] = vocabulary.bos
    context[:, 1:] = targets[:, :-1]
    return context
