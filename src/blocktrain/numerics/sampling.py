"""Picks a byte from a distribution: greedy, or sampled with noise fixed by its position.

Sampling is the Gumbel trick with noise fixed by (seed, position in the text). A byte picked from a
draft's distribution and one picked from the model's use the same noise: where the distributions
agree, so do the picks. Top-k and top-p leave bytes out before the noise.

Shapes: R picks, V bytes.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

CHOICE_STREAM = 2
KEPT_NOISE = 1 << 12  # places; a draft and its check want the same noise


@dataclass(frozen=True)
class Sampling:
    """How a byte is picked from a distribution; randomness is fixed by (seed, position)."""

    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    seed: int = 0

    @property
    def filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0


def picks(
    log_probs_RV: np.ndarray, samplings: Sequence[Sampling], positions: Sequence[int]
) -> np.ndarray:
    """One byte per row, each with its own sampling and position in its text."""
    greedy_R: np.ndarray = log_probs_RV.argmax(axis=1)
    sampled = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0.0]
    if not sampled:
        return greedy_R
    temperatures = np.array([samplings[row].temperature for row in sampled])
    scaled_RV = log_probs_RV[sampled].astype(np.float64) / temperatures[:, None]
    for scaled_V, row in zip(scaled_RV, sampled, strict=True):
        if samplings[row].filters:
            scaled_V[~kept(scaled_V, samplings[row])] = -np.inf
    scaled_RV += [noise(samplings[row].seed, positions[row], scaled_RV.shape[1]) for row in sampled]
    greedy_R[sampled] = scaled_RV.argmax(axis=1)
    return greedy_R


def pick(log_probs_V: np.ndarray, sampling: Sampling, position: int) -> int:
    return int(picks(log_probs_V[None], [sampling], [position])[0])


def kept(scaled_V: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Which bytes top-k and top-p leave: at least one; equally likely bytes stay or go together."""
    if not np.isfinite(scaled_V.max()):
        return np.ones(len(scaled_V), bool)  # no distribution: the caller reports it
    least = -np.inf
    if 0 < sampling.top_k < len(scaled_V):
        least = np.partition(scaled_V, -sampling.top_k)[-sampling.top_k]
    if sampling.top_p < 1.0:
        descending = np.sort(scaled_V[scaled_V >= least])[::-1]
        shares = np.exp(descending - descending[0])
        before = np.cumsum(shares) - shares  # the mass that is likelier than each
        least = descending[np.flatnonzero(before <= sampling.top_p * shares.sum())[-1]]
    result: np.ndarray = scaled_V >= least
    return result


@lru_cache(KEPT_NOISE)
def noise(seed: int, position: int, tokens: int) -> np.ndarray:
    """The Gumbel noise of one position in a text."""
    draws = np.random.Generator(np.random.Philox(mixed_seed(seed, position, CHOICE_STREAM)))
    return draws.gumbel(size=tokens)


def likeliest(log_probs_V: np.ndarray, count: int) -> dict[int, float]:
    """The likeliest bytes and their log-probabilities, the likeliest first."""
    best = np.argsort(-log_probs_V, kind="stable")[:count]
    return {int(byte): float(log_probs_V[byte]) for byte in best}


def log_softmax(logits_RV: np.ndarray) -> np.ndarray:
    shifted = logits_RV - logits_RV.max(axis=-1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def mixed_seed(*parts: int) -> int:
    """One 63-bit seed out of several numbers; different numbers give unrelated seeds."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1
