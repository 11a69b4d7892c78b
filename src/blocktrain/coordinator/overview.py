"""What the run page shows, made of the ledger: for everybody, or for the operator.

Keeps the history and the newest events in memory. Only one thread at a time may refresh it.
"""

import threading
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from blocktrain.coordinator.history import ALL, History, TokenRates
from blocktrain.coordinator.page_settings import PageSettings
from blocktrain.coordinator.reports import Reports, sum_traffic
from blocktrain.coordinator.run import Run, secret_number
from blocktrain.errors import RefusedError
from blocktrain.protocol.page_messages import (
    BlockCurve,
    BlockOverview,
    Charts,
    ContributionCurve,
    Contributor,
    Contributors,
    Control,
    Overview,
    PageEvent,
    PageEvents,
)
from blocktrain.protocol.status_messages import (
    BlockStatus,
    Event,
    Status,
    WorkerState,
    WorkerStatus,
)

NEWEST_EVENTS = 1000  # in memory, for viewers that follow them
EVENTS_PER_PAGE = 200
SEARCHED_EVENTS = 5000  # per request
PRESENT: tuple[WorkerState, ...] = ("training", "checking", "waiting", "paused")
# Events whose detail may contain what a worker says about its machine, or helps an attacker.
PRIVATE_DETAIL = ("joined", "returned", "refused", "checked", "clipped", "excluded", "invited",
                  "revoked")  # fmt: skip
PRIVATE_KINDS = ("invited", "revoked")
SUSPECTED = 3.0  # suspicion from which a worker's standing says so


@dataclass(frozen=True)
class _Snapshot:
    """The state of the run at one time."""

    status: Status
    control: Control
    speeds: TokenRates
    now: float
    joined: dict[str, float]
    last_event: int


class Page:
    def __init__(self, run: Run, reports: Reports, settings: PageSettings) -> None:
        self.run, self._reports, self._settings = run, reports, settings
        self._history = History(run)
        self._lock = threading.Lock()
        self._newest: deque[Event] = deque(maxlen=NEWEST_EVENTS)
        self._names: dict[str, str] = {}  # by worker
        self._workers: dict[int, str] = {}  # by number
        self._numbers: dict[str, int] = {}
        self._snapshot: _Snapshot | None = None

    def refresh(self) -> None:
        """Read what is new. All other methods describe the run as of the last call."""
        with self._lock:
            status, now = self._reports.status(), self.run.clock()
            with self.run.ledger.read() as tx:
                self._history.read(tx)
                self._follow(tx.events.last_number())
                control = tx.history.control()
                joined = {row.id: row.joined for row in tx.members.workers()}
            for worker in status.workers:
                self._names[worker.worker] = worker.name
                if worker.worker not in self._numbers:
                    number = 1 + secret_number(self.run, "page", worker.worker)
                    self._numbers[worker.worker], self._workers[number] = number, worker.worker
            last = self._newest[-1].number if self._newest else 0
            speeds = self._history.speeds(now)
            self._snapshot = _Snapshot(status, control, speeds, now, joined, last)

    def _follow(self, last: int) -> None:
        after = self._newest[-1].number if self._newest else max(0, last - NEWEST_EVENTS)
        while events := self._reports.events(after, NEWEST_EVENTS):
            self._newest.extend(events)
            after = events[-1].number
            if any(event.kind == "unmerged" for event in events):
                self._history.forget()

    # The run

    def overview(self) -> Overview:
        at, config = self._current(), self.run.config
        status, speeds = at.status, at.speeds
        tokens_per_step = self._history.tokens_per_step
        total = config.train.steps * config.block_count * tokens_per_step
        progress = sum(block.progress for block in status.blocks) / len(status.blocks)
        done = round(progress * total)
        states = Counter(worker.state for worker in status.workers)
        training = [worker for worker in status.workers if worker.role == "train"]
        score = self._history.scores[None].newest("scores")
        return Overview(
            run=self.run.id,
            title=self._settings.title,
            public=self._settings.is_public,
            kind=config.objective.kind,
            codec=status.codec,
            parameters=sum(block.weights.size for block in status.blocks) // 4,
            state=_state(status, at.control),
            time=at.now,
            started=self.run.created,
            finished=self.run.created + status.seconds if status.state == "finished" else None,
            progress=progress,
            seconds_left=_seconds_left(status, at.control, total - done, speeds.total),
            tokens_trained=done,
            tokens_total=total,
            tokens_per_second=speeds.total,
            bytes_per_token=config.vocabulary.bytes_per_token,
            wanted_lead=config.lead,
            score=score,
            score_note="" if score else status.ce_note,
            reference=self._settings.reference,
            workers=dict(states),
            present=sum(states[state] for state in PRESENT),
            waiting=sum(worker.state == "waiting" for worker in training),
            blocks=tuple(self._block(block, status.blocks, speeds) for block in status.blocks),
            moved=sum_traffic(("all", block.moved) for block in status.blocks)["all"],
            checking=status.checking,
            last_event=at.last_event,
        )

    def _block(
        self, block: BlockStatus, blocks: Sequence[BlockStatus], speeds: TokenRates
    ) -> BlockOverview:
        follows = self.run.config.kind.reads_predecessors and block.index > 0
        return BlockOverview(
            index=block.index,
            version=block.version,
            progress=block.progress,
            loss=self._history.measure(block.index),
            tokens_per_second=speeds.of_block(block.index),
            replicas=block.replicas,
            pending_updates=block.pending_updates,
            staleness=self._history.staleness(block.index),
            lead=blocks[block.index - 1].progress - block.progress if follows else None,
            participation=block.participation,
            moved=block.moved,
        )

    def charts(self) -> Charts:
        at, history = self._current(), self._history
        end = self.run.created + at.status.seconds
        with self._lock:
            curves = [history.curve(block) for block in range(self.run.config.block_count)]
            return Charts(
                time=at.now,
                scores=history.scores[None].points(),
                losses=tuple(
                    BlockCurve(block=block, source=source, points=points)
                    for block, (source, points) in enumerate(curves)
                ),
                tokens=history.tokens.rates(ALL, end),
            )

    # Workers

    def contributors(self, *, private: bool) -> Contributors:
        at = self._current()
        workers = tuple(self._contributor(each, at, private) for each in at.status.workers)
        return Contributors(time=at.now, workers=workers)

    def _contributor(self, worker: WorkerStatus, at: _Snapshot, private: bool) -> Contributor:
        moved, name = worker.moved, worker.worker
        batches = worker.bytes_trained / self.run.config.bytes_per_step
        return Contributor(
            number=self._numbers[name],
            name=worker.name,
            role=worker.role,
            state=worker.state,
            block=worker.block,
            tokens=round(batches * self._history.tokens_per_step),
            updates=worker.updates,
            tokens_per_second=at.speeds.of_worker(name),
            joined=at.joined.get(name, self.run.created),
            seen=at.now - worker.seconds_since_seen,
            standing=_standing(worker),
            moved_up=moved.up,
            moved_down=moved.down_whole + moved.down_differences,
            worker=name if private else None,
            device=worker.device if private else None,
            trust=worker.trust if private else None,
        )

    def contribution(self, number: int) -> ContributionCurve:
        worker = self._worker(number)
        with self._lock:
            return ContributionCurve(number=number, points=self._history.tokens.totals(worker))

    def _worker(self, number: int) -> str:
        try:
            return self._workers[number]
        except KeyError:
            raise RefusedError("not_found", f"there is no worker with number {number}") from None

    # Events

    @property
    def last_event(self) -> int:
        return self._current().last_event

    def newest_events(self, after: int, *, private: bool) -> list[PageEvent] | None:
        """Events after this number, oldest first; None if some of them are no longer in memory."""
        newest = list(self._newest)
        if newest and after + 1 < newest[0].number:
            return None
        start = bisect_right(newest, after, key=lambda event: event.number)
        return self._shown(newest[start:], private)

    def search(
        self,
        before: int | None,
        kinds: Collection[str],
        number: int | None,
        block: int | None,
        *,
        private: bool,
    ) -> PageEvents:
        """Events that match, newest first; of a limited number of events before `before`."""
        worker = None if number is None else self._worker(number)
        with self.run.ledger.read() as tx:
            before = before or tx.events.last_number() + 1
            after = max(0, before - 1 - SEARCHED_EVENTS)
            found = tx.history.events_between(after, before, EVENTS_PER_PAGE, kinds, worker, block)
        is_full = len(found) == EVENTS_PER_PAGE
        searched_to = found[-1].number if is_full else after + 1
        return PageEvents(events=tuple(self._shown(found, private)), searched_to=searched_to)

    def _shown(self, events: Sequence[Event], private: bool) -> list[PageEvent]:
        return [
            PageEvent(
                number=event.number,
                time=event.time,
                kind=event.kind,
                worker=self._numbers.get(event.worker or ""),
                name=self._names.get(event.worker or "", ""),
                block=event.block,
                detail=event.detail if private else _public_detail(event),
            )
            for event in events
            if private or event.kind not in PRIVATE_KINDS
        ]

    def _current(self) -> _Snapshot:
        assert self._snapshot is not None, "refreshed first"
        return self._snapshot


def _state(
    status: Status, control: Control
) -> Literal["running", "paused", "draining", "drained", "finished"]:
    if status.state == "finished":
        return "finished"
    if control != "draining":
        return control
    is_busy = any(block.replicas or block.pending_updates for block in status.blocks)
    return "draining" if is_busy else "drained"


def _seconds_left(status: Status, control: Control, tokens: int, speed: float) -> float | None:
    if status.state == "finished":
        return 0.0
    return tokens / speed if speed and control == "running" else None


def _standing(
    worker: WorkerStatus,
) -> Literal["newcomer", "trusted", "suspected", "excluded", "banned", "unchecked"]:
    trust = worker.trust
    if worker.state in ("banned", "excluded"):
        return worker.state
    if trust is None:
        return "unchecked"
    if trust.suspicion >= SUSPECTED:
        return "suspected"
    return "newcomer" if trust.newcomer else "trusted"


def _public_detail(event: Event) -> str:
    if event.kind in PRIVATE_DETAIL:
        return ""
    return event.detail.rpartition(" (lease ")[0] or event.detail
