"""What travels around the ring: some positions of several requests, on their way through blocks.

A row is one request's share. What a stage's cache holds from `start` on is dropped first, so that
rejected drafts are rolled back by the next row, and a row from 0 rebuilds everything.

Shapes: N carried positions of all rows, R positions read, D or E the state's width, V bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np
import torch
from torch import Tensor

from blocktrain.errors import CacheFullError, MissingPrefixError
from blocktrain.numerics.sampling import Sampling, picks
from blocktrain.vocabulary import BYTES


@dataclass(frozen=True)
class Refinement:
    """A sweep: every block's successor reads, as its context, what the block guessed.

    `position` is the text position of the first byte guessed.
    """

    sampling: Sampling
    position: int


@dataclass(frozen=True)
class Row:
    request: int
    start: int
    ids: np.ndarray  # uint16, the context at positions start, start + 1, ...
    read: int  # how many of the last positions are predicted
    refinement: Refinement | None = None


@dataclass(frozen=True)
class Work:
    """`state` is features of every position (a cascade) or z of every position read (denoising);
    `readout` the sum of the blocks' log-probabilities so far at the positions read, or with the
    readout "final" the last block's alone."""

    rows: tuple[Row, ...]
    state: np.ndarray
    readout_RV: np.ndarray

    @property
    def read(self) -> int:
        return sum(row.read for row in self.rows)


NO_STATE = np.zeros((0, 0), np.float32)


def started(rows: Sequence[Row], state: np.ndarray = NO_STATE) -> Work:
    """Work before the first block has seen it."""
    read = sum(row.read for row in rows)
    return Work(tuple(rows), state, np.zeros((read, BYTES), np.float32))


def joined(works: Sequence[Work]) -> Work:
    """Several works that go the same way, as one."""
    return Work(
        tuple(row for work in works for row in work.rows),
        np.concatenate([work.state for work in works]),
        np.concatenate([work.readout_RV for work in works]),
    )


def apart(work: Work, carried: Sequence[int]) -> list[Work]:
    """Each row's own work; `carried` says how many positions of state each has."""
    states = np.split(work.state, np.cumsum(carried)[:-1])
    readouts = np.split(work.readout_RV, np.cumsum([row.read for row in work.rows])[:-1])
    return [Work((row,), *own) for row, *own in zip(work.rows, states, readouts, strict=True)]


def finite(work: Work) -> bool:
    return bool(np.isfinite(work.state).all() and np.isfinite(work.readout_RV).all())


def with_ids(row: Row, ids: np.ndarray) -> Row:
    return replace(row, ids=ids)


@dataclass(frozen=True)
class SlotLimits:
    """What a stage's cache may take."""

    requests: int = 256
    cache_bytes: int = 4 << 30
    idle_seconds: float = 30.0  # a request without a step for so long may have to make room


DEFAULT_LIMITS = SlotLimits()


@dataclass
class SlotOwner:
    slot: int
    held: int
    seen: float


class SlotTable:
    def __init__(self, most: int, idle_seconds: float) -> None:
        self.most = most
        self.idle_seconds = idle_seconds
        self._by_request: dict[int, SlotOwner] = {}
        self._free = list(range(most))  # a heap: low slots first, so that those in use lie together

    @property
    def requests(self) -> tuple[int, ...]:
        return tuple(self._by_request)

    def held(self, request: int) -> int:
        """Positions held; 0 for one that is not known."""
        tenant = self._by_request.get(request)
        return tenant.held if tenant else 0

    def admit(self, rows: Sequence[Row], now: float) -> list[SlotOwner]:
        """A tenant per row. All of them or, with an error that names the others, none."""
        if missing := tuple(row.request for row in rows if row.start > self.held(row.request)):
            raise MissingPrefixError("the positions before are not held here", missing)
        for row in rows:
            if tenant := self._by_request.get(row.request):
                tenant.seen = now
        new = [row.request for row in rows if row.request not in self._by_request]
        self._make_room(new, now)
        for request in new:
            self._by_request[request] = SlotOwner(heappop(self._free), 0, now)
        return [self._by_request[row.request] for row in rows]

    def release(self, request: int) -> None:
        """Forget a request; nothing happens to one that is not known."""
        if tenant := self._by_request.pop(request, None):
            heappush(self._free, tenant.slot)

    def _make_room(self, new: Sequence[int], now: float) -> None:
        lacking = len(new) - len(self._free)
        if lacking <= 0:
            return
        idle = sorted(
            (tenant.seen, request)
            for request, tenant in self._by_request.items()
            if now - tenant.seen >= self.idle_seconds and tenant.seen < now
        )
        if len(idle) < lacking:
            unmet = tuple(new[len(self._free) + len(idle) :])
            raise CacheFullError(f"there is room for {self.most} requests, all in use", unmet)
        for _, request in idle[:lacking]:
            self.release(request)


LIKE_LENGTH = 4


@dataclass(frozen=True)
class Share:
    """One row's part of a step: which of the work's carried and read positions are its own."""

    row: Row
    tenant: SlotOwner
    carried: range
    read: range

    @property
    def length(self) -> int:
        return len(self.row.ids)


def like_length(shares: Sequence[Share]) -> list[list[Share]]:
    """Batches of rows that padding does not stretch much, each in the order of its slots."""
    groups: list[list[Share]] = []
    for share in sorted(shares, key=lambda share: share.length):
        if not groups or share.length > LIKE_LENGTH * groups[-1][0].length:
            groups.append([])
        groups[-1].append(share)
    return [sorted(group, key=lambda share: share.tenant.slot) for group in groups]


class RowBatch:
    """`given_N` says which of the B x Q positions are no padding, `read_R` which are read; None
    stands for all of them."""

    def __init__(self, shares: Sequence[Share], device: torch.device) -> None:
        self.shares = shares
        self._device = device
        self._ids_BQ = _padded([share.row.ids for share in shares])
        self.ids_BQ = self._tensor(self._ids_BQ)
        self.given_N: Tensor | None = None
        self.read_R: Tensor | None = None
        if any(share.row.read < self._ids_BQ.shape[1] for share in shares):
            lengths_B1 = np.array([[share.length] for share in shares])
            reads_B1 = np.array([[share.row.read] for share in shares])
            offsets_Q = np.arange(self._ids_BQ.shape[1])
            given_BQ = offsets_Q < lengths_B1
            self.given_N = self._places(given_BQ)
            self.read_R = self._places(given_BQ & (offsets_Q >= lengths_B1 - reads_B1))

    def spread(self, values_NW: Tensor) -> Tensor:
        """Flat values, as rows; padding is zero."""
        if self.given_N is not None:
            flat = values_NW.new_zeros(self.ids_BQ.numel(), values_NW.size(1))
            values_NW = flat.index_copy_(0, self.given_N, values_NW)
        return values_NW.view(*self.ids_BQ.shape, -1)

    def gathered(self, values_BQW: Tensor) -> Tensor:
        """Rows, as flat values without the padding."""
        flat = values_BQW.reshape(-1, values_BQW.size(-1))
        return flat if self.given_N is None else flat[self.given_N]

    @property
    def refines(self) -> bool:
        return any(share.row.refinement for share in self.shares)

    def refine(self, log_probs_RV: Tensor) -> None:
        """What was guessed becomes the context of rows that want it so.

        The first position read keeps its id: it is known. All positions of such a row are read.
        """
        guesses_RV = log_probs_RV.cpu().numpy()
        start = 0
        for ids_Q, share in zip(self._ids_BQ, self.shares, strict=True):
            count = share.row.read
            if refinement := share.row.refinement:
                own_RV = guesses_RV[start : start + count]
                places = range(refinement.position, refinement.position + count)
                ids_Q[1:count] = picks(own_RV, [refinement.sampling] * count, places)[:-1]
            start += count
        self.ids_BQ = self._tensor(self._ids_BQ)

    def refined_ids(self) -> dict[int, np.ndarray]:
        """The ids of rows whose context was guessed, by request."""
        return {
            share.row.request: ids_Q[: share.length].astype(np.uint16)
            for ids_Q, share in zip(self._ids_BQ, self.shares, strict=True)
            if share.row.refinement
        }

    def _places(self, chosen_BQ: np.ndarray) -> Tensor | None:
        return None if chosen_BQ.all() else self._tensor(np.flatnonzero(chosen_BQ))

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)


def _padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    padded = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for padded_Q, ids in zip(padded, rows, strict=True):
        padded_Q[: len(ids)] = ids
    return padded
