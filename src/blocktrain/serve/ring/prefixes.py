"""Contexts that are kept after their requests have ended, so that later requests that begin alike
need not compute them again."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

LEAST_SHARED = 16  # positions; to share fewer is not worth a copy


@dataclass(frozen=True)
class CopiedContext:
    """The first positions of a context: their ids, and what every layer has cached of them."""

    ids: np.ndarray
    layers: Sequence[Tensor]

    @property
    def bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in self.layers)


class KeptContexts:
    """Contexts by request, in bounded memory: those go first that were not used for longest."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._contexts: dict[int, CopiedContext] = {}  # newest last
        self.bytes = 0

    def length(self, request: int) -> int:
        """Number of positions that are kept of a request."""
        kept = self._contexts.get(request)
        return len(kept.ids) if kept else 0

    def put(self, request: int, context: CopiedContext) -> None:
        self.drop(request)
        if context.bytes > self.most_bytes:
            return
        self._contexts[request] = context
        self.bytes += context.bytes
        while self.bytes > self.most_bytes:
            self.drop(next(iter(self._contexts)))

    def use(self, request: int) -> CopiedContext:
        context = self._contexts[request] = self._contexts.pop(request)
        return context

    def drop(self, request: int) -> None:
        if context := self._contexts.pop(request, None):
            self.bytes -= context.bytes
