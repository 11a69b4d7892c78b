"""Removing merged updates again: when an automatic rollback does, and what is kept for it.

A block's loss on hidden text may jump after a merge. Validators measure the loss of the version
that they compare an update with. Every version is measured on other windows, so losses scatter.

A block is rebuilt from a stored version by merging later updates again, without some of them. A
version that contains a removed update is no start of a rebuild. Pure decisions: no clock, no files.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from statistics import median, median_low
from typing import NamedTuple

from blocktrain.swarm.judgement import MAD_TO_SIGMA

FEWEST = 8  # measured versions before a jump can be told from scatter
JUMP = 4.0  # deviations above the moving average
LEAST_SPREAD = 0.005  # lower bound of a deviation, as a share of the loss
WEIGHT = 0.3  # of the newest version in the moving average
CONFIRMING = 2  # validators that must have seen the jump, if there are as many
PAUSE_SECONDS = 1800.0  # until the same block may be rolled back again, so that no loop is possible

STARTS_APART = 4  # a rebuild merges up to this many versions more than it must


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


class Removal(NamedTuple):
    """An update that is in all versions from `merged_into` to the one before `removed_in`."""

    merged_into: int
    removed_in: int


def clean_versions(stored: Collection[int], removals: Sequence[Removal]) -> list[int]:
    """The stored versions without updates that were removed later, oldest first."""
    return sorted(
        version
        for version in stored
        if not any(each.merged_into <= version < each.removed_in for each in removals)
    )


def kept_starts(clean: Sequence[int], newest: int, keep: int) -> list[int]:
    """The clean versions to keep as starts of rebuilds, oldest first; the updates after the first
    of them are kept as well. `keep`: for how many of the newest versions."""
    if not keep or not clean:
        return []
    oldest = max((version for version in clean if version <= newest - keep), default=clean[0])
    return [
        version
        for version in clean
        if version == oldest or (version > oldest and version % STARTS_APART == 0)
    ]


def _spread(deviations: Sequence[float], loss: float) -> float:
    """The usual scatter around the moving average."""
    middle = median(deviations)
    scatter = MAD_TO_SIGMA * median(abs(each - middle) for each in deviations)
    return max(scatter, LEAST_SPREAD * loss)
