"""How many bytes to draft, and where to find some that stood in the text before.

Pure functions of what was seen; knows no model.
"""

from dataclasses import dataclass

MOST_DRAFTS = 32
# A draft costs something even where nobody measured it: this share of a traversal.
UNMEASURED_COST = 0.01
# The acceptance seen so far starts as so many drafts, of which so many were right.
FIRST_TRIED, FIRST_RIGHT = 4.0, 3.0
MEMORY = 0.9  # what a traversal's drafts weigh after the next one
LONGEST_MATCH, SHORTEST_MATCH = 24, 4


@dataclass
class Pace:
    """Seconds, as an engine measures them; None: not known yet."""

    draft: float | None = None
    traversal: float | None = None

    @property
    def draft_cost(self) -> float:
        """One draft, in traversals."""
        if self.draft is None or not self.traversal:
            return UNMEASURED_COST
        return self.draft / self.traversal


@dataclass
class Acceptance:
    """How often a draft is right, given that all before it were; recent ones count most."""

    tried: float = FIRST_TRIED
    right: float = FIRST_RIGHT

    def saw(self, drafted: int, accepted: int) -> None:
        self.tried = MEMORY * self.tried + min(accepted + 1, drafted)
        self.right = MEMORY * self.right + accepted

    @property
    def rate(self) -> float:
        return self.right / self.tried if self.tried else 0.0


def best_length(rate: float, draft_cost: float, most: int) -> int:
    """The number of drafts that gives the most bytes per time."""
    best, best_speed = 0, 0.0
    expected, chance = 0.0, 1.0
    for count in range(min(most, MOST_DRAFTS) + 1):
        expected += chance  # of `count` drafts and the byte that comes with every traversal
        chance *= rate
        speed = expected / (1.0 + count * draft_cost)
        if speed > best_speed:
            best, best_speed = count, speed
    return best


def repeated(text: bytes, most: int) -> bytes:
    """What followed the longest earlier match of the text's end, the latest such; may be empty."""
    for length in range(min(LONGEST_MATCH, len(text) - 1), SHORTEST_MATCH - 1, -1):
        at = text.rfind(text[-length:], 0, len(text) - 1)
        if at >= 0:
            return text[at + length : at + length + min(most, MOST_DRAFTS)]
    return b""
