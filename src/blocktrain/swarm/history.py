"""Which versions and updates of a block are kept, so that merged updates can be removed again.

A block is rebuilt from a stored version by merging later updates again, without some of them. A
version that contains a removed update is no start of a rebuild. Pure decisions: no clock, no files.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

STARTS_APART = 4  # a rebuild merges up to so many versions more than it must


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
