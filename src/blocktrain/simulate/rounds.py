"""What a coordinator does by itself: take back what is overdue, and merge what is due.

The real one looks four times a second, and whenever something arrives. Here it looks at the moment
when there is something to see.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence

from blocktrain.simulate.agenda import Agenda
from blocktrain.simulate.virtual_block import VirtualBlock, VirtualLease
from blocktrain.simulate.virtual_coordinator import VirtualCoordinator
from blocktrain.swarm import merging_rules


class VirtualRounds:
    def __init__(
        self,
        agenda: Agenda,
        coordinator: VirtualCoordinator,
        merge_seconds: Callable[[int], float],
        mergers: int,
        on_expired: Callable[[VirtualLease], None],
        on_given_up: Callable[[Sequence[VirtualLease]], None],
        on_version: Callable[[VirtualBlock, Sequence[str]], None],
    ) -> None:
        """`merge_seconds`: by the number of updates that are merged."""
        self._agenda, self._coordinator = agenda, coordinator
        self._merge_seconds, self._free_mergers = merge_seconds, mergers
        self._on_expired, self._on_given_up = on_expired, on_given_up
        self._on_version = on_version
        self._due: deque[VirtualBlock] = deque()
        self._looks: dict[int, float] = {}  # by block, when it will be looked at again

    def watch(self, lease: VirtualLease) -> None:
        """See to it that a lease does not outlive its deadline, or a silent worker."""
        ends = self._coordinator.ends_at(lease)
        self._agenda.at(math.nextafter(ends, math.inf), self._expire, lease)

    def look(self, block: VirtualBlock) -> None:
        """Something has changed: merge, or look again when that will be due."""
        if block.merging or block in self._due or self._nothing_new(block):
            return
        due_at = merging_rules.due_at(block, self._coordinator.swarm)
        if due_at <= self._agenda.now:
            self._looks.pop(block.index, None)
            self._due.append(block)
            self._merge_next()
        elif due_at < math.inf and self._looks.get(block.index) != due_at:
            self._looks[block.index] = due_at
            self._agenda.at(due_at, self._look_again, block, due_at)

    def _nothing_new(self, block: VirtualBlock) -> bool:
        """Whether its updates are due at a time that is known, however many more arrive: the plan
        counts from the one that made the quorum, of those that are not late. Saves asking it at
        every arrival."""
        quorum = self._coordinator.swarm.quorum
        if block.index not in self._looks or len(block.workers) < quorum:
            return False
        return block.open_leases > 0 and len(block.fresh_since) > quorum

    def _look_again(self, block: VirtualBlock, planned: float) -> None:
        if self._looks.get(block.index) == planned:
            del self._looks[block.index]
            self.look(block)

    def _expire(self, lease: VirtualLease) -> None:
        if not lease.held:
            return
        if self._coordinator.expire(lease, self._agenda.now):
            self._on_expired(lease)
            self.look(lease.block)
        else:  # its deadline was moved, or its worker came back
            self.watch(lease)

    def _merge_next(self) -> None:
        while self._free_mergers and self._due:
            block = self._due.popleft()
            before = block.pending
            merged = self._coordinator.begin_merge(block, self._agenda.now)
            if len(block.pending) < len(before):
                kept = set(block.pending)
                self._on_given_up([lease for lease in before if lease not in kept])
            if merged:
                self._free_mergers -= 1
                published = self._agenda.now + self._merge_seconds(len(merged))
                self._agenda.at(published, self._publish, block, merged)

    def _publish(self, block: VirtualBlock, merged: Sequence[VirtualLease]) -> None:
        senders = tuple(block.senders)
        self._coordinator.publish(block, merged, self._agenda.now)
        self._free_mergers += 1
        self._on_version(block, senders)
        self.look(block)
        self._merge_next()
