"""How rows share a stage's cache and computation: one slot per request, padded batches, and tokens
sampled where their distributions are computed, so that no distribution over a large vocabulary has
to travel.

Shapes: B rows, Q positions, N = B x Q, R positions read, S of them sampled, W or X any width, V
tokens, C candidates, K likeliest tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush

import numpy as np
import torch
from torch import Tensor

from blocktrain.errors import CacheFullError, MissingPrefixError
from blocktrain.numerics.sampling import (
    CANDIDATES,
    NOTHING,
    Ranking,
    Sampling,
    adjustments,
    pick,
)
from blocktrain.serve.ring.activations import Predictions, Row

MAX_LENGTH_RATIO = 4  # between rows of a batch, so that padding at most quadruples a row


@dataclass(frozen=True)
class SlotLimits:
    """Limits of a stage's cache."""

    requests: int = 256
    cache_bytes: int = 4 << 30
    idle_seconds: float = 30.0  # a request without a step for this long may lose its slot
    prefix_bytes: int = 1 << 30  # for contexts of ended requests, outside of slots


DEFAULT_LIMITS = SlotLimits()
NO_IDS = np.zeros(0, np.uint32)


@dataclass
class SlotOwner:
    """A request's slot, its number of cached positions, when it was last used, and its ids."""

    slot: int
    cached: int
    used_at: float
    ids: np.ndarray = field(default_factory=lambda: NO_IDS)


class SlotTable:
    """Assigns cache slots to requests."""

    def __init__(self, slots: int, idle_seconds: float) -> None:
        self.slots = slots
        self.idle_seconds = idle_seconds
        self._by_request: dict[int, SlotOwner] = {}
        self._free = list(range(slots))  # a heap: lowest first, so that used slots stay together

    @property
    def requests(self) -> tuple[int, ...]:
        return tuple(self._by_request)

    def cached(self, request: int) -> int:
        """Number of cached positions; 0 for an unknown request."""
        owner = self._by_request.get(request)
        return owner.cached if owner else 0

    def owner(self, request: int) -> SlotOwner | None:
        return self._by_request.get(request)

    def admit(self, rows: Sequence[Row], now: float) -> list[SlotOwner]:
        """Assign a slot to every row, or raise an error with the requests concerned."""
        if missing := tuple(row.request for row in rows if row.start > self.cached(row.request)):
            raise MissingPrefixError("the positions before a row are not in the cache", missing)
        for row in rows:
            if owner := self._by_request.get(row.request):
                owner.used_at = now
        new = [row.request for row in rows if row.request not in self._by_request]
        self._make_room(new, now)
        for request in new:
            self._by_request[request] = SlotOwner(heappop(self._free), 0, now)
        owners = [self._by_request[row.request] for row in rows]
        for owner, row in zip(owners, rows, strict=True):
            owner.ids = np.concatenate([owner.ids[: row.start], row.ids])
        return owners

    def release(self, request: int) -> None:
        """Free a request's slot, if it has one."""
        if owner := self._by_request.pop(request, None):
            heappush(self._free, owner.slot)

    def _make_room(self, new: Sequence[int], now: float) -> None:
        lacking = len(new) - len(self._free)
        if lacking <= 0:
            return
        idle = sorted(
            (owner.used_at, request)
            for request, owner in self._by_request.items()
            if now - owner.used_at >= self.idle_seconds and owner.used_at < now
        )
        if len(idle) < lacking:
            unmet = tuple(new[len(self._free) + len(idle) :])
            raise CacheFullError(f"all {self.slots} slots of the cache are in use", unmet)
        for _, request in idle[:lacking]:
            self.release(request)


@dataclass(frozen=True)
class RowSpan:
    """A row with its slot in the cache."""

    row: Row
    owner: SlotOwner

    @property
    def length(self) -> int:
        return len(self.row.ids)

    def context_only(self) -> "RowSpan":
        """The same row without the positions that are read."""
        row = self.row
        return replace(self, row=replace(row, ids=row.ids[: row.context], read=0))

    def read_only(self) -> "RowSpan":
        """The same row with only the positions that are read."""
        row = self.row
        start = row.start + row.context
        return replace(self, row=replace(row, start=start, ids=row.ids[row.context :]))


def grouped_by_length(spans: Sequence[RowSpan]) -> list[list[RowSpan]]:
    """Group rows of similar length, which limits padding. Each group is in the order of its
    slots."""
    groups: list[list[RowSpan]] = []
    for span in sorted(spans, key=lambda span: span.length):
        if not groups or span.length > MAX_LENGTH_RATIO * groups[-1][0].length:
            groups.append([])
        groups[-1].append(span)
    return [sorted(group, key=lambda span: span.owner.slot) for group in groups]


class RowBatch:
    """Rows padded to one length."""

    def __init__(self, spans: Sequence[RowSpan], device: torch.device) -> None:
        self.spans = spans
        self._device = device
        longest = max(span.length for span in spans)
        self._ids_BQ = np.zeros((len(spans), longest), np.int64)
        for ids_Q, span in zip(self._ids_BQ, spans, strict=True):
            ids_Q[: span.length] = span.row.ids
        self.ids_BQ = on_device(self._ids_BQ, device)
        # Indices of the positions that are not padding, and of those that are read; None: all.
        self._filled_N = self._read_R = None
        if any(span.row.read < longest for span in spans):
            lengths_B1 = np.array([[span.length] for span in spans])
            reads_B1 = np.array([[span.row.read] for span in spans])
            offsets_Q = np.arange(longest)
            filled_BQ = offsets_Q < lengths_B1
            self._filled_N = self._indices(filled_BQ)
            self._read_R = self._indices(filled_BQ & (offsets_Q >= lengths_B1 - reads_B1))

    def spread(self, values_NW: Tensor) -> Tensor:
        """Spread flat values over padded rows; padding is zero."""
        if self._filled_N is not None:
            flat = values_NW.new_zeros(self.ids_BQ.numel(), values_NW.size(1))
            values_NW = flat.index_copy_(0, self._filled_N, values_NW)
        return values_NW.view(*self.ids_BQ.shape, -1)

    def gathered(self, values_BQW: Tensor) -> Tensor:
        """Gather padded rows to flat values without padding."""
        return _selected(values_BQW, self._filled_N)

    def at_read(self, values_BQX: Tensor) -> Tensor:
        """Gather the positions read from padded rows to flat values."""
        return _selected(values_BQX, self._read_R)

    @property
    def texts(self) -> list[np.ndarray]:
        """The ids of each row's request, up to the end of the row."""
        return [span.owner.ids for span in self.spans]

    @property
    def refines(self) -> bool:
        return any(span.row.choice.refine for span in self.spans)

    def refine(self, log_probs_RV: Tensor) -> None:
        """In rows with `choice.refine`, replace the ids at the positions read by the tokens that
        these log-probabilities give, all but the first, which is known."""
        rows, start = [span.row for span in self.spans], 0
        tokens_R = predictions(log_probs_RV, rows, texts=self.texts).tokens_R
        for ids_Q, row in zip(self._ids_BQ, rows, strict=True):
            if row.choice.refine:
                ids_Q[1 : row.read] = tokens_R[start : start + row.read - 1]
            start += row.read
        self.ids_BQ = on_device(self._ids_BQ, self._device)

    def refined(self, rows: Sequence[Row]) -> list[Row]:
        """All rows of this batch. Rows with `choice.refine` contain the current guesses in place of
        their ids."""
        return [
            replace(row, ids=np.concatenate([row.ids[: row.context], ids_Q[: row.read]]))
            if row.choice.refine
            else row
            for row, ids_Q in zip(rows, self._ids_BQ, strict=True)
        ]

    def _indices(self, mask_BQ: np.ndarray) -> Tensor | None:
        return None if mask_BQ.all() else on_device(np.flatnonzero(mask_BQ), self._device)


def on_device(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)


def _selected(values_BQX: Tensor, indices: Tensor | None) -> Tensor:
    flat = values_BQX.reshape(-1, values_BQX.size(-1))
    return flat if indices is None else flat[indices]


def predictions(
    log_probs_RV: Tensor, rows: Sequence[Row], top: int = 0, texts: Sequence[np.ndarray] = ()
) -> Predictions:
    """Predictions at the positions that these rows read, with the `top` likeliest tokens. `texts`:
    each row's whole text, for penalties. Penalties and biases change which tokens are picked, not
    the log-probabilities."""
    samplings = [row.choice.sampling for row in rows for _ in range(row.read)]
    positions = [row.choice.position + index for row in rows for index in range(row.read)]
    tokens_R = picks(_adjusted(log_probs_RV, rows, texts), samplings, positions)
    next_R, end = tokens_R.copy(), 0
    for row in rows:
        end += row.read
        if row.read:
            next_R[end - row.read : end - 1] = row.ids[row.context + 1 :]
    next_R = np.where(next_R < log_probs_RV.size(1), next_R, tokens_R)  # a mask has no probability
    ids_R2 = torch.from_numpy(np.stack([tokens_R, next_R], axis=1)).to(log_probs_RV.device)
    log_probs_R, next_log_probs_R = log_probs_RV.gather(1, ids_R2).cpu().numpy().T
    top_log_probs_RK, top_tokens_RK = (part.cpu().numpy() for part in log_probs_RV.topk(top))
    return Predictions(tokens_R, log_probs_R, next_log_probs_R, top_tokens_RK, top_log_probs_RK)


def _adjusted(log_probs_RV: Tensor, rows: Sequence[Row], texts: Sequence[np.ndarray]) -> Tensor:
    """Log-probabilities with each row's penalties and biases."""
    if not any(row.choice.sampling.penalizes or row.choice.sampling.bias for row in rows):
        return log_probs_RV
    result_RV, vocabulary, place = log_probs_RV.clone(), log_probs_RV.size(1), 0
    for row, text in zip(rows, texts or [NO_IDS] * len(rows), strict=True):
        sampling, first = row.choice.sampling, row.start + row.context + 1
        answer = text[row.choice.answer_from : first] if sampling.penalizes else NO_IDS
        counts_V = np.bincount(answer.astype(np.int64), minlength=vocabulary)[:vocabulary]
        for index in range(row.read):
            guess = row.ids[row.context + index] if index else vocabulary
            if guess < vocabulary:
                counts_V[guess] += 1
            result_RV[place] += torch.from_numpy(adjustments(sampling, counts_V)).to(result_RV)
            place += 1
    return result_RV


def picks(
    log_probs_RV: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]
) -> np.ndarray:
    """Pick one token per row, each with its own sampling and text position."""
    tokens_R: np.ndarray = log_probs_RV.argmax(dim=1).cpu().numpy()
    sampled = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0.0]
    if not sampled:
        return tokens_R
    sampled_SV, vocabulary = log_probs_RV[sampled], log_probs_RV.size(1)
    log_probs_SC, candidates_SC = sampled_SV.topk(min(CANDIDATES, vocabulary))
    others_S = [NOTHING] * len(sampled)
    if vocabulary > CANDIDATES:
        temperatures = [samplings[row].temperature for row in sampled]
        scaled_SV = sampled_SV / sampled_SV.new_tensor(temperatures)[:, None]
        others_S = scaled_SV.scatter_(1, candidates_SC, NOTHING).logsumexp(dim=1).tolist()
    rankings = zip(candidates_SC.cpu().numpy(), log_probs_SC.cpu().numpy(), others_S, strict=True)
    for row, (tokens_C, log_probs_C, others) in zip(sampled, rankings, strict=True):
        likeliest = Ranking(tokens_C, log_probs_C, vocabulary, others)
        whole = partial(_whole_ranking, log_probs_RV[row])
        tokens_R[row] = pick(likeliest, whole, samplings[row], positions[row])
    return tokens_R


def _whole_ranking(log_probs_V: Tensor) -> Ranking:
    log_probs, tokens = log_probs_V.sort(descending=True)
    return Ranking(tokens.cpu().numpy(), log_probs.cpu().numpy(), len(tokens))
