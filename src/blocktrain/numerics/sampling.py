"""Picks a token from a distribution with noise fixed by (seed, position in the text), at a cost
that does not grow with the vocabulary.

Sampling is the Gumbel trick. A token picked from a draft's distribution and one picked from the
model's use the same noise: where the distributions agree, so do the picks. Top-k, top-p and min-p
leave tokens out before the noise is added. In a large vocabulary only the likeliest tokens have
noise of their own, and all others compete as one. That is exact: the largest of several Gumbel
variables is itself a Gumbel variable, located at the logarithm of the sum.

Shapes: C tokens that are ranked.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from blocktrain.numerics import Array, Doubles

CHOICE_STREAM = 2
CANDIDATES = 256  # tokens with noise of their own
NOTHING = -np.inf  # the logarithm of no probability


@dataclass(frozen=True)
class Sampling:
    """How a token is picked from a distribution; randomness is fixed by (seed, position)."""

    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0  # leave out tokens below this share of the likeliest one's probability
    presence_penalty: float = 0.0  # for tokens that the answer has already
    frequency_penalty: float = 0.0  # the same, for every time
    bias: Mapping[int, float] = field(default_factory=dict)  # added to log-probabilities

    @property
    def penalizes(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty)


@dataclass(frozen=True)
class Ranking:
    """The likeliest tokens of a distribution, likeliest first. `others`: the logsumexp of
    log-probability / temperature over all tokens that are not ranked."""

    tokens_C: Array
    log_probs_C: Array
    vocabulary: int
    others: float = NOTHING


def pick(
    likeliest: Ranking, whole: Callable[[], Ranking], sampling: Sampling, position: int
) -> int:
    """The token for a position in a text. The ranking of all tokens, `whole`, is seldom needed."""
    token = _pick(likeliest, sampling, position)
    if token is None:
        token = _pick(whole(), sampling, position)
        assert token is not None
    return token


def _pick(ranking: Ranking, sampling: Sampling, position: int) -> int | None:
    """The token for a position; None if that depends on tokens that are not ranked."""
    tokens_C = ranking.tokens_C
    scaled_C = ranking.log_probs_C.astype(np.float64) / sampling.temperature
    if not np.isfinite(scaled_C[0]):
        return int(tokens_C[0])  # no distribution: the caller reports it
    remaining = truncate(scaled_C, sampling, ranking.others)
    if remaining is None:
        return None
    count, unranked = remaining
    own, shared = scaled_C[:CANDIDATES][:count], scaled_C[CANDIDATES:count]
    noisy = own + noise(sampling.seed, position, tokens_C[: len(own)], ranking.vocabulary)
    best = int(noisy.argmax())
    others = np.logaddexp(unranked, np.logaddexp.reduce(shared, initial=NOTHING))
    if others == NOTHING:
        return int(tokens_C[best])
    draw, place = _uniform(sampling.seed, position, np.array([-1, -2]))
    if others - np.log(-np.log(draw)) < noisy[best]:
        return int(tokens_C[best])
    if unranked > NOTHING:
        return None
    sums = np.cumsum(np.exp(shared - shared[0]))
    return int(tokens_C[CANDIDATES + np.searchsorted(sums, place * sums[-1])])


def truncate(
    scaled_C: Doubles, sampling: Sampling, others: float = NOTHING
) -> tuple[int, float] | None:
    """Apply top-k, top-p and min-p. Returns how many ranked tokens stay, and the weight (a
    logarithm) of the unranked tokens that stay; None if that depends on single unranked tokens.
    Equally likely tokens stay or go together."""
    count = len(scaled_C)
    if sampling.top_k and others > NOTHING:
        if sampling.top_k > count:
            return None
        others = NOTHING
    if 0 < sampling.top_k < count:
        count = int(np.count_nonzero(scaled_C >= scaled_C[sampling.top_k - 1]))
    if sampling.top_p < 1.0:
        shares = np.exp(scaled_C[:count] - scaled_C[0])
        total = shares.sum() + np.exp(others - scaled_C[0])
        likelier = np.cumsum(shares) - shares  # the sum of those before each
        last = np.flatnonzero(likelier <= sampling.top_p * total)[-1]
        if last == len(scaled_C) - 1 and others > NOTHING:
            return None
        count, others = int(np.count_nonzero(scaled_C[:count] >= scaled_C[last])), NOTHING
    if sampling.min_p > 0.0:
        least = scaled_C[0] + np.log(sampling.min_p)
        count = int(np.count_nonzero(scaled_C[:count] >= least))
        if count == len(scaled_C) and others > NOTHING:
            return None
        others = NOTHING
    return count, others


def adjustments(sampling: Sampling, counts_V: Array) -> Doubles:
    """What to add to the log-probabilities of a position, given how often each token is in the
    answer before it."""
    sum_V = -sampling.frequency_penalty * counts_V - sampling.presence_penalty * (counts_V > 0)
    biased = [token for token in sampling.bias if token < len(sum_V)]
    sum_V[biased] += [sampling.bias[token] for token in biased]
    return sum_V


def noise(seed: int, position: int, tokens_C: Array, vocabulary: int) -> Doubles:
    """The Gumbel noise of some tokens at one position in a text."""
    if vocabulary > CANDIDATES:
        return -np.log(-np.log(_uniform(seed, position, tokens_C)))
    draws = np.random.Generator(np.random.Philox(mixed_seed(seed, position, CHOICE_STREAM)))
    return draws.gumbel(size=vocabulary)[tokens_C]


def _uniform(seed: int, position: int, numbers_C: Array) -> Doubles:
    """A draw between 0 and 1 for each number: SplitMix64's output at that place."""
    start = np.uint64(mixed_seed(seed, position, CHOICE_STREAM))
    bits = start + numbers_C.astype(np.int64).view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def log_softmax(logits_RV: np.ndarray) -> np.ndarray:
    shifted = logits_RV - logits_RV.max(axis=-1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def mixed_seed(*parts: int) -> int:
    """One 63-bit seed out of several numbers; different numbers give unrelated seeds."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1
