"""The noise mathematics of denoising blocks: partition, EDM preconditioning, Euler step.

Knows no tensors library: the partition is plain floats, the EDM coefficients come from plain
floats, and the Euler step is arithmetic that any array type understands. Who owns which sigma
is written down here and nowhere else: `Partition.train_range` and `Partition.block_of`.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple, TypeVar

STANDARD_NORMAL = NormalDist()


@dataclass(frozen=True)
class LogNormal:
    """The distribution sigma is drawn from: ln(sigma) ~ Normal(mean, std)."""

    mean: float = -1.2
    std: float = 1.2

    def cdf(self, sigma: float) -> float:
        return STANDARD_NORMAL.cdf((math.log(sigma) - self.mean) / self.std)

    def quantile(self, probability: float) -> float:
        return math.exp(self.mean + self.std * STANDARD_NORMAL.inv_cdf(probability))


@dataclass(frozen=True)
class Partition:
    """The range of sigma cut into one interval per block.

    `bounds` ascend from sigma_min to sigma_max. Block 0 runs first at inference and owns the
    HIGHEST interval; the last block owns the lowest.
    """

    bounds: tuple[float, ...]
    overlap: float = 0.0
    prior: LogNormal = LogNormal()

    @property
    def blocks(self) -> int:
        return len(self.bounds) - 1

    @property
    def sigma_min(self) -> float:
        return self.bounds[0]

    @property
    def sigma_max(self) -> float:
        return self.bounds[-1]

    def owned_range(self, block: int) -> tuple[float, float]:
        top = self.blocks - block
        return self.bounds[top - 1], self.bounds[top]

    def train_range(self, block: int) -> tuple[float, float]:
        """The owned interval, widened on each side by `overlap` of its log-width, clamped."""
        low, high = self.owned_range(block)
        widening = (high / low) ** self.overlap
        return max(low / widening, self.sigma_min), min(high * widening, self.sigma_max)

    def block_of(self, sigma: float) -> int:
        """The block that owns sigma; an inner bound belongs to the block below it."""
        if not self.sigma_min <= sigma <= self.sigma_max:
            raise ValueError(f"sigma {sigma} is outside [{self.sigma_min}, {self.sigma_max}]")
        return self.blocks - max(bisect_left(self.bounds, sigma), 1)

    def sample(self, block: int, uniforms: Sequence[float]) -> list[float]:
        """Map uniforms in [0, 1) to sigmas of the block's training range."""
        low, high = self.train_range(block)
        q_low, q_high = self.prior.cdf(low), self.prior.cdf(high)
        draws = (self.prior.quantile(q_low + u * (q_high - q_low)) for u in uniforms)
        return [min(max(sigma, low), high) for sigma in draws]

    def inference_sigmas(self) -> list[tuple[float, float]]:
        """For each block in order: the sigma it is asked at and the sigma it steps down to."""
        descending = self.bounds[::-1]
        return list(itertools.pairwise(descending))


def lognormal_partition(
    blocks: int,
    sigma_min: float,
    sigma_max: float,
    overlap: float = 0.0,
    prior: LogNormal | None = None,
) -> Partition:
    """Cut [sigma_min, sigma_max] into intervals of equal probability under the prior."""
    prior = prior or LogNormal()
    q_min, q_max = prior.cdf(sigma_min), prior.cdf(sigma_max)
    inner = [prior.quantile(q_min + j / blocks * (q_max - q_min)) for j in range(1, blocks)]
    return Partition((sigma_min, *inner, sigma_max), overlap, prior)


def fitted_partition(
    blocks: int,
    sigmas: Sequence[float],
    losses: Sequence[float],
    overlap: float = 0.0,
    prior: LogNormal | None = None,
) -> Partition:
    """Cut so that each block answers for an equal share of the measured change in loss.

    The loss as a function of sigma rises from the leak at the bottom to the plain language
    model's at the top; where it changes fast, sigma matters and intervals become narrow. Half
    of the mass stays uniform in ln(sigma), so that a flat stretch never collapses an interval.
    """
    logs = [math.log(s) for s in sigmas]
    rises = [abs(b - a) for a, b in itertools.pairwise(losses)]
    widths = [b - a for a, b in itertools.pairwise(logs)]
    total_rise = sum(rises) or 1.0
    total_width = logs[-1] - logs[0]
    shares = [
        0.5 * rise / total_rise + 0.5 * width / total_width
        for rise, width in zip(rises, widths, strict=True)
    ]
    mass = [0.0]
    for share in shares:
        mass.append(mass[-1] + share)
    inner = [_interpolate(mass[-1] * j / blocks, mass, logs) for j in range(1, blocks)]
    bounds = (sigmas[0], *(math.exp(x) for x in inner), sigmas[-1])
    return Partition(bounds, overlap, prior or LogNormal())


def _interpolate(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    right = min(max(bisect_left(xs, x), 1), len(xs) - 1)
    x0, x1 = xs[right - 1], xs[right]
    share = (x - x0) / (x1 - x0) if x1 > x0 else 0.0
    return ys[right - 1] + share * (ys[right] - ys[right - 1])


class Preconditioning(NamedTuple):
    """EDM coefficients at one sigma."""

    c_skip: float
    c_out: float
    c_in: float
    c_noise: float
    weight: float
    sigma: float


def precondition(sigma: float, sigma_data: float) -> Preconditioning:
    total = sigma**2 + sigma_data**2
    return Preconditioning(
        c_skip=sigma_data**2 / total,
        c_out=sigma * sigma_data / math.sqrt(total),
        c_in=1.0 / math.sqrt(total),
        c_noise=math.log(sigma) / 4.0,
        weight=total / (sigma * sigma_data) ** 2,
        sigma=sigma,
    )


def mean_weight(partition: Partition, block: int, sigma_data: float, points: int = 256) -> float:
    """The mean of the loss weight over the block's training range, to normalise it to 1."""
    middles = [(i + 0.5) / points for i in range(points)]
    sigmas = partition.sample(block, middles)
    return sum(precondition(s, sigma_data).weight for s in sigmas) / points


A = TypeVar("A")


def euler_step(z: A, guess: A, sigma: float, sigma_next: float) -> A:
    """One step down the probability-flow ODE: z + (s' - s) (z - g) / s."""
    return z + ((sigma_next - sigma) / sigma) * (z - guess)  # type: ignore[operator, no-any-return]
