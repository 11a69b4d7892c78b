"""Keys and values of many requests at once: ragged batches, and roll-back.

Every request has a slot in every layer's pool; the pools of all blocks of a stage grow together,
by doubling. A batch is a view of some slots: rows of different lengths that start at different
positions, padded to the longest. What a slot holds from a row's start on is written over, so that
rolling back needs no call of its own; a mask hides what is older. Knows nothing of requests, of
limits or of time.

Shapes: S slots, T positions of room, B rows, Q new positions of the longest row, N new positions
of all rows, D width, H heads, K = D / H.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

import numpy as np
import torch
from torch import Tensor

from blocktrain.config import ModelConfig
from blocktrain.model.block import layer_class
from blocktrain.model.kv_cache import CachedPositions
from blocktrain.model.layer import CacheShape

FIRST_SLOTS, FIRST_ROOM = 1, 64


@dataclass(frozen=True)
class Places:
    """Where the new positions of a batch go and what they see: the same for every layer."""

    slots: slice | Tensor
    end: int  # positions the longest row has when all is written
    positions_BQ: Tensor
    given_N: Tensor | None  # which of the B x Q inputs are no padding; None: all
    written_N: Tensor  # their places in a pool of keys or of values
    inputs_N: Tensor  # their places in a pool of the local filter's inputs
    before_BC: Tensor  # the places of the inputs just before each row
    causal: bool
    mask_B1QT: Tensor | None

    def chosen(self, pool_STD: Tensor) -> Tensor:
        """The batch's slots, as far as they are read. Slots in a row are not copied."""
        return pool_STD[:, : self.end][self.slots]

    def write(self, pool_STD: Tensor, places_N: Tensor, new_BQD: Tensor) -> None:
        width = pool_STD.size(-1)
        flat = new_BQD.reshape(-1, width)
        if self.given_N is not None:
            flat = flat[self.given_N]
        pool_STD.view(-1, width).index_copy_(0, places_N, flat)


class SlotLayer:
    """One layer's pools; zeros stand before the first input that the layer reads again."""

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


class SlotLayerView:
    """A layer's memory, as one batch sees it."""

    def __init__(self, layer: SlotLayer, at: Places) -> None:
        self.layer = layer
        self.at = at

    def positions(self, count: int) -> Tensor:
        assert count == self.at.positions_BQ.size(1)
        return self.at.positions_BQ

    def extend_tail(self, h_BTD: Tensor, count: int) -> Tensor:
        pool = self.layer.h_SID
        before = pool.view(-1, pool.size(-1))[self.at.before_BC]
        self.at.write(pool, self.at.inputs_N, h_BTD)
        return torch.cat([before, h_BTD], dim=1)

    def append(self, k_BHTK: Tensor, v_BHTK: Tensor) -> CachedPositions:
        at, layer = self.at, self.layer
        at.write(layer.k_STD, at.written_N, k_BHTK.transpose(1, 2))
        at.write(layer.v_STD, at.written_N, v_BHTK.transpose(1, 2))
        k, v = self._by_head(layer.k_STD), self._by_head(layer.v_STD)
        return CachedPositions(k, v, at.causal, at.mask_B1QT)

    def _by_head(self, pool_STD: Tensor) -> Tensor:
        chosen = self.at.chosen(pool_STD)
        return chosen.view(*chosen.shape[:2], self.layer.heads, -1).transpose(1, 2)


@dataclass(frozen=True)
class SlotBlockView:
    layers: list[SlotLayerView]
    tail: list[SlotLayerView]


class SlotCache:
    """The pools of consecutive blocks; `shapes` has each block's layers and private tail."""

    def __init__(
        self,
        model: ModelConfig,
        shapes: Sequence[tuple[int, int]],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.model, self.device = model, device
        self.layer_shape = layer_class(model).cache_shape(model)
        self.slots = self.room = 0
        self._blocks = [
            ([SlotLayer(self.layer_shape, device, dtype) for _ in range(layers)],
             [SlotLayer(self.layer_shape, device, dtype) for _ in range(tail)])
            for layers, tail in shapes
        ]  # fmt: skip

    @staticmethod
    def slot_bytes(
        model: ModelConfig, shapes: Sequence[tuple[int, int]], dtype: torch.dtype
    ) -> int:
        """What a slot takes once it holds a whole window."""
        layers = sum(depth + tail for depth, tail in shapes)
        numbers = layer_class(model).cache_shape(model).numbers
        return numbers * layers * model.window * dtype.itemsize

    def view(
        self, slots: Sequence[int], starts: Sequence[int], lengths: Sequence[int]
    ) -> list[SlotBlockView]:
        """Each block's memory for one batch; rows are padded to the longest."""
        end = max(map(add, starts, lengths))
        if end > self.model.window:
            raise ValueError(f"position {end} is past the model's window")
        self._make_room(max(slots) + 1, end)
        self._wipe([slot for slot, start in zip(slots, starts, strict=True) if not start])
        at = self._places(slots, starts, lengths, end)
        return [
            SlotBlockView(
                [SlotLayerView(layer, at) for layer in layers],
                [SlotLayerView(layer, at) for layer in tail],
            )
            for layers, tail in self._blocks
        ]

    def _make_room(self, slots: int, room: int) -> None:
        if slots <= self.slots and room <= self.room:
            return
        self.slots = _doubled(self.slots, slots, FIRST_SLOTS)
        self.room = min(_doubled(self.room, room, FIRST_ROOM), self.model.window)
        for layers, tail in self._blocks:
            for layer in (*layers, *tail):
                layer.grow(self.slots, self.room)

    def _wipe(self, slots: Sequence[int]) -> None:
        """For a fresh context: a mask hides whatever number was there, but not what is none."""
        if not slots:
            return
        chosen = self._consecutive(slots)
        for layers, tail in self._blocks:
            for layer in (*layers, *tail):
                layer.k_STD[chosen] = 0
                layer.v_STD[chosen] = 0

    def _places(
        self, slots: Sequence[int], starts: Sequence[int], lengths: Sequence[int], end: int
    ) -> Places:
        count, taps = max(lengths), self.layer_shape.inputs_before
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
        return Places(
            self._consecutive(slots),
            end,
            self._tensor(np.minimum(positions_BQ, self.model.window - 1)),
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
        """A query sees what stands up to its own place; padding sees more, and is not read."""
        if not any(starts) or min(starts) == end - 1:
            return None  # plainly causal, or one new position each that sees everything
        seen_BQT = np.arange(end) <= positions_BQ[:, :, None]
        return self._tensor(seen_BQT[:, None])

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)


def _doubled(held: int, needed: int, first: int) -> int:
    return held if held >= needed else max(first, 1 << (needed - 1).bit_length())


def _grown(pool: Tensor, slots: int, room: int) -> Tensor:
    grown = pool.new_zeros(slots, room, pool.size(2))
    grown[: pool.size(0), : pool.size(1)] = pool
    return grown
