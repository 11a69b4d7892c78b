"""Keys and values of the clean stream, kept between steps of generation.

The clean stream never sees sigma, so what is cached here serves every noise draw. A cache grows
by doubling. It knows where new positions stand and what they may see; a layer knows neither.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class CachedPositions(NamedTuple):
    """What queries at the newest positions read, and how much of it each may see."""

    k_BHTK: Tensor
    v_BHTK: Tensor
    causal: bool  # queries and keys cover the same positions
    mask: Tensor | None  # one for all sequences, or one each; None: everything that `causal` leaves


class LayerMemory(Protocol):
    """What a layer asks of its cache."""

    def positions(self, count: int) -> slice | Tensor:
        """Where the next `count` inputs stand: the same for all sequences, or B x T."""
        ...

    def extend_tail(self, h_BTD: Tensor, count: int) -> Tensor:
        """The last `count` inputs before these, then these; remembers them."""
        ...

    def append(self, k_BHTK: Tensor, v_BHTK: Tensor) -> CachedPositions:
        """Add new positions."""
        ...


class BlockMemory(Protocol):
    @property
    def layers(self) -> Sequence[LayerMemory]: ...

    @property
    def tail(self) -> Sequence[LayerMemory]: ...


class LayerCache:
    """One layer's keys, values and the last few inputs its local filter needs."""

    def __init__(self) -> None:
        self.length = 0
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self._tail: Tensor | None = None

    def positions(self, count: int) -> slice:
        return slice(self.length, self.length + count)

    def append(self, k_BHTK: Tensor, v_BHTK: Tensor) -> CachedPositions:
        past, new = self.length, k_BHTK.size(2)
        end = past + new
        self._k = _with_room(self._k, k_BHTK, end)
        self._v = _with_room(self._v, v_BHTK, end)
        self._k[:, :, past:end] = k_BHTK
        self._v[:, :, past:end] = v_BHTK
        self.length = end
        mask = None
        if past and new > 1:
            mask = torch.ones(new, end, dtype=torch.bool, device=k_BHTK.device).tril(past)
        return CachedPositions(self._k[:, :, :end], self._v[:, :, :end], past == 0, mask)

    def extend_tail(self, h_BTD: Tensor, count: int) -> Tensor:
        tail = self._tail
        if tail is None:
            tail = h_BTD.new_zeros(h_BTD.size(0), count, h_BTD.size(2))
        extended = torch.cat([tail, h_BTD], dim=1)
        self._tail = extended[:, -count:]
        return extended


class BlockCache:
    """The caches of all layers of one block, and how many positions they hold.

    A private tail's are apart: it may be left out.
    """

    def __init__(self, layers: int, tail: int = 0) -> None:
        self.layers = [LayerCache() for _ in range(layers)]
        self.tail = [LayerCache() for _ in range(tail)]

    @property
    def length(self) -> int:
        return self.layers[0].length


def _with_room(held: Tensor | None, like: Tensor, needed: int) -> Tensor:
    if held is not None and held.size(2) >= needed:
        return held
    batch, heads, _, width = like.shape
    grown = like.new_zeros(batch, heads, max(64, 1 << (needed - 1).bit_length()), width)
    if held is not None:
        grown[:, :, : held.size(2)] = held
    return grown
