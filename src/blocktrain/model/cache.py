"""The key-value cache: every layer has a pool, and a sequence has the same slot in all pools.

A batch is a view of some slots. Its rows may start at different positions and differ in length;
they are padded to the longest. A row overwrites its slot from its start on, which is how drafts are
rolled back. Pools grow by doubling. Limits, and which request has which slot, are up to the caller.

Shapes: S slots, T positions per slot, B rows, Q new positions of the longest row, N new positions
of all rows, D width, H heads, K = D / H.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from operator import add
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

FIRST_SLOTS, FIRST_ROOM = 1, 64


class CacheShape(NamedTuple):
    """What a layer caches per position."""

    heads: int  # of keys and values; there may be more heads of queries
    key_width: int  # of one head
    value_width: int
    input_width: int = 0  # of the local filter's inputs; 0: there is no filter
    inputs_before: int = 0  # how many earlier inputs the filter reads at each position

    @property
    def numbers(self) -> int:
        return self.heads * (self.key_width + self.value_width) + self.input_width


class CachedPositions(NamedTuple):
    """Keys and values, and which of them the query of each new position may attend to."""

    k_BHTK: Tensor
    v_BHTK: Tensor
    causal: bool  # queries and keys cover the same positions
    mask: Tensor | None  # B x 1 x Q x T; None: a causal mask if `causal`, else no mask


@dataclass(frozen=True)
class BatchPlaces:
    """Where a batch's new positions are stored and what they attend to; the same in every layer."""

    slots: slice | Tensor
    end: int  # length of the longest sequence, new positions included
    positions_BQ: Tensor
    unpadded_N: Tensor | None  # indices of the B x Q inputs that are not padding; None: all
    written_N: Tensor  # their indices in a pool of keys or values
    inputs_N: Tensor  # their indices in the pool of the local filter's inputs
    before_BC: Tensor  # indices of the filter inputs just before each row
    causal: bool
    mask_B1QT: Tensor | None

    def write(self, pool_STD: Tensor, places_N: Tensor, new_BQD: Tensor) -> None:
        width = pool_STD.size(-1)
        flat = new_BQD.reshape(-1, width)
        if self.unpadded_N is not None:
            flat = flat[self.unpadded_N]
        pool_STD.view(-1, width).index_copy_(0, places_N, flat)


class LayerPool:
    """One layer's pools: keys, values, and inputs of the local filter. Zeros stand before the first
    input."""

    def __init__(self, shape: CacheShape, device: torch.device, dtype: torch.dtype) -> None:
        def pool(room: int, width: int) -> Tensor:
            return torch.zeros(0, room, width, device=device, dtype=dtype)

        self.heads, self.before = shape.heads, shape.inputs_before
        self.k_STD = pool(0, shape.heads * shape.key_width)
        self.v_STD = pool(0, shape.heads * shape.value_width)
        self.h_SID = pool(self.before, shape.input_width)

    def grow(self, slots: int, room: int) -> None:
        self.k_STD = _grown(self.k_STD, slots, room)
        self.v_STD = _grown(self.v_STD, slots, room)
        self.h_SID = _grown(self.h_SID, slots, self.before + room if self.before else 0)


@dataclass(frozen=True)
class LayerCache:
    """One layer's cache, for one batch."""

    pool: LayerPool
    places: BatchPlaces

    def positions(self, count: int) -> Tensor:
        """The positions of each sequence's next `count` inputs, B x `count`."""
        assert count == self.places.positions_BQ.size(1)
        return self.places.positions_BQ

    def extend_inputs(self, h_BTD: Tensor) -> Tensor:
        """Store new inputs of the local filter. Returns the stored inputs just before them,
        followed by the new ones."""
        pool = self.pool.h_SID
        before = pool.view(-1, pool.size(-1))[self.places.before_BC]
        self.places.write(pool, self.places.inputs_N, h_BTD)
        return torch.cat([before, h_BTD], dim=1)

    def append(self, k_BHTK: Tensor, v_BHTK: Tensor) -> CachedPositions:
        """Store new keys and values. Returns these and the earlier ones."""
        places, pool = self.places, self.pool
        places.write(pool.k_STD, places.written_N, k_BHTK.transpose(1, 2))
        places.write(pool.v_STD, places.written_N, v_BHTK.transpose(1, 2))
        k, v = self._by_head(pool.k_STD), self._by_head(pool.v_STD)
        return CachedPositions(k, v, places.causal, places.mask_B1QT)

    def _by_head(self, pool_STD: Tensor) -> Tensor:
        # A view if the slots are consecutive, else a copy.
        rows = pool_STD[:, : self.places.end][self.places.slots]
        return rows.view(*rows.shape[:2], self.pool.heads, -1).transpose(1, 2)


@dataclass(frozen=True)
class BlockCache:
    """The caches of a block's layers and of its tail's, for one batch."""

    layers: list[LayerCache]
    tail: list[LayerCache]


class SlotCache:
    """The pools of consecutive blocks. `shapes` are each block's numbers of layers and of tail
    layers; `layer` is what each layer caches."""

    def __init__(
        self,
        window: int,
        layer: CacheShape,
        shapes: Sequence[tuple[int, int]],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.window, self.layer, self.device = window, layer, device
        self.slots = self.room = 0
        self._shapes = shapes
        self._pools = [LayerPool(layer, device, dtype) for _ in range(_layer_count(shapes))]

    @staticmethod
    def slot_bytes(
        window: int, layer: CacheShape, shapes: Sequence[tuple[int, int]], dtype: torch.dtype
    ) -> int:
        """Size of a slot for a whole window."""
        return layer.numbers * _layer_count(shapes) * window * dtype.itemsize

    def view(
        self, slots: Sequence[int], starts: Sequence[int], lengths: Sequence[int]
    ) -> list[BlockCache]:
        """Each block's cache for a batch: its rows add `lengths` positions from `starts` on."""
        end = max(map(add, starts, lengths))
        if end > self.window:
            raise ValueError(
                f"{end} positions exceed the model's window of {self.window}; shorten the input"
            )
        self._make_room(max(slots) + 1, end)
        self._wipe([slot for slot, start in zip(slots, starts, strict=True) if not start])
        places = self._places(slots, starts, lengths, end)
        caches = iter([LayerCache(pool, places) for pool in self._pools])
        return [
            BlockCache(list(islice(caches, layers)), list(islice(caches, tail)))
            for layers, tail in self._shapes
        ]

    def context(self, slot: int, count: int) -> list[Tensor]:
        """Views of what the layers have cached of a slot's first `count` positions."""
        return [
            part for pool in self._pools
            for part in (pool.k_STD[slot, :count], pool.v_STD[slot, :count],
                         pool.h_SID[slot, : pool.before + count])
        ]  # fmt: skip

    def fill(self, slot: int, count: int, context: Sequence[Tensor]) -> None:
        """Copy such views, or copies of them, into a slot."""
        self._make_room(slot + 1, count)
        self._wipe([slot])
        for mine, given in zip(self.context(slot, count), context, strict=True):
            mine.copy_(given[: len(mine)])

    def _make_room(self, slots: int, room: int) -> None:
        if slots <= self.slots and room <= self.room:
            return
        self.slots = _doubled(self.slots, slots, FIRST_SLOTS)
        self.room = min(_doubled(self.room, room, FIRST_ROOM), self.window)
        for pool in self._pools:
            pool.grow(self.slots, self.room)

    def _wipe(self, slots: Sequence[int]) -> None:
        """Zero the slots of new sequences: a mask hides old numbers, but not an old NaN."""
        if not slots:
            return
        chosen = self._consecutive(slots)
        for pool in self._pools:
            pool.k_STD[chosen] = 0
            pool.v_STD[chosen] = 0

    def _places(
        self, slots: Sequence[int], starts: Sequence[int], lengths: Sequence[int], end: int
    ) -> BatchPlaces:
        count, taps = max(lengths), self.layer.inputs_before
        rows_B1, starts_B1 = np.array(slots)[:, None], np.array(starts)[:, None]
        offsets_Q = np.arange(count)
        unpadded = None
        positions_BQ = starts_B1 + offsets_Q
        written = rows_B1 * self.room + positions_BQ
        inputs = written + (rows_B1 + 1) * taps
        if min(lengths) < count:
            unpadded_BQ = offsets_Q < np.array(lengths)[:, None]
            unpadded = self._tensor(np.flatnonzero(unpadded_BQ))
            written, inputs = written[unpadded_BQ], inputs[unpadded_BQ]
        before_BC = rows_B1 * (taps + self.room) + starts_B1 + np.arange(taps)
        return BatchPlaces(
            self._consecutive(slots),
            end,
            self._tensor(np.minimum(positions_BQ, self.window - 1)),
            unpadded,
            self._tensor(written.reshape(-1)),
            self._tensor(inputs.reshape(-1)),
            self._tensor(before_BC),
            not any(starts),
            self._mask(starts, positions_BQ, end),
        )

    def _consecutive(self, slots: Sequence[int]) -> slice | Tensor:
        first = slots[0]
        if list(slots) == list(range(first, first + len(slots))):
            return slice(first, first + len(slots))
        return self._tensor(np.array(slots))

    def _mask(self, starts: Sequence[int], positions_BQ: np.ndarray, end: int) -> Tensor | None:
        """Which positions each query attends to: those up to its own. None if no mask is needed.
        What the queries of padding compute is never read."""
        if not any(starts) or min(starts) == end - 1:
            return None  # all rows are causal, or each has one new position at the end
        visible_BQT = np.arange(end) <= positions_BQ[:, :, None]
        return self._tensor(visible_BQT[:, None])

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)


def _layer_count(shapes: Sequence[tuple[int, int]]) -> int:
    return sum(layers + tail for layers, tail in shapes)


def _doubled(size: int, needed: int, first: int) -> int:
    return size if size >= needed else max(first, 1 << (needed - 1).bit_length())


def _grown(pool: Tensor, slots: int, room: int) -> Tensor:
    grown = pool.new_zeros(slots, room, pool.size(2))
    grown[: pool.size(0), : pool.size(1)] = pool
    return grown
