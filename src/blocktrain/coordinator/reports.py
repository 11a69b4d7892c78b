"""What a run shows of itself: status, events, scores, metrics, and the bytes that were moved.

Bytes up are counted once they are verified. Bytes down are as workers report them, with an update,
a score or a returned lease: with a bucket a coordinator does not see them.
"""

import math
import threading
import time
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TypeVar, get_args

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import TypeAdapter

from blocktrain.coordinator.members import Caller, Members
from blocktrain.coordinator.run import Run
from blocktrain.errors import NotFoundError, ProtocolError, RefusedError
from blocktrain.ledger.rows import WorkerRow
from blocktrain.ledger.transaction import Transaction
from blocktrain.protocol.messages import (
    MOST_DIFFERENCES,
    BlobAnswer,
    BlockStatus,
    Differences,
    Downloaded,
    Event,
    Moved,
    Score,
    Status,
    WorkerState,
    WorkerStatus,
)
from blocktrain.swarm.state import BlockState

Key = TypeVar("Key", bound=Hashable)

NOTHING_MOVED = Moved()
LOST_SECONDS = 90.0  # of silence, of a worker that holds a lease
AWAY_SECONDS = 20.0  # of silence, of one that holds none: it would have asked for one again
URL_SECONDS = 3600
NO_SCORE = "not scored yet; `invite new --evaluate` makes an invite for `worker INVITE --evaluate`"


class Reports:
    def __init__(self, run: Run, members: Members) -> None:
        self.run, self.members = run, members

    def status(self) -> Status:
        now = self.run.clock()
        with self.run.ledger.read() as tx:
            row = tx.run()
            assert row is not None
            traffic = tx.events.traffic()
            score = tx.events.newest_score(None)
            blocks = self._blocks(tx, traffic)
            workers = self._workers(tx, traffic, now, finished=row.finished is not None)
        return Status(
            run=self.run.id,
            state="running" if row.finished is None else "finished",
            ce=score.ce if score else None,
            ce_note="" if score else NO_SCORE,
            codec=self.run.config.swarm.codec,
            blocks=blocks,
            workers=workers,
            seconds=(row.finished or now) - self.run.created,
        )

    def _blocks(
        self, tx: Transaction, traffic: Mapping[tuple[str, int], Moved]
    ) -> tuple[BlockStatus, ...]:
        moved = sum_traffic((block, here) for (_, block), here in traffic.items())
        return tuple(
            self._block(tx, state, moved.get(state.index, NOTHING_MOVED))
            for state in tx.blocks.states()
        )

    def _workers(
        self,
        tx: Transaction,
        traffic: Mapping[tuple[str, int], Moved],
        now: float,
        *,
        finished: bool,
    ) -> tuple[WorkerStatus, ...]:
        moved = sum_traffic((worker, here) for (worker, _), here in traffic.items())
        leased = {lease.worker: lease.block for lease in tx.leases.held()}
        lost = tx.members.lost_workers()
        return tuple(
            self._worker(
                row,
                leased.get(row.id),
                _state(row, row.id in leased, row.id in lost, finished, now),
                moved.get(row.id, NOTHING_MOVED),
                now,
            )
            for row in tx.members.workers()
        )

    def blob(self, name: str) -> BlobAnswer:
        """A blob's recipe, with a URL for each chunk if the store has URLs."""
        try:
            recipe = self.run.blobs.recipe(name)
        except ProtocolError as error:  # a chunk, but not of a recipe
            raise NotFoundError(str(error)) from None
        urls = {chunk: self.run.chunks.get_url(chunk, URL_SECONDS) for chunk in recipe.chunks}
        known = {chunk: url for chunk, url in urls.items() if url is not None}
        return BlobAnswer(recipe=recipe, urls=known or None)

    def differences(self, block: int, after: int, to: int) -> Differences:
        """The deltas from version `after` of a block to version `to`; none if one is missing."""
        versions = range(after + 1, to + 1)
        with self.run.ledger.read() as tx:
            deltas = tx.versions.deltas(block)
        if len(versions) > MOST_DIFFERENCES or not all(version in deltas for version in versions):
            return Differences(differences=())
        return Differences(differences=tuple(deltas[version] for version in versions))

    def events(self, after: int, most: int) -> list[Event]:
        with self.run.ledger.read() as tx:
            return tx.events.after(after, most)

    def last_event(self) -> int:
        with self.run.ledger.read() as tx:
            return tx.events.last_number()

    def score(self, caller: Caller, score: Score) -> None:
        if caller.role != "evaluate":
            raise RefusedError("forbidden", "scores come from workers with the evaluate role")
        block_count = self.run.config.block_count
        if score.block is not None and score.block >= block_count:
            raise RefusedError("not_found", f"there is no block {score.block}")
        scored = block_count if score.block is None else 1
        if len(score.versions) != scored:
            raise RefusedError("malformed", f"versions: {scored} expected, one for each block")
        check_downloads(score.downloads, block_count)
        now = self.run.clock()
        with self.run.ledger.write() as tx:
            tx.blocks.lock()
            self.members.seen(tx, caller, now)
            count_traffic(tx, caller.worker, {}, score.downloads)
            tx.events.add_score(
                block=score.block,
                versions=score.versions,
                split=score.split,
                windows=score.windows,
                ce=score.ce,
                worker=caller.worker,
                time=now,
            )
            tx.events.add(now, "scored", caller.worker, score.block, f"CE {score.ce:.4f}")

    def _block(self, tx: Transaction, state: BlockState, moved: Moved) -> BlockStatus:
        row, score = tx.blocks.get(state.index), tx.events.newest_score(state.index)
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
    if lost_lease or (holds_lease and silent > LOST_SECONDS):
        return "lost"
    if holds_lease:
        return "training"
    if row.role == "evaluate":  # it is silent while it scores
        return "away" if silent > LOST_SECONDS else "waiting"
    return "away" if finished or silent > AWAY_SECONDS else "waiting"


def check_downloads(downloads: Iterable[Downloaded], block_count: int) -> None:
    for download in downloads:
        if download.block >= block_count:
            raise RefusedError("malformed", f"downloads: there is no block {download.block}")


_DOWNLOADS = TypeAdapter(tuple[Downloaded, ...])


def downloads_to_json(downloads: Sequence[Downloaded]) -> str | None:
    return _DOWNLOADS.dump_json(tuple(downloads)).decode() if downloads else None


def downloads_from_json(text: str | None) -> tuple[Downloaded, ...]:
    return _DOWNLOADS.validate_json(text) if text else ()


def count_traffic(
    tx: Transaction, worker: str, uploads: Mapping[int, Moved], downloads: Iterable[Downloaded]
) -> None:
    """Add what a worker uploaded, by block, and what it reports to have downloaded."""
    downloaded = (
        (
            each.block,
            Moved(down_whole=each.whole, down_differences=each.differences, down_raw=each.raw),
        )
        for each in downloads
    )
    for block, moved in sum_traffic(chain(uploads.items(), downloaded)).items():
        tx.events.count_traffic(worker, block, moved)


def sum_traffic(parts: Iterable[tuple[Key, Moved]]) -> dict[Key, Moved]:
    sums: dict[Key, Tally[str]] = defaultdict(Tally)
    for key, moved in parts:
        sums[key].update(moved.model_dump())
    return {key: Moved(**counts) for key, counts in sums.items()}


METRICS_SECONDS = 1.0  # anyone may ask for the page, and making it reads all tables


class CoordinatorMetrics:
    def __init__(self, reports: Reports) -> None:
        self._page, self._made_at = b"", -math.inf
        self._lock = threading.Lock()
        self._registry = CollectorRegistry()
        self._registry.register(_RunCollector(reports))
        moved = Counter(
            "blocktrain_chunk_bytes", "Chunk bytes moved", ["direction"], registry=self._registry
        )
        self._received, self._sent = moved.labels("received"), moved.labels("sent")

    def received(self, size: int) -> None:
        self._received.inc(size)

    def sent(self, size: int) -> None:
        self._sent.inc(size)

    def page(self) -> tuple[bytes, str]:
        with self._lock:
            if time.monotonic() - self._made_at > METRICS_SECONDS:
                self._page, self._made_at = generate_latest(self._registry), time.monotonic()
            return self._page, CONTENT_TYPE_LATEST


BLOCK_GAUGES: dict[str, tuple[str, Callable[[BlockStatus], float | None]]] = {
    "version": ("Current version of a block", lambda block: block.version),
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
        "Bytes of the same weights in fp32",
        labels=["block", "direction"],
    )
    for block in blocks:
        moved, index = block.moved, str(block.index)
        counts = Tally({("up", codec): moved.up, ("down", "none"): moved.down_whole})
        counts["down", codec] += moved.down_differences
        for labels, count in counts.items():
            family.add_metric([index, *labels], count)
        raw.add_metric([index, "up"], moved.up_raw)
        raw.add_metric([index, "down"], moved.down_raw)
    yield family
    yield raw


class _RunCollector(Collector):
    def __init__(self, reports: Reports) -> None:
        self._reports = reports

    def describe(self) -> Iterator[Metric]:
        return iter(())  # do not read the ledger when this is registered

    def collect(self) -> Iterator[Metric]:
        status = self._reports.status()
        for name, (text, value) in BLOCK_GAUGES.items():
            family = GaugeMetricFamily(f"blocktrain_block_{name}", text, labels=["block"])
            for block in status.blocks:
                if (number := value(block)) is not None:
                    family.add_metric([str(block.index)], number)
            yield family
        yield from _moved_bytes(status.blocks, self._reports.run.config.swarm.codec)
        workers = GaugeMetricFamily("blocktrain_workers", "Workers by state", labels=["state"])
        for state in get_args(WorkerState):
            workers.add_metric([state], sum(w.state == state for w in status.workers))
        yield workers
