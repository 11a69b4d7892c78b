"""Whether a block's loss on hidden text has jumped, and to which version to roll it back.

Validators measure the loss of the version that they compare an update with. Every version is
measured on other windows, so losses scatter. Pure decisions: no clock, no files.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import median, median_low
from typing import NamedTuple

from blocktrain.swarm.checks import MAD_TO_SIGMA

FEWEST = 8  # measured versions before a jump can be told from scatter
JUMP = 4.0  # deviations above the moving average
LEAST_SPREAD = 0.005  # lower bound of a deviation, as a share of the loss
WEIGHT = 0.3  # of the newest version in the moving average
CONFIRMING = 2  # validators that must have seen the jump, if there are as many
PAUSE_SECONDS = 1800.0  # until the same block may be rolled back again, so that no loop is possible


class Opinion(NamedTuple):
    """A validator's measurement of a version's loss."""

    version: int
    validator: str
    loss: float


class Jump(NamedTuple):
    """`good`: the newest version before the jump. `loss`: after it; `usual`: what was usual."""

    good: int
    loss: float
    usual: float


def find_jump(opinions: Sequence[Opinion]) -> Jump | None:
    """The jump that the newest measured version has not recovered from; None if there is none, or
    not enough validators have seen it. A single dishonest validator can neither make nor hide one
    if there are three."""
    by_version: dict[int, list[Opinion]] = defaultdict(list)
    for opinion in opinions:
        by_version[opinion.version].append(opinion)
    usual, deviations, good, witnesses, loss = math.nan, [0.0], None, set[str](), math.nan
    for version in sorted(by_version):
        loss = median_low(opinion.loss for opinion in by_version[version])
        limit = usual + JUMP * _spread(deviations, usual)
        if len(deviations) > FEWEST and not loss <= limit:
            witnesses |= {each.validator for each in by_version[version] if not each.loss <= limit}
            continue
        if not math.isfinite(loss):
            continue
        if good is not None:
            deviations.append(loss - usual)
        usual = loss if good is None else (1 - WEIGHT) * usual + WEIGHT * loss
        good, witnesses = version, set()
    needed = min(CONFIRMING, len({opinion.validator for opinion in opinions}))
    if good is None or not witnesses or len(witnesses) < needed:
        return None
    return Jump(good, loss, usual)


def _spread(deviations: Sequence[float], loss: float) -> float:
    """The usual scatter around the moving average."""
    middle = median(deviations)
    scatter = MAD_TO_SIGMA * median(abs(each - middle) for each in deviations)
    return max(scatter, LEAST_SPREAD * loss)
