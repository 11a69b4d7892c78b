"""What somebody who mistyped a word may have meant."""

import difflib
from collections.abc import Iterable


def meant(word: str, known: Iterable[str]) -> str | None:
    """The known word that is nearest, where one is near."""
    nearest = difflib.get_close_matches(word, list(known), n=1)
    return nearest[0] if nearest else None
