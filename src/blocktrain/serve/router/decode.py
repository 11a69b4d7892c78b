"""What a client asks for and what it gets, as values. Knows nothing of HTTP, stages or tensors."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from blocktrain.numerics.sampling import Sampling, likeliest, picks
from blocktrain.serve.stage.batch import Row
from blocktrain.vocabulary import BOS, MASK

__all__ = ["DRAFTS", "MODES", "Account", "Piece", "Request", "Sampling"]

MODES = ("ar", "sweep", "speculative")
DRAFTS = ("head", "ngram")
GREEDY = Sampling()


@dataclass(frozen=True)
class Request:
    prompt: bytes
    most_bytes: int
    mode: str = "speculative"
    passes: int = 1  # traversals of a sweep; 0: as many as it takes to converge
    drafts: str = ""  # whose drafts: of DRAFTS, or what the mode does by itself
    sampling: Sampling = GREEDY
    stop: tuple[bytes, ...] = ()
    top_log_probs: int = 0


@dataclass(frozen=True)
class Piece:
    """Bytes that are final, in order, each with the log-probability it was picked with."""

    data: bytes
    log_probs: tuple[float, ...] = ()
    top: tuple[dict[int, float], ...] = ()  # per byte, the likeliest bytes, where asked for


@dataclass
class Account:
    """What an answer cost. `reason` is set when it is complete: "stop" or "length"."""

    prompt_bytes: int = 0
    output_bytes: int = 0
    traversals: int = 0
    drafted: int = 0
    accepted: int = 0
    replays: int = 0
    stage_seconds: dict[str, float] = field(default_factory=dict)
    reason: str = ""

    def took(self, seconds: Mapping[str, float]) -> None:
        for stage, more in seconds.items():
            self.stage_seconds[stage] = self.stage_seconds.get(stage, 0.0) + more

    @property
    def bytes_per_traversal(self) -> float:
        return self.output_bytes / self.traversals if self.traversals else 0.0


MOST_DRAFTS = 32
# A draft costs something even where nobody measured it: this share of a traversal.
UNMEASURED_COST = 0.01
# The acceptance seen so far starts as so many drafts, of which so many were right.
FIRST_TRIED, FIRST_RIGHT = 4.0, 3.0
MEMORY = 0.9  # what a traversal's drafts weigh after the next one
LONGEST_MATCH, SHORTEST_MATCH = 24, 4


@dataclass
class TraversalCost:
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


Top = dict[int, float]


class Output:
    def __init__(self, stop: Sequence[bytes], most_bytes: int) -> None:
        self._stop = [text for text in stop if text]
        self._most = most_bytes
        self._data = bytearray()
        self._log_probs: list[float] = []
        self._top: list[Top] = []
        self.shown = 0
        self.reason = "" if most_bytes > 0 else "length"

    def add(self, data: bytes, log_probs: Sequence[float], top: Sequence[Top]) -> Piece:
        """Bytes that are final; gives those that may be shown by now."""
        known = len(self._data)
        self._data += data
        self._log_probs += log_probs
        self._top += top
        end = self._end(known)
        piece = Piece(
            bytes(self._data[self.shown : end]),
            tuple(self._log_probs[self.shown : end]),
            tuple(self._top[self.shown : end]),
        )
        self.shown = end
        return piece

    def _end(self, known: int) -> int:
        """Up to where bytes may be shown; sets the reason where the answer ends."""
        found = (
            self._data.find(stop, max(0, known - len(stop) + 1), self._most) for stop in self._stop
        )
        if ends := [index for index in found if index >= 0]:
            self.reason = "stop"
            return min(ends)
        if len(self._data) >= self._most:
            self.reason = "length"
            return self._most
        return len(self._data) - self._undecided()

    def _undecided(self) -> int:
        """How many of the last bytes may still become a stop string."""
        return max(
            (
                count
                for stop in self._stop
                for count in range(1, min(len(stop), len(self._data) + 1))
                if self._data.endswith(stop[:count])
            ),
            default=0,
        )


LEAST_LIKELY = np.log(0.01)  # beside the likeliest byte: below, a draft does not stay


@dataclass(frozen=True)
class Proposal:
    """Positions to send around. The last `read` of them are predicted, from the text's byte
    `position` on; after them the front may draft `drafts` bytes of its own."""

    start: int
    ids: np.ndarray  # uint16
    read: int
    position: int
    sampling: Sampling
    drafts: int = 0
    refine: bool = False  # all read but the first are guesses: let each block better them


class Decoding(ABC):
    def __init__(self, request: Request, window: int, account: Account) -> None:
        self.request = request
        self.account = account
        account.prompt_bytes = len(request.prompt)
        self._window = window
        self._text = bytearray(request.prompt)
        self._base = max(0, len(self._text) - (window - 1))
        self._held = 0  # positions that every block has read as they are
        self._output = Output(request.stop, request.most_bytes)
        self.account.reason = self._output.reason

    @property
    def finished(self) -> bool:
        return bool(self._output.reason)

    def step(self) -> Proposal | None:
        """What to send around next; the same until `take` is given an answer."""
        if self.finished:
            return None
        guesses, drafts, refine = self._plan(self._room - 1)
        known = [BOS, *self._text[self._base :]][self._held :]
        ids = np.array([*known, *guesses], np.uint16)
        sampling = self.request.sampling
        position = len(self._text)
        return Proposal(self._held, ids, 1 + len(guesses), position, sampling, drafts, refine)

    def replay(self) -> Proposal | None:
        """A block lost what it held: the same step, from the first position on."""
        self._held = 0
        self.account.replays += 1
        return self.step()

    def take(self, row: Row, log_probs_RV: np.ndarray) -> Piece:
        """The answer to a step, as its row went out; gives bytes that are final and new."""
        text, count = self._text, row.read
        drafts = row.ids[len(row.ids) - count + 1 :]
        places = range(len(text), len(text) + count)
        found = picks(log_probs_RV, [self.request.sampling] * count, places)
        # Blocks that refined read contexts of their own: only the first byte is the model's.
        right = 0 if row.refinement else _agreeing(drafts, found)
        self._held = len(text) - self._base + 1 + right
        self.account.traversals += 1
        if not row.refinement:
            found = self._reconciled(found, drafts, right, log_probs_RV)
        settled = self._settle(found, right)
        text += bytes(found[:settled].tolist())
        if len(text) - self._base >= self._window:
            self._base, self._held = len(text) - self._window // 2, 0
        return self._show(found[:settled], log_probs_RV)

    @property
    def _room(self) -> int:
        """Bytes that may come before the window is full or the answer complete."""
        in_window = self._window - (len(self._text) - self._base)
        return min(in_window, len(self.request.prompt) + self.request.most_bytes - len(self._text))

    def _show(self, found: np.ndarray, log_probs_RV: np.ndarray) -> Piece:
        asked = self.request.top_log_probs
        piece = self._output.add(
            bytes(found.tolist()),
            log_probs_RV[np.arange(len(found)), found].tolist(),
            [likeliest(log_probs_V, asked) for log_probs_V in log_probs_RV[: len(found)]]
            if asked
            else [],
        )
        self.account.output_bytes = self._output.shown
        self.account.reason = self._output.reason
        return piece

    def _reconciled(
        self, found: np.ndarray, drafts: np.ndarray, right: int, log_probs_RV: np.ndarray
    ) -> np.ndarray:
        """What was found, where it need not be exact behind the drafts that were right."""
        return found

    @abstractmethod
    def _plan(self, most: int) -> tuple[list[int], int, bool]:
        """At most so many ids to try after the known text, how many the front may draft instead,
        and whether the blocks are to refine them."""

    @abstractmethod
    def _settle(self, found: np.ndarray, right: int) -> int:
        """How many of the bytes found are final, when so many drafts were right."""


class Sequential(Decoding):
    """One byte per traversal."""

    def _plan(self, most: int) -> tuple[list[int], int, bool]:
        return [], 0, False

    def _settle(self, found: np.ndarray, right: int) -> int:
        return 1


class Speculative(Decoding):
    """Drafts by the first block, or from the text itself, checked by one traversal."""

    def __init__(
        self, request: Request, window: int, account: Account, pace: TraversalCost
    ) -> None:
        super().__init__(request, window, account)
        self._pace = pace
        self._seen = Acceptance()

    def _plan(self, most: int) -> tuple[list[int], int, bool]:
        if self.request.drafts == "ngram" and (copied := repeated(bytes(self._text), most)):
            return list(copied), 0, False
        return [], best_length(self._seen.rate, self._pace.draft_cost, most), False

    def _settle(self, found: np.ndarray, right: int) -> int:
        drafted = len(found) - 1
        self._seen.saw(drafted, right)
        self.account.drafted += drafted
        self.account.accepted += right
        return right + 1


class Sweep(Decoding):
    """All bytes that fit at once, in a number of traversals: the first starts from nothing or from
    the first block's own text, every other from what the one before guessed. What is exact grows
    by at least a byte each time.

    Where the traversals are counted, guesses that came from nothing are refined by every block, and
    drafts stay where they are likely: both give the better text. Where they are not, only a
    traversal that does neither tells how much of the text is exact.
    """

    def __init__(self, request: Request, window: int, account: Account) -> None:
        super().__init__(request, window, account)
        self._guesses: list[int] = []
        self._passes = 0

    def _plan(self, most: int) -> tuple[list[int], int, bool]:
        drafted = self.request.drafts == "head"
        if self._passes:
            return self._guesses[:most], 0, self.request.passes > 0 and not drafted
        return ([], most, False) if drafted else ([MASK] * most, 0, True)

    def _reconciled(
        self, found: np.ndarray, drafts: np.ndarray, right: int, log_probs_RV: np.ndarray
    ) -> np.ndarray:
        """Behind the first draft that was wrong every byte was predicted after drafts, and the
        drafts were made one after another: replaced one by one, they would not fit together."""
        if not self.request.passes:
            return found
        after = np.arange(right + 1, len(drafts))
        best = log_probs_RV[after].max(axis=1)
        likely = log_probs_RV[after, drafts[after]] >= best + LEAST_LIKELY
        fitting = found.copy()
        fitting[after[likely]] = drafts[after[likely]]
        return fitting

    def _settle(self, found: np.ndarray, right: int) -> int:
        self._passes += 1
        settled = len(found) if self._passes == self.request.passes else right + 1
        self._guesses = found[settled:].tolist()
        if not self._guesses:
            self._passes = 0
        return settled


def new_decoding(request: Request, window: int, pace: TraversalCost, account: Account) -> Decoding:
    if request.mode == "ar":
        return Sequential(request, window, account)
    if request.mode == "sweep":
        return Sweep(request, window, account)
    return Speculative(request, window, account, pace)


def _agreeing(drafts: np.ndarray, found: np.ndarray) -> int:
    differs = np.flatnonzero(drafts != found[: len(drafts)])
    return int(differs[0]) if len(differs) else len(drafts)
