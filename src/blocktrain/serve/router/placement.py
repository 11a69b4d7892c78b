"""Where a request is computed: on which stages, and as a copy of which other request's context."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from blocktrain.serve.ring.prefixes import LEAST_SHARED
from blocktrain.serve.router.active_request import ActiveRequest
from blocktrain.serve.router.pipeline import Pipeline, Route
from blocktrain.serve.router.shared_prefixes import (
    NO_PREFIX,
    KeptContext,
    KeptPrefixes,
    SharedPrefix,
    shared_length,
)


class Release(NamedTuple):
    """A context that its request no longer needs. Its first `keep` positions may be copied."""

    key: int
    route: Route
    keep: int = 0


class Placement:
    """`copyable`: how many positions of a context the first block still has; `chunk`: how many
    positions of prompts a turn reads."""

    def __init__(self, pipeline: Pipeline, copyable: Callable[[int], int], chunk: int) -> None:
        self._pipeline, self._copyable, self._chunk = pipeline, copyable, chunk
        self._kept = KeptPrefixes()

    def route(self, active: ActiveRequest, others: Sequence[ActiveRequest]) -> Route | None:
        """The route with the least work. Or one that has kept the beginning of the prompt, if this
        saves more turns than the route is busier."""
        work = self._work(others)
        least = self._pipeline.route(work)
        if least is None:
            return None
        kept, count = self._kept.longest(_tenant(active), _context(active))
        if not count or not self._pipeline.is_open(kept):
            return least
        return kept if _most(work, kept) - _most(work, least) <= count / self._chunk else least

    def prefix(self, active: ActiveRequest, others: Sequence[ActiveRequest]) -> SharedPrefix | None:
        """What a new context begins with a copy of; None if another request still reads it."""
        assert active.route is not None
        tenant, ids = _tenant(active), _context(active)
        best, coming = self._kept_prefix(tenant, active.route, ids), 0
        for other in others:
            same = _tenant(other) == tenant and other.route == active.route
            if same and other.key and not (other.lost or other.failed):
                shared = shared_length(other.ids, ids)
                coming = max(coming, shared)
                if (count := min(shared, other.sent_positions)) > best.length:
                    best = SharedPrefix(other.key, count)
        if coming > max(best.length, LEAST_SHARED - 1):
            return None
        return best if best.length >= LEAST_SHARED else NO_PREFIX

    def keep(self, active: ActiveRequest) -> list[Release]:
        """Keep the context of a request that has ended, for others that begin alike. Returns what
        to release: this one, and those that are no longer worth their memory. Nothing if the
        context is too short, or incomplete."""
        if not active.key or active.route is None or active.lost or active.failed:
            return []
        ids = active.decoding.cached_ids
        if len(ids) < LEAST_SHARED:
            return []
        dropped = self._kept.add(KeptContext(active.key, active.route, _tenant(active), ids))
        kept = Release(active.key, active.route, len(ids))
        return [kept, *(Release(each.key, each.route) for each in dropped)]

    def forget(self, key: int) -> None:
        """A stage may have dropped this context."""
        self._kept.remove(key)

    def lose(self, address: str) -> None:
        self._kept.lose(address)

    def _kept_prefix(self, tenant: str, route: Route, ids: np.ndarray) -> SharedPrefix:
        """The longest prefix of an ended request that the first block still has too."""
        while (best := self._kept.find(tenant, route, ids)).key:
            if self._copyable(best.key) >= best.length:
                break
            self._kept.remove(best.key)
        return best

    def _work(self, requests: Sequence[ActiveRequest]) -> Counter[str]:
        """What each stage has to do, in turns: one for the next step of each request, and those in
        which the rest of its prompt is read."""
        work: Counter[str] = Counter()
        for active in requests:
            if active.route:
                left = active.proposal.context if active.proposal else 0
                turns = 1 + active.chunks + math.ceil(left / self._chunk)
                work.update(dict.fromkeys(active.route, turns))
        return work


def _tenant(active: ActiveRequest) -> str:
    return active.decoding.request.tenant


def _context(active: ActiveRequest) -> np.ndarray:
    """The ids that the request reads before its first prediction."""
    proposal = active.propose()
    return proposal.ids[: proposal.context]


def _most(work: Counter[str], route: Route) -> int:
    """The work of the busiest stage of a route."""
    return max((work[address] for address in route), default=0)
