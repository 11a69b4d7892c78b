"""Which contexts a router may share: those of ended requests that it and its stages have kept, by
what they begin with. Knows nothing of tensors."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from blocktrain.serve.ring.prefixes import LEAST_SHARED
from blocktrain.serve.router.pipeline import Route

MOST_KEPT = 256  # contexts; memory is limited by each process's own budget


@dataclass(frozen=True, eq=False)
class KeptContext:
    """A context that can be copied. `tenant`: who may, because a fast answer reveals what others
    have asked."""

    key: int
    route: Route
    tenant: str
    ids: np.ndarray


class SharedPrefix(NamedTuple):
    """The first positions of another context; key 0: none."""

    key: int
    length: int


NO_PREFIX = SharedPrefix(0, 0)


def shared_length(first: np.ndarray, second: np.ndarray) -> int:
    """Number of positions at which two contexts begin alike."""
    length = min(len(first), len(second))
    differing = np.flatnonzero(first[:length] != second[:length])
    return int(differing[0]) if differing.size else length


class KeptPrefixes:
    """Kept contexts; those go first that were not used for longest."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._kept: dict[int, KeptContext] = {}  # newest last

    def add(self, context: KeptContext) -> list[KeptContext]:
        """Keep a context. Returns those that are no longer needed: the beginnings of this one, and
        the oldest beyond the limit."""
        dropped = [
            each
            for each in self._kept.values()
            if (each.route, each.tenant) == (context.route, context.tenant)
            and shared_length(each.ids, context.ids) == len(each.ids)
        ]
        self._kept[context.key] = context
        dropped += list(self._kept.values())[: max(0, len(self._kept) - len(dropped) - self._most)]
        return [each for each in dropped if self.remove(each.key)]

    def find(self, tenant: str, route: Route, ids: np.ndarray) -> SharedPrefix:
        """The context that shares the most positions with these ids."""
        best = NO_PREFIX
        for each in self._kept.values():
            if (each.tenant, each.route) == (tenant, route):
                count = shared_length(each.ids, ids)
                if count >= max(LEAST_SHARED, best.length + 1):
                    best = SharedPrefix(each.key, count)
        if best.key:
            self._kept[best.key] = self._kept.pop(best.key)
        return best

    def longest(self, tenant: str, ids: np.ndarray) -> tuple[Route, int]:
        """The route on which the most positions of these ids are kept, and how many."""
        lengths = [
            (shared_length(each.ids, ids), each.route)
            for each in self._kept.values()
            if each.tenant == tenant
        ]
        count, route = max(lengths, default=(0, ()))
        return (route, count) if count >= LEAST_SHARED else ((), 0)

    def remove(self, key: int) -> KeptContext | None:
        return self._kept.pop(key, None)

    def lose(self, address: str) -> None:
        """Forget the contexts of which a stage that is gone had a part."""
        self._kept = {key: each for key, each in self._kept.items() if address not in each.route}
