"""How an answer is decoded: a request's mode proposes positions, and takes their predictions in.

Knows nothing of HTTP, stages or tensors. Shapes: R positions read, V bytes.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from blocktrain.numerics.sampling import Sampling, likeliest, picks
from blocktrain.serve.stage.batch import Row
from blocktrain.vocabulary import BOS, MASK

__all__ = ["DRAFTS", "MODES", "AnswerCost", "GenerationRequest", "Piece", "Sampling"]

MODES = ("ar", "sweep", "speculative")
DRAFTS = ("head", "ngram")
GREEDY = Sampling()


@dataclass(frozen=True)
class GenerationRequest:
    prompt: bytes
    max_bytes: int
    mode: str = "speculative"
    passes: int = 1  # traversals of a sweep; 0: until nothing changes
    drafts: str = ""  # one of DRAFTS; "": what the mode does by default
    sampling: Sampling = GREEDY
    stop: tuple[bytes, ...] = ()
    top_log_probs: int = 0


@dataclass(frozen=True)
class Piece:
    """Bytes that are final, in order, each with the log-probability it was picked with."""

    data: bytes
    log_probs: tuple[float, ...] = ()
    top: tuple[dict[int, float], ...] = ()  # of each byte, the likeliest bytes, if requested


@dataclass
class AnswerCost:
    """What an answer took. `reason` is set once it is complete: "stop" or "length"."""

    prompt_bytes: int = 0
    output_bytes: int = 0
    traversals: int = 0
    drafted: int = 0
    accepted: int = 0
    replays: int = 0
    stage_seconds: dict[str, float] = field(default_factory=dict)
    reason: str = ""

    def add_seconds(self, seconds: Mapping[str, float]) -> None:
        for stage, more in seconds.items():
            self.stage_seconds[stage] = self.stage_seconds.get(stage, 0.0) + more

    def add(self, other: "AnswerCost") -> None:
        self.output_bytes += other.output_bytes
        self.traversals += other.traversals
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.replays += other.replays
        self.add_seconds(other.stage_seconds)

    @property
    def bytes_per_traversal(self) -> float:
        return self.output_bytes / self.traversals if self.traversals else 0.0


MAX_DRAFTS = 32
UNMEASURED_COST = 0.01  # of a draft, in traversals
# The acceptance rate starts as if this many drafts had been tried, and this many accepted.
FIRST_TRIED, FIRST_RIGHT = 4.0, 3.0
DECAY = 0.9  # of a traversal's weight in the acceptance rate, with every later one
LONGEST_MATCH, SHORTEST_MATCH = 24, 4


@dataclass
class TraversalCost:
    """Seconds as the engine measures them; None until there is a measurement."""

    draft: float | None = None
    traversal: float | None = None

    @property
    def draft_cost(self) -> float:
        """What one draft costs, in traversals."""
        if self.draft is None or not self.traversal:
            return UNMEASURED_COST
        return self.draft / self.traversal


@dataclass
class Acceptance:
    """How often a draft is right if all before it are; recent drafts count most."""

    tried: float = FIRST_TRIED
    right: float = FIRST_RIGHT

    def update(self, drafted: int, accepted: int) -> None:
        self.tried = DECAY * self.tried + min(accepted + 1, drafted)
        self.right = DECAY * self.right + accepted

    @property
    def rate(self) -> float:
        return self.right / self.tried if self.tried else 0.0


def best_length(rate: float, draft_cost: float, limit: int) -> int:
    """The number of drafts that gives the most bytes per second."""
    best, best_speed = 0, 0.0
    expected, chance = 0.0, 1.0
    for count in range(min(limit, MAX_DRAFTS) + 1):
        expected += chance  # bytes of a traversal with `count` drafts
        chance *= rate
        speed = expected / (1.0 + count * draft_cost)
        if speed > best_speed:
            best, best_speed = count, speed
    return best


def ngram_drafts(text: bytes, limit: int) -> bytes:
    """What followed the latest longest earlier match of the text's end; empty if there is none."""
    for length in range(min(LONGEST_MATCH, len(text) - 1), SHORTEST_MATCH - 1, -1):
        at = text.rfind(text[-length:], 0, len(text) - 1)
        if at >= 0:
            return text[at + length : at + length + min(limit, MAX_DRAFTS)]
    return b""


Top = dict[int, float]


class Output:
    """Final bytes, held back as long as they may become part of a stop string."""

    def __init__(self, stop: Sequence[bytes], max_bytes: int) -> None:
        self._stop = [text for text in stop if text]
        self._max_bytes = max_bytes
        self._data = bytearray()
        self._log_probs: list[float] = []
        self._top: list[Top] = []
        self.shown = 0
        self.reason = "" if max_bytes > 0 else "length"

    def add(self, data: bytes, log_probs: Sequence[float], top: Sequence[Top]) -> Piece:
        """Take final bytes; returns those that may be shown now."""
        before = len(self._data)
        self._data += data
        self._log_probs += log_probs
        self._top += top
        end = self._end(before)
        piece = Piece(
            bytes(self._data[self.shown : end]),
            tuple(self._log_probs[self.shown : end]),
            tuple(self._top[self.shown : end]),
        )
        self.shown = end
        return piece

    def _end(self, before: int) -> int:
        """Up to where bytes may be shown; sets the reason if the answer ends."""
        matches = (
            self._data.find(stop, max(0, before - len(stop) + 1), self._max_bytes)
            for stop in self._stop
        )
        if ends := [index for index in matches if index >= 0]:
            self.reason = "stop"
            return min(ends)
        if len(self._data) >= self._max_bytes:
            self.reason = "length"
            return self._max_bytes
        return len(self._data) - self._undecided()

    def _undecided(self) -> int:
        """How many of the last bytes may be the beginning of a stop string."""
        return max(
            (
                count
                for stop in self._stop
                for count in range(1, min(len(stop), len(self._data) + 1))
                if self._data.endswith(stop[:count])
            ),
            default=0,
        )


LEAST_LIKELY = np.log(0.01)  # a sweep keeps drafts at least this likely, relative to the best


@dataclass(frozen=True)
class Proposal:
    """Positions to send through the blocks. The last `read` of them predict the text's bytes from
    `position` on; after them the first block may draft `drafts` more."""

    start: int
    ids: np.ndarray  # uint16
    read: int
    position: int
    sampling: Sampling
    drafts: int = 0
    refine: bool = False  # all read but the first are guesses, which every block improves

    @property
    def context(self) -> int:
        """How many positions come before those that are read."""
        return len(self.ids) - self.read


class Decoding(ABC):
    """One answer's text so far, and what to try next."""

    def __init__(self, request: GenerationRequest, window: int, cost: AnswerCost) -> None:
        self.request = request
        self.cost = cost
        cost.prompt_bytes = len(request.prompt)
        self._window = window
        self._text = bytearray(request.prompt)
        self._base = max(0, len(self._text) - (window - 1))
        self._cached = 0  # positions whose ids every block has in its cache
        self._output = Output(request.stop, request.max_bytes)
        self.cost.reason = self._output.reason

    @property
    def finished(self) -> bool:
        return bool(self._output.reason)

    def propose(self) -> Proposal | None:
        """What to send through the blocks next; the same until `take` is called."""
        if self.finished:
            return None
        guesses, drafts, refine = self._plan(self._room - 1)
        context = [BOS, *self._text[self._base :]][self._cached :]
        ids = np.array([*context, *guesses], np.uint16)
        sampling = self.request.sampling
        position = len(self._text)
        return Proposal(self._cached, ids, 1 + len(guesses), position, sampling, drafts, refine)

    def replay(self) -> Proposal | None:
        """Propose the same from the first position on, after a cache was lost."""
        self._cached = 0
        self.cost.replays += 1
        return self.propose()

    def take(self, row: Row, log_probs_RV: np.ndarray) -> Piece:
        """Take the predictions for a row that was sent; returns bytes that are final and new."""
        text, count = self._text, row.read
        drafts = row.ids[len(row.ids) - count + 1 :]
        positions = range(len(text), len(text) + count)
        picked = picks(log_probs_RV, [self.request.sampling] * count, positions)
        # Refining blocks read contexts of their own: only the first byte is the model's.
        right = 0 if row.refinement else _agreeing(drafts, picked)
        self._cached = len(text) - self._base + 1 + right
        self.cost.traversals += 1
        if not row.refinement:
            picked = self._reconciled(picked, drafts, right, log_probs_RV)
        settled = self._settle(picked, right)
        text += bytes(picked[:settled].tolist())
        if len(text) - self._base >= self._window:
            self._base, self._cached = len(text) - self._window // 2, 0
        return self._show(picked[:settled], log_probs_RV)

    @property
    def _room(self) -> int:
        """Bytes until the window is full or the answer complete."""
        in_window = self._window - (len(self._text) - self._base)
        return min(in_window, len(self.request.prompt) + self.request.max_bytes - len(self._text))

    def _show(self, picked: np.ndarray, log_probs_RV: np.ndarray) -> Piece:
        top = self.request.top_log_probs
        piece = self._output.add(
            bytes(picked.tolist()),
            log_probs_RV[np.arange(len(picked)), picked].tolist(),
            [likeliest(log_probs_V, top) for log_probs_V in log_probs_RV[: len(picked)]]
            if top
            else [],
        )
        self.cost.output_bytes = self._output.shown
        self.cost.reason = self._output.reason
        return piece

    def _reconciled(
        self, picked: np.ndarray, drafts: np.ndarray, right: int, log_probs_RV: np.ndarray
    ) -> np.ndarray:
        """The bytes to go on with; behind the drafts that were right they need not be exact."""
        return picked

    @abstractmethod
    def _plan(self, limit: int) -> tuple[list[int], int, bool]:
        """Ids to try after the text, how many the first block drafts instead (either at most
        `limit`), and whether the blocks refine them."""

    @abstractmethod
    def _settle(self, picked: np.ndarray, right: int) -> int:
        """How many of the picked bytes are final, given how many drafts were right."""


class Sequential(Decoding):
    """One byte per traversal."""

    def _plan(self, limit: int) -> tuple[list[int], int, bool]:
        return [], 0, False

    def _settle(self, picked: np.ndarray, right: int) -> int:
        return 1


class Speculative(Decoding):
    """Drafts by the first block, or from earlier text, verified in one traversal."""

    def __init__(
        self, request: GenerationRequest, window: int, cost: AnswerCost, pace: TraversalCost
    ) -> None:
        super().__init__(request, window, cost)
        self._pace = pace
        self._acceptance = Acceptance()

    def _plan(self, limit: int) -> tuple[list[int], int, bool]:
        if self.request.drafts == "ngram" and (copied := ngram_drafts(bytes(self._text), limit)):
            return list(copied), 0, False
        return [], best_length(self._acceptance.rate, self._pace.draft_cost, limit), False

    def _settle(self, picked: np.ndarray, right: int) -> int:
        drafted = len(picked) - 1
        self._acceptance.update(drafted, right)
        self.cost.drafted += drafted
        self.cost.accepted += right
        return right + 1


class Sweep(Decoding):
    """All bytes that fit at once, in `passes` traversals. The first starts from masks or from the
    first block's drafts, every later one from the guesses of the one before. At least one more byte
    becomes exact each time.

    With a fixed number of passes, every block refines guesses that began as masks, and likely
    drafts are kept: both improve the text. Without one, neither is done, because a traversal must
    tell how many bytes are exact.
    """

    def __init__(self, request: GenerationRequest, window: int, cost: AnswerCost) -> None:
        super().__init__(request, window, cost)
        self._guesses: list[int] = []
        self._passes = 0

    def _plan(self, limit: int) -> tuple[list[int], int, bool]:
        drafted = self.request.drafts == "head"
        if self._passes:
            return self._guesses[:limit], 0, self.request.passes > 0 and not drafted
        return ([], limit, False) if drafted else ([MASK] * limit, 0, True)

    def _reconciled(
        self, picked: np.ndarray, drafts: np.ndarray, right: int, log_probs_RV: np.ndarray
    ) -> np.ndarray:
        """Behind the first wrong draft, picked bytes were predicted after drafts: to replace only
        some drafts would not fit together, so those that are likely stay."""
        if not self.request.passes:
            return picked
        after = np.arange(right + 1, len(drafts))
        best = log_probs_RV[after].max(axis=1)
        likely = log_probs_RV[after, drafts[after]] >= best + LEAST_LIKELY
        fitting = picked.copy()
        fitting[after[likely]] = drafts[after[likely]]
        return fitting

    def _settle(self, picked: np.ndarray, right: int) -> int:
        self._passes += 1
        settled = len(picked) if self._passes == self.request.passes else right + 1
        self._guesses = picked[settled:].tolist()
        if not self._guesses:
            self._passes = 0
        return settled


def new_decoding(
    request: GenerationRequest, window: int, pace: TraversalCost, cost: AnswerCost
) -> Decoding:
    if request.mode == "ar":
        return Sequential(request, window, cost)
    if request.mode == "sweep":
        return Sweep(request, window, cost)
    return Speculative(request, window, cost, pace)


def _agreeing(drafts: np.ndarray, picked: np.ndarray) -> int:
    differs = np.flatnonzero(drafts != picked[: len(drafts)])
    return int(differs[0]) if len(differs) else len(drafts)
