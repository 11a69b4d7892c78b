"""What can be seen of a run from outside: status, events, scores."""

import math
import threading
import time
from collections import Counter as Counted
from collections.abc import Callable, Iterator, Sequence
from typing import get_args

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from blocktrain.coordinator import traffic
from blocktrain.coordinator.members import Caller, Members
from blocktrain.coordinator.run import Run
from blocktrain.errors import RefusedError
from blocktrain.ledger.rows import WorkerRow
from blocktrain.ledger.transaction import Transaction
from blocktrain.protocol.messages import (
    MOST_DIFFERENCES,
    BlobAnswer,
    BlockStatus,
    Differences,
    Event,
    Moved,
    Score,
    Status,
    WorkerState,
    WorkerStatus,
)
from blocktrain.swarm.state import BlockState

LOST_AFTER = 90.0  # seconds without a word from a worker that has something to do
AWAY_AFTER = 20.0  # from one that has not: it would have asked again
URL_SECONDS = 3600
NO_SCORE = "not scored yet; `invite new --evaluate` makes an invite for `worker INVITE --evaluate`"


class Reports:
    def __init__(self, run: Run, members: Members) -> None:
        self.run, self.members = run, members

    def status(self) -> Status:
        now = self.run.clock()
        with self.run.ledger.read() as tx:
            row = tx.run()
            moved = tx.events.traffic()
            of_blocks = traffic.sum_traffic((block, here) for (_, block), here in moved.items())
            of_workers = traffic.sum_traffic((worker, here) for (worker, _), here in moved.items())
            blocks = tuple(
                self._block(tx, state, of_blocks.get(state.index, traffic.NOTHING))
                for state in tx.blocks.states()
            )
            assert row is not None
            held = {lease.worker: lease.block for lease in tx.leases.held()}
            lost = tx.members.lost_workers()
            workers = tuple(
                self._worker(
                    worker,
                    held.get(worker.id),
                    _state(worker, worker.id in held, worker.id in lost, bool(row.finished), now),
                    of_workers.get(worker.id, traffic.NOTHING),
                    now,
                )
                for worker in tx.members.workers()
            )
            score = tx.events.newest_score(None)
        return Status(
            run=self.run.id,
            state="finished" if row.finished else "running",
            ce=score.ce if score else None,
            ce_note="" if score else NO_SCORE,
            codec=self.run.config.swarm.codec,
            blocks=blocks,
            workers=workers,
            seconds=(row.finished or now) - self.run.created,
        )

    def blob(self, name: str) -> BlobAnswer:
        """A blob's recipe, with an address for each chunk where the store has them."""
        recipe = self.run.blobs.recipe(name)
        urls = {chunk: self.run.chunks.get_url(chunk, URL_SECONDS) for chunk in recipe.chunks}
        known = {chunk: url for chunk, url in urls.items() if url is not None}
        return BlobAnswer(recipe=recipe, urls=known or None)

    def differences(self, block: int, after: int, to: int) -> Differences:
        """What leads from version `after` of a block to version `to`, if all of it is kept."""
        wanted = range(after + 1, to + 1)
        with self.run.ledger.read() as tx:
            kept = tx.versions.deltas(block)
        if len(wanted) > MOST_DIFFERENCES or not all(version in kept for version in wanted):
            return Differences(differences=())
        return Differences(differences=tuple(kept[version] for version in wanted))

    def events(self, after: int, most: int) -> list[Event]:
        with self.run.ledger.read() as tx:
            return tx.events.after(after, most)

    def last_event(self) -> int:
        with self.run.ledger.read() as tx:
            return tx.events.last_number()

    def score(self, caller: Caller, told: Score) -> None:
        if caller.role != "evaluate":
            raise RefusedError("forbidden", "scores come from workers with the evaluate role")
        if told.block is not None and told.block >= self.run.config.block_count:
            raise RefusedError("not_found", f"there is no block {told.block}")
        scored = self.run.config.block_count if told.block is None else 1
        if len(told.versions) != scored:
            raise RefusedError("malformed", f"versions: {scored} expected, one for each block")
        traffic.check_downloads(told.downloads, self.run.config.block_count)
        now = self.run.clock()
        with self.run.ledger.write() as tx:
            tx.blocks.lock()
            self.members.seen(tx, caller, now)
            traffic.count_traffic(tx, caller.worker, {}, told.downloads)
            tx.events.add_score(
                block=told.block,
                versions=told.versions,
                split=told.split,
                windows=told.windows,
                ce=told.ce,
                worker=caller.worker,
                time=now,
            )
            tx.events.add(now, "scored", caller.worker, told.block, f"CE {told.ce:.4f}")

    def _block(self, tx: Transaction, state: BlockState, moved: Moved) -> BlockStatus:
        row, score = tx.blocks.get(state.index), tx.events.newest_score(state.index)
        assert row is not None
        ended = row.leases_met + row.leases_missed
        return BlockStatus(
            index=state.index,
            version=state.version,
            weights=tx.versions.get(state.index, state.version).weights,
            ce=score.ce if score else None,
            ce_note="" if score else NO_SCORE,
            bytes_trained=state.merged_batches * self.run.batch_bytes,
            progress=state.merged_batches / state.total_batches,
            replicas=len(state.workers),
            participation=row.leases_met / ended if ended else None,
            pending_updates=len(state.pending),
            moved=moved,
        )

    def _worker(
        self, row: WorkerRow, block: int | None, state: WorkerState, moved: Moved, now: float
    ) -> WorkerStatus:
        return WorkerStatus(
            worker=row.id,
            name=row.name,
            role=row.role,
            device=row.device,
            block=block,
            state=state,
            bytes_trained=row.batches_merged * self.run.batch_bytes,
            updates=row.updates_merged,
            seconds_since_seen=max(0.0, now - row.seen),
            moved=moved,
        )


def _state(
    row: WorkerRow, holds_lease: bool, lost_lease: bool, finished: bool, now: float
) -> WorkerState:
    silent = now - row.seen
    if row.banned:
        return "banned"
    if lost_lease or (holds_lease and silent > LOST_AFTER):
        return "lost"
    if holds_lease:
        return "training"
    if row.role == "evaluate":  # says nothing while it scores
        return "away" if silent > LOST_AFTER else "waiting"
    return "away" if finished or silent > AWAY_AFTER else "waiting"


FRESH_SECONDS = 1.0  # anybody may ask, and a page is a look at everything


class CoordinatorMetrics:
    def __init__(self, reports: Reports) -> None:
        self._page, self._made_at = b"", -math.inf
        self._one_at_a_time = threading.Lock()
        self._registry = CollectorRegistry()
        self._registry.register(_State(reports))
        moved = Counter(
            "blocktrain_chunk_bytes", "Chunk bytes moved", ["direction"], registry=self._registry
        )
        self._received, self._sent = moved.labels("received"), moved.labels("sent")

    def received(self, size: int) -> None:
        self._received.inc(size)

    def sent(self, size: int) -> None:
        self._sent.inc(size)

    def page(self) -> tuple[bytes, str]:
        with self._one_at_a_time:
            if time.monotonic() - self._made_at > FRESH_SECONDS:
                self._page, self._made_at = generate_latest(self._registry), time.monotonic()
            return self._page, CONTENT_TYPE_LATEST


BLOCK_GAUGES: dict[str, tuple[str, Callable[[BlockStatus], float | None]]] = {
    "version": ("Version a block stands at", lambda block: block.version),
    "bytes_trained": ("Bytes merged into a block", lambda block: block.bytes_trained),
    "replicas": ("Workers on a block", lambda block: block.replicas),
    "pending_updates": ("Updates waiting to be merged", lambda block: block.pending_updates),
    "participation": ("Share of leases met in time", lambda block: block.participation),
    "ce": ("Cross entropy on valid", lambda block: block.ce),
}


def _moved_bytes(blocks: Sequence[BlockStatus], codec: str) -> Iterator[Metric]:
    family = CounterMetricFamily(
        "blocktrain_moved_bytes",
        "Bytes of updates up and of versions down, as workers report these",
        labels=["block", "direction", "codec"],
    )
    raw = CounterMetricFamily(
        "blocktrain_moved_raw_bytes",
        "What the same would have been whole, in fp32",
        labels=["block", "direction"],
    )
    for block in blocks:
        moved, index = block.moved, str(block.index)
        counts = Counted({("up", codec): moved.up, ("down", "none"): moved.down_whole})
        counts["down", codec] += moved.down_differences
        for labels, count in counts.items():
            family.add_metric([index, *labels], count)
        raw.add_metric([index, "up"], moved.up_raw)
        raw.add_metric([index, "down"], moved.down_raw)
    yield family
    yield raw


class _State(Collector):
    def __init__(self, reports: Reports) -> None:
        self._reports = reports

    def describe(self) -> Iterator[Metric]:
        return iter(())  # nothing is read before somebody asks

    def collect(self) -> Iterator[Metric]:
        status = self._reports.status()
        for name, (text, value) in BLOCK_GAUGES.items():
            family = GaugeMetricFamily(f"blocktrain_block_{name}", text, labels=["block"])
            for block in status.blocks:
                found = value(block)
                if found is not None:
                    family.add_metric([str(block.index)], found)
            yield family
        yield from _moved_bytes(status.blocks, self._reports.run.config.swarm.codec)
        workers = GaugeMetricFamily("blocktrain_workers", "Workers by state", labels=["state"])
        for state in get_args(WorkerState):
            workers.add_metric([state], sum(w.state == state for w in status.workers))
        yield workers
