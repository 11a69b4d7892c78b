"""The key-value cache: every layer has a pool, and every sequence a slot in all pools.

A batch is a view of some slots: rows that start at different positions and have different lengths,
padded to the longest. A row overwrites its slot from its start on, which is how drafts are rolled
back. Pools grow by doubling. Knows nothing of requests, limits or time.

Shapes: S slots, T positions of room, B rows, Q new positions of the longest row, N new positions
of all rows, D width, H heads, K = D / H.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

FIRST_SLOTS, FIRST_ROOM = 1, 64


class CacheShape(NamedTuple):
    """What a layer caches of each position."""

    heads: int  # of keys and values; there may be fewer of them than of queries
    key_width: int  # of one head
    value_width: int
    input_width: int = 0  # of the layer's own inputs, if it reads earlier ones; 0: none are cached
    inputs_before: int = 0  # how many earlier inputs each position reads

    @property
    def numbers(self) -> int:
        return self.heads * (self.key_width + self.value_width) + self.input_width


class CachedPositions(NamedTuple):
    """Keys and values that the queries of new positions read, and which of them each may see."""

    k_BHTK: Tensor
    v_BHTK: Tensor
    causal: bool  # queries and keys cover the same positions
    mask: Tensor | None  # B x 1 x Q x T; None: all that `causal` leaves


@dataclass(frozen=True)
class BatchPlaces:
    """Where a batch's new positions are written and what they see; the same for every layer."""

    slots: slice | Tensor
    end: int  # positions of the row that ends last
    positions_BQ: Tensor
    given_N: Tensor | None  # indices of the B x Q inputs that are no padding; None: all
    written_N: Tensor  # their indices in a pool of keys or values
    inputs_N: Tensor  # their indices in the pool of the local filter's inputs
    before_BC: Tensor  # indices of the filter inputs just before each row
    causal: bool
    mask_B1QT: Tensor | None

    def chosen(self, pool_STD: Tensor) -> Tensor:
        """The batch's slots up to `end`; consecutive slots are not copied."""
        return pool_STD[:, : self.end][self.slots]

    def write(self, pool_STD: Tensor, places_N: Tensor, new_BQD: Tensor) -> None:
        width = pool_STD.size(-1)
        flat = new_BQD.reshape(-1, width)
        if self.given_N is not None:
            flat = flat[self.given_N]
        pool_STD.view(-1, width).index_copy_(0, places_N, flat)


class LayerPool:
    """One layer's pools; zeros stand before the first of the inputs that it reads again."""

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


class LayerCache:
    """One layer's cache as one batch sees it."""

    def __init__(self, pool: LayerPool, places: BatchPlaces) -> None:
        self.pool = pool
        self.places = places

    def positions(self, count: int) -> Tensor:
        """B x `count` positions of the next inputs in their sequences."""
        assert count == self.places.positions_BQ.size(1)
        return self.places.positions_BQ

    def extend_inputs(self, h_BTD: Tensor) -> Tensor:
        """Store the local filter's new inputs; returns them behind the inputs before."""
        pool = self.pool.h_SID
        before = pool.view(-1, pool.size(-1))[self.places.before_BC]
        self.places.write(pool, self.places.inputs_N, h_BTD)
        return torch.cat([before, h_BTD], dim=1)

    def append(self, k_BHTK: Tensor, v_BHTK: Tensor) -> CachedPositions:
        """Store new keys and values; returns all that the batch reads."""
        places, pool = self.places, self.pool
        places.write(pool.k_STD, places.written_N, k_BHTK.transpose(1, 2))
        places.write(pool.v_STD, places.written_N, v_BHTK.transpose(1, 2))
        k, v = self._by_head(pool.k_STD), self._by_head(pool.v_STD)
        return CachedPositions(k, v, places.causal, places.mask_B1QT)

    def _by_head(self, pool_STD: Tensor) -> Tensor:
        chosen = self.places.chosen(pool_STD)
        return chosen.view(*chosen.shape[:2], self.pool.heads, -1).transpose(1, 2)


@dataclass(frozen=True)
class BlockCache:
    """The caches of a block's layers and of its private tail's, as one batch sees them."""

    layers: list[LayerCache]
    tail: list[LayerCache]


class SlotCache:
    """The pools of consecutive blocks; `shapes` are each block's numbers of layers and of tail
    layers, `layer` is what each of them caches."""

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
        self._blocks = [
            ([LayerPool(layer, device, dtype) for _ in range(layers)],
             [LayerPool(layer, device, dtype) for _ in range(tail)])
            for layers, tail in shapes
        ]  # fmt: skip

    @staticmethod
    def slot_bytes(
        window: int, layer: CacheShape, shapes: Sequence[tuple[int, int]], dtype: torch.dtype
    ) -> int:
        """Bytes of a slot that holds a whole window."""
        layers = sum(depth + tail for depth, tail in shapes)
        return layer.numbers * layers * window * dtype.itemsize

    def view(
        self, slots: Sequence[int], starts: Sequence[int], lengths: Sequence[int]
    ) -> list[BlockCache]:
        """Each block's cache for one batch: rows of `lengths` new positions from `starts` on."""
        end = max(map(add, starts, lengths))
        if end > self.window:
            raise ValueError(f"position {end} is past the model's window")
        self._make_room(max(slots) + 1, end)
        self._wipe([slot for slot, start in zip(slots, starts, strict=True) if not start])
        places = self._places(slots, starts, lengths, end)
        return [
            BlockCache(
                [LayerCache(pool, places) for pool in layers],
                [LayerCache(pool, places) for pool in tail],
            )
            for layers, tail in self._blocks
        ]

    def _make_room(self, slots: int, room: int) -> None:
        if slots <= self.slots and room <= self.room:
            return
        self.slots = _doubled(self.slots, slots, FIRST_SLOTS)
        self.room = min(_doubled(self.room, room, FIRST_ROOM), self.window)
        for layers, tail in self._blocks:
            for layer in (*layers, *tail):
                layer.grow(self.slots, self.room)

    def _wipe(self, slots: Sequence[int]) -> None:
        """Zero slots before a new context: a mask hides old numbers, but not an old NaN."""
        if not slots:
            return
        chosen = self._consecutive(slots)
        for layers, tail in self._blocks:
            for layer in (*layers, *tail):
                layer.k_STD[chosen] = 0
                layer.v_STD[chosen] = 0

    def _places(
        self, slots: Sequence[int], starts: Sequence[int], lengths: Sequence[int], end: int
    ) -> BatchPlaces:
        count, taps = max(lengths), self.layer.inputs_before
        rows_B1, starts_B1 = np.array(slots)[:, None], np.array(starts)[:, None]
        offsets_Q = np.arange(count)
        given = None
        positions_BQ = starts_B1 + offsets_Q
        written = rows_B1 * self.room + positions_BQ
        inputs = written + (rows_B1 + 1) * taps
        if min(lengths) < count:
            given_BQ = offsets_Q < np.array(lengths)[:, None]
            given = self._tensor(np.flatnonzero(given_BQ))
            written, inputs = written[given_BQ], inputs[given_BQ]
        before_BC = rows_B1 * (taps + self.room) + starts_B1 + np.arange(taps)
        return BatchPlaces(
            self._consecutive(slots),
            end,
            self._tensor(np.minimum(positions_BQ, self.window - 1)),
            given,
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
        """A query sees positions up to its own; padding sees more, and is never read."""
        if not any(starts) or min(starts) == end - 1:
            return None  # all causal, or one new position each, which sees everything
        seen_BQT = np.arange(end) <= positions_BQ[:, :, None]
        return self._tensor(seen_BQT[:, None])

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)


def _doubled(size: int, needed: int, first: int) -> int:
    return size if size >= needed else max(first, 1 << (needed - 1).bit_length())


def _grown(pool: Tensor, slots: int, room: int) -> Tensor:
    grown = pool.new_zeros(slots, room, pool.size(2))
    grown[: pool.size(0), : pool.size(1)] = pool
    return grown
