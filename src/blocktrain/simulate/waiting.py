"""Workers without a lease, and when they get one.

A waiting worker asks again every few seconds. Only the request that succeeds is simulated: an event
that may bring work wakes the workers that it concerns, and each of them asks within its waiting
time. Of n workers that each wait `seconds`, the first asks after seconds / (n + 1) on average.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from blocktrain.simulate.virtual_block import VirtualBlock, VirtualLease
from blocktrain.simulate.virtual_worker import Activity, VirtualWorker
from blocktrain.swarm import assignment, lease_terms

if TYPE_CHECKING:
    from blocktrain.simulate.simulation import Simulation


class IdleWorkers:
    """Waiting workers in the order of their requests. Most wait for their own update to be merged.
    They are grouped by block and skipped while the block has batches to lease, since they are many
    and batches are often returned."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._awaited: dict[str, int | None] = {}
        # By awaited block. OrderedDicts, since a dict finds its first key slowly after deletions.
        self._groups: defaultdict[int | None, OrderedDict[str, None]] = defaultdict(OrderedDict)

    def __contains__(self, worker: str) -> bool:
        return worker in self._seconds

    def __len__(self) -> int:
        return len(self._seconds)

    def add(self, worker: str, seconds: float, awaited: int | None) -> None:
        """`seconds`: time until it asks again. `awaited`: the block whose merge of its own update
        it waits for, if any."""
        self._seconds[worker] = seconds
        self._join(worker, awaited)

    def remove(self, worker: str) -> float | None:
        """Remove a worker and return its waiting time; None if it does not wait."""
        if worker not in self._seconds:
            return None
        del self._groups[self._awaited.pop(worker)][worker]
        return self._seconds.pop(worker)

    def awaiting(self, block: int) -> Sequence[str]:
        return tuple(self._groups[block])

    def first(
        self,
        is_open: Callable[[int], bool],
        awaited_block: Callable[[str], int | None],
        has_work: Callable[[str], bool],
    ) -> str | None:
        """The first worker for which there is work. Workers that await an open block are
        skipped."""
        first = self._first_free(awaited_block, has_work)
        for block, workers in self._groups.items():
            if first is None and block is not None and not is_open(block):
                first = next(filter(has_work, workers), None)
        return first

    def _first_free(
        self, awaited_block: Callable[[str], int | None], has_work: Callable[[str], bool]
    ) -> str | None:
        """Of the workers that await no block, the first for which there is work. Workers that turn
        out to await a block are moved to its group."""
        first, moved = None, []
        for worker in self._groups[None]:
            block = awaited_block(worker)
            if block is not None:
                moved.append((worker, block))
            elif has_work(worker):
                first = worker
                break
        for worker, block in moved:
            del self._groups[None][worker]
            self._join(worker, block)
        return first

    def update(self, worker: str, awaited_block: Callable[[str], int | None]) -> None:
        """Update which block a worker awaits, after a change of the worker."""
        if worker in self._seconds:
            del self._groups[self._awaited[worker]][worker]
            self._join(worker, awaited_block(worker))

    def update_awaiting(self, block: int, awaited_block: Callable[[str], int | None]) -> None:
        """After a change of a block: find again which block, if any, each worker awaits that
        awaited this one."""
        for worker in self._groups.pop(block, ()):
            self._join(worker, awaited_block(worker))

    def _join(self, worker: str, awaited: int | None) -> None:
        self._awaited[worker] = awaited
        self._groups[awaited][worker] = None


class Waiting:
    """Lets workers wait, and ask again when there is work for them."""

    def __init__(self, simulation: "Simulation") -> None:
        self._simulation, self.idle = simulation, IdleWorkers()
        self._events, self._coordinator = simulation.events, simulation.coordinator
        self._encodes = simulation.encodes

    def begin(self, worker: VirtualWorker) -> None:
        """Make a worker wait."""
        activity = Activity.TRANSFERRING if worker.sending else Activity.WAITING
        self._simulation.begin(worker, activity)
        awaited, seconds = self._awaited_block(worker.name), assignment.MERGE_WAIT
        if awaited is None:  # otherwise it has an update of that block
            seconds = assignment.wait_seconds(self._coordinator.blocks, worker.name)
        self.idle.add(worker.name, seconds, awaited)

    def measured(self, worker: VirtualWorker) -> None:
        """Wake a worker if it need not wait for its update any more, now that it has measured its
        transfers."""
        self.idle.update(worker.name, self._awaited_block)
        self._wake_if_work(worker.name)

    def version_published(self, block: VirtualBlock, senders: Sequence[str]) -> None:
        """Wake the workers that waited for this version, unless the block has no batches left: then
        they have looked for other work already."""
        if block.to_hand_out:
            for name in senders:
                self._wake(name)
        self.idle.update_awaiting(block.index, self._awaited_block)
        if self._coordinator.order.waits:  # another block may be open now
            blocks = self._coordinator.blocks
            following = blocks[(block.index + 1) % len(blocks)]
            self.text_returned(following, following.to_hand_out)

    def text_taken(self, block: VirtualBlock) -> None:
        """Wake the workers that await a block without batches, if other blocks have some."""
        if not block.to_hand_out and self._coordinator.has_text:
            for name in self.idle.awaiting(block.index):
                self._wake_if_work(name)

    def arrival_changed(self, lease: VirtualLease) -> None:
        """Wake the workers that wait for the merge if the block's last update is now expected so
        late that they can train until then."""
        if lease.block.arrives_last(lease):
            self._let_train_on(lease.block)

    def leases_lost(self, leases: Sequence[VirtualLease]) -> None:
        """Wake the workers of these leases of one block: their updates will not count, so they have
        nothing to wait for. Wake others too, since the batches may be available again."""
        for lease in leases:
            self._wake_if_work(lease.worker)
        self.text_returned(leases[0].block, sum(lease.steps for lease in leases))

    def text_returned(self, block: VirtualBlock, steps: int) -> None:
        """Wake workers, since this many steps can be leased again."""
        if not block.to_hand_out:
            return
        if self._encodes and len(block.workers) == 1:  # a block's only worker need not wait
            self._wake_if_work(next(iter(block.workers)))
        if self._encodes and block.to_hand_out <= steps:  # there was none before
            self._let_train_on(block)
        self._wake_first(self._events.now + assignment.IDLE_WAIT)

    def _let_train_on(self, block: VirtualBlock) -> None:
        useful_end = lease_terms.earliest_useful_end(
            self._coordinator.swarm, self._events.now, transfer_seconds=0.0
        )
        if block.busy_until > useful_end:
            for name in self.idle.awaiting(block.index):
                self._wake_if_work(name)

    def _wake_first(self, until: float) -> None:
        """Schedule a request of the first waiting worker for which there is work. `until`: when
        the last waiting worker has asked."""
        if not self._coordinator.has_text:
            return
        waiting, now = len(self.idle), self._events.now
        name = self.idle.first(self._coordinator.is_open, self._awaited_block, self._has_work)
        if name is not None:
            worker, seconds = self._simulation.workers[name], self.idle.remove(name)
            assert seconds is not None
            asks_at = now + min(seconds, until - now) / (waiting + 1)
            self._events.at(asks_at, self._ask_and_wake_next, worker, worker.session, until)

    def _ask_and_wake_next(self, worker: VirtualWorker, session: int, until: float) -> None:
        self._simulation.lifecycle.ask(worker, session)
        self._wake_first(until)

    def _wake_if_work(self, name: str) -> None:
        if name in self.idle and self._has_work(name):
            self._wake(name)

    def _wake(self, name: str) -> None:
        """Schedule a waiting worker's next request, at a random time within its waiting time."""
        seconds = self.idle.remove(name)
        if seconds is not None:
            worker = self._simulation.workers[name]
            asks_at = self._events.now + self._simulation.chance.within(seconds)
            self._events.at(asks_at, self._simulation.lifecycle.ask, worker, worker.session)

    def _has_work(self, name: str) -> bool:
        request = self._simulation.workers[name].request
        return self._coordinator.has_work(request, self._events.now)

    def _awaited_block(self, name: str) -> int | None:
        """The block whose next version a worker waits for, as it will contain its update."""
        worker, blocks = self._simulation.workers[name], self._coordinator.blocks
        block = worker.loaded_block
        if block is None or not assignment.waits_for_own_update(
            self._coordinator.swarm, worker.transfer_seconds
        ):
            return None
        lease = worker.loaded_lease.lease if worker.loaded_lease and self._encodes else None
        return block if assignment.own_update_is_pending(blocks[block], name, lease) else None
