"""One request's way to its bytes: what to ask the blocks next, and what their answer settles.

No I/O: `step` says what to send and changes nothing, `take` is given what came back. All modes are
one: some bytes after the known text are drafted, one traversal predicts every one of them and one
more, and those that are as drafted settle, and the first that is not. The randomness of a byte
belongs to its place, so every mode settles on the same text.

Positions of the context count from 0, the mark BOS; position p predicts byte base + p of the text.
When the window is full, the newer half of the text is read again as a fresh context.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from blocktrain.core.choice import Sampling, likeliest, picks
from blocktrain.core.vocabulary import BOS, MASK
from blocktrain.serve.drafts import Acceptance, Pace, best_length, repeated
from blocktrain.serve.output import Output
from blocktrain.serve.request import Account, Piece, Request
from blocktrain.serve.work import Row

LEAST_LIKELY = np.log(0.01)  # beside the likeliest byte: below, a draft does not stay


@dataclass(frozen=True)
class Step:
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

    def step(self) -> Step | None:
        """What to send around next; the same until `take` is given an answer."""
        if self.finished:
            return None
        guesses, drafts, refine = self._plan(self._room - 1)
        known = [BOS, *self._text[self._base :]][self._held :]
        ids = np.array([*known, *guesses], np.uint16)
        sampling = self.request.sampling
        position = len(self._text)
        return Step(self._held, ids, 1 + len(guesses), position, sampling, drafts, refine)

    def replay(self) -> Step | None:
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

    def __init__(self, request: Request, window: int, account: Account, pace: Pace) -> None:
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


def new_decoding(request: Request, window: int, pace: Pace, account: Account) -> Decoding:
    if request.mode == "ar":
        return Sequential(request, window, account)
    if request.mode == "sweep":
        return Sweep(request, window, account)
    return Speculative(request, window, account, pace)


def _agreeing(drafts: np.ndarray, found: np.ndarray) -> int:
    differs = np.flatnonzero(drafts != found[: len(drafts)])
    return int(differs[0]) if len(differs) else len(drafts)
