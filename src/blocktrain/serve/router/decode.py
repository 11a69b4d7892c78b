"""Decodes one answer: proposes positions to predict, and takes in the predictions.

Knows nothing of HTTP, stages or tensors. Shapes: R positions read, K likeliest tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from blocktrain.config import Config
from blocktrain.numerics.sampling import Sampling
from blocktrain.serve.ring.activations import GREEDY, Predictions, Row
from blocktrain.serve.router.output import Output, OutputToken, Spell

DRAFTS = ("head", "ngram", "model")


@dataclass(frozen=True)
class GenerationRequest:
    prompt: Sequence[int]  # tokens
    max_tokens: int
    mode: str = "speculative"  # one of MODES
    passes: int = 1  # traversals of a sweep; 0: until nothing changes
    drafts: str = ""  # one of DRAFTS; "": the default of mode and model
    sampling: Sampling = GREEDY
    stop: tuple[bytes, ...] = ()
    top_log_probs: int | None = None  # likeliest tokens to report; None: no log-probabilities
    echo: bool = False  # the answer begins with the prompt
    tenant: str = ""  # whose requests may share contexts with this one


@dataclass
class AnswerCost:
    """The cost of an answer. `reason` is set once the answer is complete: "stop" or "length"."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    traversals: int = 0
    drafted: int = 0
    accepted: int = 0
    replays: int = 0
    network_seconds: float = 0.0  # of traversals, outside of all stages
    stage_seconds: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    cached_tokens: int = 0  # of the prompt, whose context was copied from another request

    def add_seconds(self, seconds: Mapping[str, float]) -> None:
        for stage, more in seconds.items():
            self.stage_seconds[stage] = self.stage_seconds.get(stage, 0.0) + more


MAX_DRAFTS = 32
UNMEASURED_COST = 0.01  # cost of a draft in traversals, until it is measured
# The acceptance rate starts as if so many drafts had been tried, and so many accepted.
FIRST_TRIED, FIRST_RIGHT = 4.0, 3.0
DECAY = 0.9  # factor of a traversal's weight in the acceptance rate, per later traversal
LONGEST_MATCH = 24
SHORTEST_MATCH, SHORTEST_BYTE_MATCH = 2, 4
SCORED_AT_ONCE = 256  # prompt tokens per step, which bounds the memory for their distributions


@dataclass
class TraversalCost:
    """Measured seconds of a draft and of a traversal; None before the first measurement."""

    draft: float | None = None
    traversal: float | None = None

    @property
    def draft_cost(self) -> float:
        """The cost of one draft, in traversals."""
        if self.draft is None or not self.traversal:
            return UNMEASURED_COST
        return self.draft / self.traversal


@dataclass
class Acceptance:
    """How often a draft is right if all earlier ones are. Recent drafts count most."""

    attempts: float = FIRST_TRIED
    successes: float = FIRST_RIGHT

    def update(self, drafted: int, accepted: int) -> None:
        self.attempts = DECAY * self.attempts + min(accepted + 1, drafted)
        self.successes = DECAY * self.successes + accepted

    @property
    def rate(self) -> float:
        return self.successes / self.attempts if self.attempts else 0.0


def best_length(rate: float, draft_cost: float, limit: int) -> int:
    """The number of drafts that yields the most tokens per second."""
    best, best_speed = 0, 0.0
    expected, chance = 0.0, 1.0
    for count in range(min(limit, MAX_DRAFTS) + 1):
        expected += chance  # tokens per traversal with `count` drafts
        chance *= rate
        speed = expected / (1.0 + count * draft_cost)
        if speed > best_speed:
            best, best_speed = count, speed
    return best


def ngram_drafts(tokens: Sequence[int], limit: int, shortest: int) -> list[int]:
    """Drafts copied from the text: the tokens that followed the longest suffix of the text where it
    occurred last before. Empty if no suffix occurred before."""
    text = "".join(map(chr, tokens))  # one character per token, because string search is fast
    for length in range(min(LONGEST_MATCH, len(text) - 1), shortest - 1, -1):
        at = text.rfind(text[-length:], 0, len(text) - 1)
        if at >= 0:
            return list(tokens[at + length : at + length + min(limit, MAX_DRAFTS)])
    return []


LEAST_LIKELY = np.log(0.01)  # a sweep keeps drafts at least this likely, relative to the best


@dataclass(frozen=True)
class Proposal:
    """Positions to send through the blocks. The last `read` of them predict the tokens from
    `position` on; then the first block may draft `drafts` more. A chunk of context reads none."""

    start: int
    ids: np.ndarray
    read: int
    position: int
    sampling: Sampling
    drafts: int = 0
    text: Sequence[int] | None = None  # all of it, if a draft model is to write the drafts
    refine: bool = False  # positions read after the first are guesses that every block improves
    top: int = 0  # number of likeliest tokens to report per position read
    answer_from: int = 0  # position of the answer's first token, for penalties
    source: int = 0  # the context of which the positions before `start` are copied; 0: none

    @property
    def context(self) -> int:
        """Number of positions of the row before those that predict a token."""
        return len(self.ids) - self.read

    def cut(self, count: int) -> "tuple[Proposal, Proposal | None]":
        """The first `count` positions of the context and the rest, or the whole proposal if its
        context is not longer."""
        if count >= self.context:
            return self, None
        first = replace(self, ids=self.ids[:count], read=0, refine=False)
        return first, self.after(count)

    def after(self, count: int) -> "Proposal":
        """The proposal without its first `count` positions, which are cached by then."""
        return replace(self, start=self.start + count, ids=self.ids[count:], source=0)


class Decoding(ABC):
    """One answer's text so far, and what to try next."""

    least_top = 0  # number of likeliest tokens per position that `_reconciled` needs

    def __init__(
        self,
        request: GenerationRequest,
        config: Config,
        cost: AnswerCost,
        pace: TraversalCost,
        spell: Spell,
    ) -> None:
        self.request, self.cost, self.pace, self.config = request, cost, pace, config
        self.vocabulary, self._window = config.vocabulary, config.model.window
        self._spell = spell
        self._output = Output(request.max_tokens, request.stop, self.vocabulary.eos)
        cost.prompt_tokens = len(request.prompt)
        scored_from = self._scored_from()
        self._text = list(request.prompt[:scored_from])
        self._unscored = list(request.prompt[scored_from:])
        self._read_from(self._prompt_start())
        self._update_cost()

    @property
    def opening(self) -> list[OutputToken]:
        """The first tokens of the answer, known before any prediction."""
        known = self.request.prompt[: self._scored_from()] if self.request.echo else ()
        return [OutputToken(token, self._spell(token)) for token in known]

    @property
    def finished(self) -> bool:
        return bool(self.cost.reason)

    def propose(self) -> Proposal | None:
        """What to send through the blocks next; unchanged until `take` is called."""
        if self.finished:
            return None
        if self._unscored:
            guesses = self._unscored[: min(self._in_window - 1, SCORED_AT_ONCE)]
            drafts, refine = 0, False
        else:
            guesses, drafts, refine = self._plan(self._room - 1)
        context = [*self._lead, *self._text[self._base :]][self._cached :]
        ids = np.array([*context, *guesses], np.uint32)
        return Proposal(
            self._cached,
            ids,
            read=1 + len(guesses),
            position=len(self._text),
            sampling=self.request.sampling,
            drafts=drafts,
            text=self._text if self.request.drafts == "model" else None,
            refine=refine,
            top=max(self.least_top, self.request.top_log_probs or 0),
            answer_from=self._answer_from,
        )

    def replay(self) -> Proposal | None:
        """Propose the same from position 0, after a cache was lost."""
        self._cached = 0
        self.cost.replays += 1
        return self.propose()

    def reuse(self, positions: int) -> None:
        """Note that these first positions of the prompt are copied."""
        if not self.cost.traversals:
            self.cost.cached_tokens = max(0, positions - len(self._lead))

    @property
    def cached_ids(self) -> np.ndarray:
        """The ids of the positions that every block has cached."""
        return np.array([*self._lead, *self._text[self._base :]][: self._cached], np.uint32)

    def take(self, row: Row, predicted: Predictions) -> list[OutputToken]:
        """Take the predictions of a row that was sent. Returns new final tokens."""
        self.cost.traversals += 1
        drafts = row.ids[len(row.ids) - row.read + 1 :]
        tokens = self._score(drafts, predicted) if self._unscored else self._pick(row, predicted)
        self._update_cost()
        return tokens

    def _pick(self, row: Row, predicted: Predictions) -> list[OutputToken]:
        drafts = row.ids[len(row.ids) - row.read + 1 :]
        # With refinement each block reads its own guesses, so only the first equals that of `ar`.
        right = 0
        if not row.choice.refine:
            right = int(np.logical_and.accumulate(drafts == predicted.tokens_R[:-1]).sum())
            predicted = self._reconciled(predicted, drafts, right)
        self._cached = self._positions + right
        settled = self._settle(predicted.tokens_R, right)
        picked = self._tokens(predicted.tokens_R[:settled], predicted.log_probs_R, predicted)
        self._text += [token.id for token in picked]
        if self._in_window <= 0:
            self._read_from(len(self._text) - self._window // 2)
        return self._output.add(picked)

    def _score(self, known: np.ndarray, predicted: Predictions) -> list[OutputToken]:
        """Score the next tokens of the prompt: the same tokens with log-probabilities."""
        self._text += known.tolist()
        del self._unscored[: len(known)]
        self._cached = self._positions - 1  # each step must read at least one position
        if self._unscored and self._in_window <= 1:
            self._read_from(len(self._text) - self._window // 2)
        elif not self._unscored and self._base != self._prompt_start():
            self._read_from(self._prompt_start())
        return self._tokens(known, predicted.next_log_probs_R, predicted)

    def _tokens(
        self, tokens_R: np.ndarray, log_probs_R: np.ndarray, predicted: Predictions
    ) -> list[OutputToken]:
        count = self.request.top_log_probs or 0
        top_tokens_RK = predicted.top_tokens_RK[:, :count].tolist()
        top_log_probs_RK = predicted.top_log_probs_RK[:, :count].tolist()
        rows = zip(
            tokens_R.tolist(), log_probs_R.tolist(), top_tokens_RK, top_log_probs_RK, strict=False
        )
        return [
            OutputToken(
                token, self._spell(token), log_prob, dict(zip(likeliest, values, strict=True))
            )
            for token, log_prob, likeliest, values in rows
        ]

    def _scored_from(self) -> int:
        """How many tokens of the prompt get no log-probability: all of them if none were requested;
        otherwise the first one, if the model reads nothing before it."""
        prompt, vocabulary = self.request.prompt, self.vocabulary
        if not self.request.echo or self.request.top_log_probs is None:
            return len(prompt)
        return int(not vocabulary.starts_with_bos or list(prompt[:1]) == [vocabulary.bos])

    def _prompt_start(self) -> int:
        """Where reading a prompt starts: only its end is read if it exceeds the window."""
        return max(0, len(self._text) + self.vocabulary.starts_with_bos - self._window)

    def _read_from(self, base: int) -> None:
        """Read the text again from this position on, after the BOS token if texts begin with it."""
        first, bos = self._text[base : base + 1], self.vocabulary.bos
        begins = not first or (self.vocabulary.starts_with_bos and first != [bos])
        self._base, self._lead = base, [bos] if begins else []
        self._cached = 0  # number of positions in every block's cache

    @property
    def _positions(self) -> int:
        """Number of positions that the model reads for the text so far."""
        return len(self._lead) + len(self._text) - self._base

    @property
    def _answer_from(self) -> int:
        """The position of the answer's first token, or of the first that is still read; 0 if it
        does not matter."""
        if not self.request.sampling.penalizes:
            return 0
        return len(self._lead) + max(0, len(self.request.prompt) - self._base)

    @property
    def _in_window(self) -> int:
        """Tokens until the window is full."""
        return self._window + 1 - self._positions

    @property
    def _room(self) -> int:
        """Tokens until the window is full or the answer is complete."""
        length = len(self.request.prompt) + self.request.max_tokens
        return min(self._in_window, length - len(self._text))

    def _copied(self, limit: int) -> list[int]:
        """Drafts copied from the text so far."""
        shortest = SHORTEST_BYTE_MATCH if self.vocabulary.is_bytes else SHORTEST_MATCH
        return ngram_drafts(self._text, limit, shortest)

    def _update_cost(self) -> None:
        self.cost.output_tokens = self._output.length
        self.cost.reason = "" if self._unscored else self._output.reason

    def _reconciled(self, predicted: Predictions, drafts: np.ndarray, right: int) -> Predictions:
        """The predictions to continue with. Those after the first wrong draft need not equal what
        `ar` would give."""
        return predicted

    @abstractmethod
    def _plan(self, limit: int) -> tuple[list[int], int, bool]:
        """Guesses to try after the text, how many the first block drafts instead (each at most
        `limit`), and whether the blocks refine the guesses."""

    @abstractmethod
    def _settle(self, picked: np.ndarray, right: int) -> int:
        """How many of the picked tokens are final, given the number of correct drafts."""


class Sequential(Decoding):
    """One token per traversal."""

    def _plan(self, limit: int) -> tuple[list[int], int, bool]:
        return [], 0, False

    def _settle(self, picked: np.ndarray, right: int) -> int:
        return 1


class Speculative(Decoding):
    """Drafts from a model or from earlier text, verified in one traversal."""

    @cached_property
    def _acceptance(self) -> Acceptance:
        return Acceptance()

    def _plan(self, limit: int) -> tuple[list[int], int, bool]:
        has_head = self.config.has_head(0)
        if self.request.drafts == "ngram" or not (self.request.drafts or has_head):
            copied = self._copied(limit)
            if copied or not has_head:
                return copied, 0, False
        return [], best_length(self._acceptance.rate, self.pace.draft_cost, limit), False

    def _settle(self, picked: np.ndarray, right: int) -> int:
        drafted = len(picked) - 1
        self._acceptance.update(drafted, right)
        self.cost.drafted += drafted
        self.cost.accepted += right
        return right + 1


class Sweep(Decoding):
    """Drafts all tokens that fit at once, and verifies them in `passes` traversals. The first
    traversal starts from masks or drafts, every later one from the guesses before it. Each makes at
    least one more token equal to that of `ar`.

    With a fixed number of passes, every block refines guesses that started as masks, and likely
    drafts are kept: both improve the text. Without one (`passes` 0), neither is done, because each
    traversal must show how many tokens equal those of `ar`.
    """

    least_top = 1
    _guesses: Sequence[int] = ()
    _passes = 0  # traversals since the guesses started

    def _plan(self, limit: int) -> tuple[list[int], int, bool]:
        drafted = bool(self.request.drafts)
        if self._passes:
            return list(self._guesses[:limit]), 0, self.request.passes > 0 and not drafted
        if drafted:
            return [], limit, False
        if not self.config.has_head(0):  # it cannot turn masks into guesses
            last = self._text[-1:] or [0]
            return (self._copied(limit) + last * limit)[:limit], 0, False
        return [self.vocabulary.mask] * limit, 0, True

    def _reconciled(self, predicted: Predictions, drafts: np.ndarray, right: int) -> Predictions:
        """Keep likely drafts after the first wrong one. The tokens there were predicted from a
        wrong draft, and replacing only some of the drafts would give inconsistent text."""
        sampling = self.request.sampling
        if not self.request.passes or sampling.penalizes or sampling.bias:
            return predicted
        after = np.arange(right + 1, len(drafts))
        best_R, next_R = predicted.top_log_probs_RK[:, 0], predicted.next_log_probs_R
        stay = after[next_R[after] >= best_R[after] + LEAST_LIKELY]
        tokens_R, log_probs_R = predicted.tokens_R.copy(), predicted.log_probs_R.copy()
        tokens_R[stay], log_probs_R[stay] = drafts[stay], next_R[stay]
        return replace(predicted, tokens_R=tokens_R, log_probs_R=log_probs_R)

    def _settle(self, picked: np.ndarray, right: int) -> int:
        self._passes += 1
        settled = len(picked) if self._passes == self.request.passes else right + 1
        self._guesses = picked[settled:].tolist()
        if not self._guesses:
            self._passes = 0
        return settled


MODES: dict[str, type[Decoding]] = {"ar": Sequential, "sweep": Sweep, "speculative": Speculative}


def new_decoding(
    request: GenerationRequest,
    config: Config,
    cost: AnswerCost,
    pace: TraversalCost,
    spell: Spell = lambda token: b"",
) -> Decoding:
    """Begin to decode an answer. `spell` returns a token's text, for stop strings and for the
    answer's text."""
    return MODES[request.mode](request, config, cost, pace, spell)
