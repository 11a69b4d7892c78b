"""The noise mathematics of denoising blocks: partition, EDM preconditioning, Euler step.

Works on plain floats; the Euler step takes arrays and tensors too. Only `Partition.train_range` and
`Partition.block_of` decide which block owns which sigma.
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
    """The distribution that sigma is drawn from: ln(sigma) ~ Normal(mean, std)."""

    mean: float = -1.2
    std: float = 1.2

    def cdf(self, sigma: float) -> float:
        return STANDARD_NORMAL.cdf((math.log(sigma) - self.mean) / self.std)

    def quantile(self, probability: float) -> float:
        return math.exp(self.mean + self.std * STANDARD_NORMAL.inv_cdf(probability))


EDM_PRIOR = LogNormal()


@dataclass(frozen=True)
class Partition:
    """The range of sigma, cut into one interval per block.

    `bounds` ascend from sigma_min to sigma_max. Block 0 runs first at inference and owns the
    HIGHEST interval; the last block owns the lowest.
    """

    bounds: tuple[float, ...]
    overlap: float = 0.0
    prior: LogNormal = EDM_PRIOR

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
        """The owned interval, widened on each side by `overlap` of its log-width, within bounds."""
        low, high = self.owned_range(block)
        widening = (high / low) ** self.overlap
        return max(low / widening, self.sigma_min), min(high * widening, self.sigma_max)

    def block_of(self, sigma: float) -> int:
        """The block that owns sigma; an inner bound belongs to the interval below it."""
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
        """For each block in order: sigma of the z that it reads, and of the z that it returns."""
        return list(itertools.pairwise(self.bounds[::-1]))


def lognormal_partition(
    blocks: int,
    sigma_min: float,
    sigma_max: float,
    overlap: float = 0.0,
    prior: LogNormal = EDM_PRIOR,
) -> Partition:
    """Cut [sigma_min, sigma_max] into intervals of equal probability under the prior."""
    q_min, q_max = prior.cdf(sigma_min), prior.cdf(sigma_max)
    inner = [prior.quantile(q_min + j / blocks * (q_max - q_min)) for j in range(1, blocks)]
    return Partition((sigma_min, *inner, sigma_max), overlap, prior)


def fitted_partition(
    blocks: int,
    sigmas: Sequence[float],
    losses: Sequence[float],
    overlap: float = 0.0,
    prior: LogNormal = EDM_PRIOR,
) -> Partition:
    """Cut so that each block gets an equal share of the measured change in loss.

    At low sigma z gives the answer away and the loss is small; at high sigma the loss is a plain
    language model's. Intervals are narrow where the loss changes fast. Half of the mass is uniform
    in ln(sigma), so that the cuts are well defined where the loss is flat.
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
    mass = list(itertools.accumulate(shares, initial=0.0))
    inner = [_interpolate(mass[-1] * j / blocks, mass, logs) for j in range(1, blocks)]
    bounds = (sigmas[0], *(math.exp(x) for x in inner), sigmas[-1])
    return Partition(bounds, overlap, prior)


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
    """The mean loss weight over the block's training range; losses are divided by it."""
    middles = [(i + 0.5) / points for i in range(points)]
    sigmas = partition.sample(block, middles)
    return sum(precondition(s, sigma_data).weight for s in sigmas) / points


A = TypeVar("A")


def euler_step(z: A, guess: A, sigma: float, sigma_next: float) -> A:
    """One step down the probability-flow ODE, from sigma s to s' towards the guess g: z + (s' - s)
    (z - g) / s."""
    return z + ((sigma_next - sigma) / sigma) * (z - guess)  # type: ignore[operator, no-any-return]
