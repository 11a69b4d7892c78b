"""What a stage computes together: activations of several requests, cache slots and batches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np
import torch
from torch import Tensor

from blocktrain.errors import CacheFullError, MissingPrefixError
from blocktrain.numerics.sampling import Sampling, picks
from blocktrain.vocabulary import BYTES

NO_STATE = np.zeros((0, 0), np.float32)


@dataclass(frozen=True)
class Refinement:
    """In a sweep, a block's guesses become the next block's context.

    `position` is the text position of the first guessed byte.
    """

    sampling: Sampling
    position: int


@dataclass(frozen=True)
class Row:
    """One request's positions. A row overwrites what caches have from `start` on: so the next row
    rolls rejected drafts back, and a row from 0 rebuilds everything.
    """

    request: int
    start: int
    ids: np.ndarray  # uint16, the context at positions start, start + 1, ...
    read: int  # how many of the last positions are predicted
    refinement: Refinement | None = None

    @property
    def context(self) -> int:
        """How many positions come before those that are read."""
        return len(self.ids) - self.read


@dataclass(frozen=True)
class Activations:
    """`state` is features of every position (a cascade) or z of every position read (denoising).
    `readout` is the sum of the blocks' log-probabilities so far at the positions read, or with the
    readout "final" those of the last block alone."""

    rows: tuple[Row, ...]
    state: np.ndarray
    readout_RV: np.ndarray

    @property
    def read(self) -> int:
        return sum(row.read for row in self.rows)


def initial(rows: Sequence[Row], state: np.ndarray = NO_STATE) -> Activations:
    """Before the first block."""
    read = sum(row.read for row in rows)
    return Activations(tuple(rows), state, np.zeros((read, BYTES), np.float32))


def joined(parts: Sequence[Activations]) -> Activations:
    """Several that go the same way, as one."""
    return Activations(
        tuple(row for part in parts for row in part.rows),
        np.concatenate([part.state for part in parts]),
        np.concatenate([part.readout_RV for part in parts]),
    )


def split_rows(activations: Activations, carried: Sequence[int]) -> list[Activations]:
    """One for each row; `carried` says how many positions of state each row has."""
    rows = activations.rows
    states = np.split(activations.state, np.cumsum(carried)[:-1])
    readouts = np.split(activations.readout_RV, np.cumsum([row.read for row in rows])[:-1])
    return [Activations((row,), *own) for row, *own in zip(rows, states, readouts, strict=True)]


def is_finite(activations: Activations) -> bool:
    return bool(np.isfinite(activations.state).all() and np.isfinite(activations.readout_RV).all())


MAX_LENGTH_RATIO = 4  # of rows in one batch: padding at most quadruples a row


@dataclass(frozen=True)
class SlotLimits:
    """How much a stage's cache may hold."""

    requests: int = 256
    cache_bytes: int = 4 << 30
    idle_seconds: float = 30.0  # without a step, after which a request may lose its slot


DEFAULT_LIMITS = SlotLimits()


@dataclass
class SlotOwner:
    """A request's slot, how many positions it caches, and when it was last used."""

    slot: int
    cached: int
    used_at: float


class SlotTable:
    """Which request has which slot."""

    def __init__(self, slots: int, idle_seconds: float) -> None:
        self.slots = slots
        self.idle_seconds = idle_seconds
        self._by_request: dict[int, SlotOwner] = {}
        self._free = list(range(slots))  # a heap: low slots first keeps those in use consecutive

    @property
    def requests(self) -> tuple[int, ...]:
        return tuple(self._by_request)

    def cached(self, request: int) -> int:
        """How many positions are cached; 0 for an unknown request."""
        owner = self._by_request.get(request)
        return owner.cached if owner else 0

    def admit(self, rows: Sequence[Row], now: float) -> list[SlotOwner]:
        """A slot for every row; or none, and an error that names the requests it concerns."""
        if missing := tuple(row.request for row in rows if row.start > self.cached(row.request)):
            raise MissingPrefixError("the positions before a row are not in the cache", missing)
        for row in rows:
            if owner := self._by_request.get(row.request):
                owner.used_at = now
        new = [row.request for row in rows if row.request not in self._by_request]
        self._make_room(new, now)
        for request in new:
            self._by_request[request] = SlotOwner(heappop(self._free), 0, now)
        return [self._by_request[row.request] for row in rows]

    def release(self, request: int) -> None:
        """Forget a request, if it is known."""
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
    """A row with its slot, and which of a step's carried and read positions are its own."""

    row: Row
    owner: SlotOwner
    carried: range
    read: range

    @property
    def length(self) -> int:
        return len(self.row.ids)

    def context_only(self) -> "RowSpan":
        """The positions before those that are read."""
        row = self.row
        return replace(self, row=replace(row, ids=row.ids[: row.context], read=0))

    def read_only(self) -> "RowSpan":
        row = self.row
        start = row.start + row.context
        return replace(self, row=replace(row, start=start, ids=row.ids[row.context :]))


def grouped_by_length(spans: Sequence[RowSpan]) -> list[list[RowSpan]]:
    """Groups of rows of similar length, to limit padding; each in the order of its slots."""
    groups: list[list[RowSpan]] = []
    for span in sorted(spans, key=lambda span: span.length):
        if not groups or span.length > MAX_LENGTH_RATIO * groups[-1][0].length:
            groups.append([])
        groups[-1].append(span)
    return [sorted(group, key=lambda span: span.owner.slot) for group in groups]


class RowBatch:
    """Rows padded to one length. `given_N` are the indices of the B x Q positions that are no
    padding, `read_R` of those that are read; None stands for all."""

    def __init__(self, spans: Sequence[RowSpan], device: torch.device) -> None:
        self.spans = spans
        self._device = device
        self._ids_BQ = _padded([span.row.ids for span in spans])
        self.ids_BQ = self._tensor(self._ids_BQ)
        self.given_N: Tensor | None = None
        self.read_R: Tensor | None = None
        if any(span.row.read < self._ids_BQ.shape[1] for span in spans):
            lengths_B1 = np.array([[span.length] for span in spans])
            reads_B1 = np.array([[span.row.read] for span in spans])
            offsets_Q = np.arange(self._ids_BQ.shape[1])
            given_BQ = offsets_Q < lengths_B1
            self.given_N = self._indices(given_BQ)
            self.read_R = self._indices(given_BQ & (offsets_Q >= lengths_B1 - reads_B1))

    def spread(self, values_NW: Tensor) -> Tensor:
        """From flat values to rows; padding is zero."""
        if self.given_N is not None:
            flat = values_NW.new_zeros(self.ids_BQ.numel(), values_NW.size(1))
            values_NW = flat.index_copy_(0, self.given_N, values_NW)
        return values_NW.view(*self.ids_BQ.shape, -1)

    def gathered(self, values_BQW: Tensor) -> Tensor:
        """From rows to flat values without padding."""
        flat = values_BQW.reshape(-1, values_BQW.size(-1))
        return flat if self.given_N is None else flat[self.given_N]

    @property
    def refines(self) -> bool:
        return any(span.row.refinement for span in self.spans)

    def refine(self, log_probs_RV: Tensor) -> None:
        """Make the guesses the context of rows with a refinement.

        All positions of such a row are read. The first keeps its id, which is not a guess.
        """
        guesses_RV = log_probs_RV.cpu().numpy()
        start = 0
        for ids_Q, span in zip(self._ids_BQ, self.spans, strict=True):
            count = span.row.read
            if refinement := span.row.refinement:
                own_RV = guesses_RV[start : start + count]
                positions = range(refinement.position, refinement.position + count)
                ids_Q[1:count] = picks(own_RV, [refinement.sampling] * count, positions)[:-1]
            start += count
        self.ids_BQ = self._tensor(self._ids_BQ)

    def refined_ids(self) -> dict[int, np.ndarray]:
        """The ids of refined rows, by request."""
        return {
            span.row.request: ids_Q[: span.length].astype(np.uint16)
            for ids_Q, span in zip(self._ids_BQ, self.spans, strict=True)
            if span.row.refinement
        }

    def _indices(self, chosen_BQ: np.ndarray) -> Tensor | None:
        return None if chosen_BQ.all() else self._tensor(np.flatnonzero(chosen_BQ))

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)


def _padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    padded = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for padded_Q, ids in zip(padded, rows, strict=True):
        padded_Q[: len(ids)] = ids
    return padded
