"""The names of the splits, and which of them a file belongs to by its name."""

import re
from dataclasses import dataclass

from blocktrain.errors import DataError

SPLITS = ("train", "valid", "test")
ALIASES = {"valid": {"valid", "validation", "val", "dev"}, "test": {"test"}}


def split_of(name: str) -> str:
    """valid.txt, wiki.test.tokens and dev/0.parquet are those splits; all else is for training."""
    words = re.split(r"[-_./]", name.lower())
    for split, aliases in ALIASES.items():
        if not aliases.isdisjoint(words):
            return split
    return "train"


@dataclass
class Budget:
    spec: str
    left: int

    def spend(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise DataError(f"{self.spec}: unpacks to more than data.unpack_limit_mb allows")
