"""What a run reports: status, events, scores, metrics and traffic.

Uploads are counted once they are verified. Downloads are counted as workers report them (with an
update, a score or a returned lease), because a coordinator does not see downloads from a bucket.
"""

import json
import math
import threading
import time
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar, get_args

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from blocktrain.coordinator.members import (
    Caller,
    Members,
    validators_present,
)
from blocktrain.coordinator.run import Run
from blocktrain.errors import NotFoundError, ProtocolError, RefusedError
from blocktrain.ledger.ledger import Transaction
from blocktrain.ledger.schema import ScoreRow, WorkerRow
from blocktrain.protocol.messages import MOST_DIFFERENCES, BlobAnswer, Differences, Downloaded, Role
from blocktrain.protocol.page_messages import Health
from blocktrain.protocol.status_messages import (
    BlockStatus,
    Checking,
    Event,
    Moved,
    Score,
    Status,
    Trust,
    WorkerState,
    WorkerStatus,
)
from blocktrain.swarm import reputation
from blocktrain.swarm.state import BlockState

Key = TypeVar("Key", bound=Hashable)
Traffic = Mapping[tuple[str, int], Moved]  # by worker and block

AWAY_SECONDS = 20.0  # a worker without a lease polls often, and is away after this much silence
LONG_AWAY_SECONDS = 90.0  # the same for workers that are silent while they score or wait
URL_SECONDS = 3600
NO_VALIDATOR = "updates wait, because no validator answers; start one: worker INVITE --validate"
SCORING_ROLES: tuple[Role, ...] = ("evaluate", "validate")
# Why there is no score.
UNTRAINED = "not scored yet: a validator scores the model once an update is merged"
SOON = "not scored yet: a validator scores the model in its spare time"
EVALUATED = "not scored yet: a worker with --evaluate is about to"
NO_SCORER = (
    "not scored yet, because no validator is connected; the coordinator starts one itself unless"
    " told otherwise, and so does `blocktrain worker INVITE --validate`"
)
UNSCORED = (
    "nothing scores this run, because its updates are not checked by validators; `blocktrain invite"
    " new --evaluate` makes an invite for `blocktrain worker INVITE --evaluate`, which scores it"
)


class Reports:
    def __init__(self, run: Run, members: Members) -> None:
        self.run, self.members = run, members

    def status(self) -> Status:
        now = self.run.clock()
        with self.run.ledger.read() as tx:
            row = tx.run()
            assert row is not None
            traffic, score = tx.events.traffic(), tx.events.newest_score(None)
            states, rows = tx.blocks.states(), tx.members.workers()
            workers = self._workers(tx, rows, traffic, now, finished=row.finished is not None)
            checking = self._checking(tx, rows, score, now) if row.requires_checks else None
            note = _score_note(states, workers, checked=row.requires_checks)
            blocks = self._blocks(tx, states, traffic, note)
        return Status(
            run=self.run.id,
            state="running" if row.finished is None else "finished",
            ce=score.ce if score else None,
            ce_note="" if score else note,
            codec=self.run.config.swarm.codec,
            blocks=blocks,
            workers=workers,
            seconds=max(0.0, (row.finished or now) - self.run.created),
            checking=checking,
        )

    def health(self) -> Health:
        with self.run.ledger.read() as tx:
            row = tx.run()
        assert row is not None
        return Health(run=self.run.id, state="running" if row.finished is None else "finished")

    def _checking(
        self, tx: Transaction, workers: Sequence[WorkerRow], score: ScoreRow | None, now: float
    ) -> Checking:
        trained = sum(row.train_seconds for row in workers)
        validators, waiting = len(validators_present(tx, now)), len(tx.checks.unchecked())
        unanswered = waiting and not validators
        return Checking(
            share=sum(row.check_seconds for row in workers) / trained if trained else None,
            validators=validators,
            waiting=waiting,
            note=NO_VALIDATOR if unanswered else "",
            scored=tuple(json.loads(score.versions)) if score else (),
        )

    def _blocks(
        self, tx: Transaction, states: Sequence[BlockState], traffic: Traffic, note: str
    ) -> tuple[BlockStatus, ...]:
        """`note`: why a block has no score."""
        moved = sum_traffic((block, here) for (_, block), here in traffic.items())
        steps_lost = tx.leases.steps_lost()

        def status(state: BlockState) -> BlockStatus:
            row, score = tx.blocks.get(state.index), tx.events.newest_score(state.index)
            ended = row.leases_met + row.leases_missed
            return BlockStatus(
                index=state.index,
                version=state.version,
                weights=tx.versions.get(state.index, state.version).weights,
                ce=score.ce if score else None,
                ce_note="" if score else note,
                bytes_trained=state.merged_batches * self.run.config.bytes_per_step,
                progress=state.merged_batches / state.total_batches,
                replicas=len(state.workers),
                participation=row.leases_met / ended if ended else None,
                pending_updates=len(state.pending),
                removed_updates=len(tx.updates.removals(state.index)),
                moved=moved[state.index],
                steps_lost=steps_lost.get(state.index, 0),
            )

        return tuple(map(status, states))

    def _workers(
        self,
        tx: Transaction,
        rows: Sequence[WorkerRow],
        traffic: Traffic,
        now: float,
        *,
        finished: bool,
    ) -> tuple[WorkerStatus, ...]:
        moved = sum_traffic((worker, here) for (worker, _), here in traffic.items())
        leased = {lease.worker: lease for lease in tx.leases.active()}
        doing: dict[str, WorkerState] = dict.fromkeys(leased, "training")
        checking = [check.validator for check in tx.checks.due() if check.validator]
        doing |= dict.fromkeys(checking, "checking")
        lost, timeout = tx.members.lost_workers(), self.run.config.swarm.heartbeat_timeout
        return tuple(
            WorkerStatus(
                worker=row.id,
                name=row.name,
                role=row.role,
                device=row.device,
                block=leased[row.id].block if row.id in leased else None,
                lease_steps=leased[row.id].steps if row.id in leased else None,
                seconds_left=leased[row.id].deadline - now if row.id in leased else None,
                state=_state(row, doing.get(row.id), row.id in lost, finished, now, timeout),
                bytes_trained=row.batches_merged * self.run.config.bytes_per_step,
                updates=row.updates_merged,
                seconds_since_seen=max(0.0, now - row.seen),
                moved=moved[row.id],
                trust=_trust(row)
                if row.accepted or row.refused or reputation.distrust(row)
                else None,
            )
            for row in rows
        )

    def blob(self, name: str) -> BlobAnswer:
        """A blob's recipe, with a URL for each chunk if the store issues URLs."""
        try:
            recipe = self.run.blobs.recipe(name)
        except ProtocolError as error:  # the chunk is not a recipe
            raise NotFoundError(str(error)) from None
        get_url = self.run.chunks.get_url
        urls = {name: url for name in recipe.chunks if (url := get_url(name, URL_SECONDS))}
        return BlobAnswer(recipe=recipe, urls=urls or None)

    def differences(self, block: int, after: int, to: int) -> Differences:
        """Deltas from version `after` of a block to version `to`; empty if one is missing."""
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
        if caller.role not in SCORING_ROLES:
            roles = " or ".join(SCORING_ROLES)
            raise RefusedError("forbidden", f"only a worker with role {roles} may send scores")
        block_count = self.run.config.block_count
        if score.block is not None and score.block >= block_count:
            raise RefusedError(
                "not_found",
                f"there is no block {score.block}; the run has blocks 0 to {block_count - 1}",
            )
        scored = block_count if score.block is None else 1
        if len(score.versions) != scored:
            reason = f"versions: give {scored} version numbers, one for each scored block"
            raise RefusedError("malformed", reason)
        check_downloads(score.downloads, block_count)
        now = self.run.clock()
        with self.run.ledger.write() as tx:
            tx.blocks.lock()
            self.members.touch(tx, caller, now)
            _check_versions(tx, score)
            count_traffic(tx, caller.worker, {}, score.downloads)
            tx.events.add_score(score, caller.worker, now)
            tx.events.add(now, "scored", caller.worker, score.block, f"CE {score.ce:.4f} nats/byte")


def _score_note(
    states: Sequence[BlockState], workers: Sequence[WorkerStatus], *, checked: bool
) -> str:
    """Why what has no score has none. `checked`: whether updates must be checked."""
    here = {each.role for each in workers if each.state in ("waiting", "checking")}
    if "evaluate" in here:
        return EVALUATED
    if "validate" in here:
        return SOON if any(state.version for state in states) else UNTRAINED
    return NO_SCORER if checked else UNSCORED


def _check_versions(tx: Transaction, score: Score) -> None:
    blocks = range(len(score.versions)) if score.block is None else [score.block]
    for block, version in zip(blocks, score.versions, strict=True):
        if version > (newest := tx.blocks.get(block).version):
            reason = f"block {block} has no version {version}; the newest is {newest}"
            raise RefusedError("not_found", f"versions: {reason}")


def _state(
    row: WorkerRow,
    work: WorkerState | None,
    lost_lease: bool,
    finished: bool,
    now: float,
    timeout: float,
) -> WorkerState:
    """`work`: what it does, if it holds a lease or a check. `timeout`: the silence that ends it."""
    silent, is_paused = now - row.seen, (row.excluded_until or now) > now
    if row.banned or row.excluded:
        return "banned" if row.banned else "excluded"
    if lost_lease or (work and silent > timeout):
        return "lost"
    if work:
        return work
    asks_often = row.role == "train" and not is_paused
    if silent > (AWAY_SECONDS if asks_often else LONG_AWAY_SECONDS):
        return "away"
    if is_paused:
        return "paused"
    return "away" if finished and row.role == "train" else "waiting"


def _trust(row: WorkerRow) -> Trust:
    return Trust(
        accepted=row.accepted,
        refused=row.refused,
        replayed=row.replayed,
        suspicion=reputation.distrust(row),
        newcomer=reputation.is_newcomer(row),
    )


def check_downloads(downloads: Iterable[Downloaded], block_count: int) -> None:
    for download in downloads:
        if download.block >= block_count:
            reason = f"downloads: there is no block {download.block} (the run has {block_count})"
            raise RefusedError("malformed", reason)


def count_traffic(
    tx: Transaction, worker: str, uploads: Mapping[int, Moved], downloads: Iterable[Downloaded]
) -> None:
    """Add a worker's uploads and reported downloads to the counters of each block."""
    parts = list(uploads.items())
    for each in downloads:
        moved = Moved(down_whole=each.whole, down_differences=each.differences, down_raw=each.raw)
        parts.append((each.block, moved))
    for block, moved in sum_traffic(parts).items():
        tx.events.count_traffic(worker, block, moved)


def sum_traffic(parts: Iterable[tuple[Key, Moved]]) -> defaultdict[Key, Moved]:
    """Sums of these parts by key; zeros for a missing key."""
    sums: dict[Key, Tally[str]] = defaultdict(Tally)
    for key, moved in parts:
        sums[key].update(moved.model_dump())
    return defaultdict(Moved, {key: Moved(**counts) for key, counts in sums.items()})


METRICS_SECONDS = 1.0  # cached: the page is public, and making it reads all tables


BLOCK_GAUGES: dict[str, tuple[str, Callable[[BlockStatus], float | None]]] = {
    "version": ("Current version of a block", lambda block: block.version),
    "progress": ("Share of a block's batches that are merged", lambda block: block.progress),
    "bytes_trained": ("Text that a block was trained on", lambda block: block.bytes_trained),
    "replicas": ("Workers that train a block", lambda block: block.replicas),
    "pending_updates": ("Updates waiting to be merged", lambda block: block.pending_updates),
    "removed_updates": ("Merged updates that were removed again", lambda b: b.removed_updates),
    "steps_lost": ("Steps of expired leases that do not count", lambda block: block.steps_lost),
    "participation": ("Share of leases met in time", lambda block: block.participation),
    "ce": ("Newest cross entropy on the valid split in nats per byte", lambda block: block.ce),
}


def _moved_bytes(blocks: Sequence[BlockStatus], codec: str) -> tuple[Metric, Metric]:
    labels = ["block", "direction"]
    text = "Bytes of updates uploaded, and of versions downloaded as workers report"
    family = CounterMetricFamily("blocktrain_moved_bytes", text, labels=[*labels, "codec"])
    text = "Bytes that the same updates and versions would have as fp32 blocks"
    raw = CounterMetricFamily("blocktrain_moved_raw_bytes", text, labels=labels)
    for block in blocks:
        moved, index = block.moved, str(block.index)
        counts = Tally({("up", codec): moved.up, ("down", "none"): moved.down_whole})
        counts["down", codec] += moved.down_differences
        for names, count in counts.items():
            family.add_metric([index, *names], count)
        raw.add_metric([index, "up"], moved.up_raw)
        raw.add_metric([index, "down"], moved.down_raw)
    return family, raw


def _checks(status: Status) -> Iterator[Metric]:
    """Updates that passed and failed their checks, the cost of checking, and what waits."""
    updates = CounterMetricFamily(
        "blocktrain_judged_updates", "Updates by the result of their checks", labels=["result"]
    )
    trusts = [worker.trust for worker in status.workers if worker.trust]
    updates.add_metric(["passed"], sum(trust.accepted for trust in trusts))
    updates.add_metric(["refused"], sum(trust.refused for trust in trusts))
    yield updates
    if (checking := status.checking) is None:
        return
    gauges = {
        "check_share": ("Time of checks relative to that of checked training", checking.share),
        "unchecked_updates": ("Updates that are not checked yet", checking.waiting),
        "validators": ("Validators that answer", checking.validators),
    }
    for name, (text, value) in gauges.items():
        if value is not None:
            yield GaugeMetricFamily(f"blocktrain_{name}", text, value=value)


class CoordinatorMetrics(Collector):
    def __init__(self, reports: Reports) -> None:
        self._reports, self._lock = reports, threading.Lock()
        self._page, self._made_at = b"", -math.inf
        self._registry = CollectorRegistry()
        self._registry.register(self)
        moved = Counter(
            "blocktrain_chunk_bytes", "Chunk bytes moved", ["direction"], registry=self._registry
        )
        self.received, self.bytes_sent = moved.labels("received"), moved.labels("sent")

    def page(self) -> tuple[bytes, str]:
        with self._lock:
            if time.monotonic() - self._made_at > METRICS_SECONDS:
                self._page, self._made_at = generate_latest(self._registry), time.monotonic()
            return self._page, CONTENT_TYPE_LATEST

    def describe(self) -> Iterator[Metric]:
        return iter(())  # registering must not read the ledger

    def collect(self) -> Iterator[Metric]:
        status = self._reports.status()
        for name, (text, value) in BLOCK_GAUGES.items():
            family = GaugeMetricFamily(f"blocktrain_block_{name}", text, labels=["block"])
            for block in status.blocks:
                if (number := value(block)) is not None:
                    family.add_metric([str(block.index)], number)
            yield family
        yield from _moved_bytes(status.blocks, self._reports.run.config.swarm.codec)
        yield from _checks(status)
        if status.ce is not None:
            text = "Newest cross entropy of the assembled model in nats per byte"
            yield GaugeMetricFamily("blocktrain_ce", text, value=status.ce)
        workers = GaugeMetricFamily("blocktrain_workers", "Workers by state", labels=["state"])
        for state in get_args(WorkerState):
            workers.add_metric([state], sum(w.state == state for w in status.workers))
        yield workers
