"""The names of the splits, and which of them a file belongs to by its name."""

import re

SPLITS = ("train", "valid", "test")
ALIASES = {"valid": {"valid", "validation", "val", "dev"}, "test": {"test"}}


def split_of(name: str) -> str:
    """valid.txt, wiki.test.tokens and dev/0.parquet are those splits; all else is for training."""
    words = re.split(r"[-_./]", name.lower())
    for split, aliases in ALIASES.items():
        if not aliases.isdisjoint(words):
            return split
    return "train"
