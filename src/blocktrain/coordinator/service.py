"""One coordinator: its components, and the thread that expires leases, merges and collects
garbage."""

import logging
import math
import threading
import time
from collections.abc import Callable
from functools import partial

from sqlalchemy.exc import DBAPIError

from blocktrain.coordinator.checks import Checks
from blocktrain.coordinator.client_limits import Limits
from blocktrain.coordinator.executor import LedgerExecutor, Notifier
from blocktrain.coordinator.feed import Feed
from blocktrain.coordinator.leases import Leases
from blocktrain.coordinator.members import Members, Operator
from blocktrain.coordinator.merger import Collector, Merger
from blocktrain.coordinator.overview import Page
from blocktrain.coordinator.page_settings import PageSettings
from blocktrain.coordinator.reports import CoordinatorMetrics, Reports
from blocktrain.coordinator.rollbacks import Rollbacks
from blocktrain.coordinator.run import Run
from blocktrain.coordinator.updates import Updates
from blocktrain.errors import BlocktrainError

log = logging.getLogger(__name__)

ROUND_SECONDS = 0.25
MIN_ROUND_SECONDS = 0.005
COLLECT_SECONDS = 60.0
COLLECT_SHARE = 0.02  # largest share of the time, because merges wait meanwhile


class Service:
    def __init__(
        self, run: Run, *, requires_checks: bool = False, page: PageSettings | None = None
    ) -> None:
        """`requires_checks`: from now on, this run merges updates only once validators have checked
        them, whichever coordinator merges."""
        self.run, self.page_settings = run, page or PageSettings()
        if requires_checks:
            run.require_checks(True)
        self.executor = LedgerExecutor(run.ledger)  # started and stopped with the HTTP server
        self.new_versions = Notifier()
        self.operator = Operator(run.ledger, run.clock)
        self.members = Members(run)
        self._has_reports = False  # of validators, since rollbacks were last considered
        self.checks = Checks(run, self.members, self.executor, self._reported)
        reveal_of = self.checks.replays.reveal_of
        self.leases = Leases(run, self.members, self.executor, self.new_versions, reveal_of)
        self.updates = Updates(
            run,
            self.members,
            self.leases,
            self.executor,
            self.checks.queue,
            self._settled,
            self.checks.replays.size_of_revealed,
        )
        self.collector = Collector(run)
        self.merger = Merger(run, self.collector)
        self.rollbacks = Rollbacks(run)
        self.reports = Reports(run, self.members)
        self.feed = Feed(Page(run, self.reports, self.page_settings))
        self.metrics = CoordinatorMetrics(self.reports)
        self.limits = Limits()
        self.is_outdated = False  # the run was extended since this coordinator read its settings
        self.on_outdated: Callable[[], None] = lambda: None
        self._stop, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="rounds", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()
        self._thread.join()

    def wake(self) -> None:
        """Start a round now, because an update may be due for merging."""
        self._wake.set()

    def _reported(self) -> None:
        self._has_reports = True
        self.wake()

    def _settled(self) -> None:
        self.checks.added.notify()
        self.wake()

    def round(self, *, expire: bool = True) -> None:
        """Expire leases if `expire`, and merge the updates that are due."""
        if expire:
            if self._was_extended():
                self.is_outdated = True
                self.on_outdated()
                return
            self.leases.expire()
            self.checks.expire()
        has_reports, self._has_reports = self._has_reports, False
        rolled_back = self.rollbacks.roll_back_due() if has_reports else 0
        rolled_back += self.rollbacks.remove_updates_of(self.checks.replays.take_dishonest())
        if self.merger.merge_due() + rolled_back:
            self.new_versions.notify()

    def _was_extended(self) -> bool:
        with self.run.ledger.read() as tx:
            return tx.blocks.total() != self.run.config.train.steps

    def _work(self) -> None:
        collect_at = expire_at = ended = -math.inf
        while not self._stop.is_set():
            self._wake.wait(ROUND_SECONDS)
            # Updates that arrive close together share a round; a single one is not delayed.
            self._stop.wait(max(0.0, ended + MIN_ROUND_SECONDS - time.monotonic()))
            self._wake.clear()
            # Collect first: a round may fail for lack of disk space.
            if (began := time.monotonic()) >= collect_at:
                self._try(self.collector.collect)
                took = time.monotonic() - began
                collect_at = began + max(COLLECT_SECONDS, took / COLLECT_SHARE)
            if expire := time.monotonic() >= expire_at:
                expire_at = time.monotonic() + ROUND_SECONDS
            self._try(partial(self.round, expire=expire))
            ended = time.monotonic()

    def _try(self, work: Callable[[], object]) -> None:
        """Survive every error: without this thread a coordinator answers but never merges. Usually
        the database or the store does not answer; anything else is a bug."""
        try:
            work()
        except Exception as error:
            is_bug = not isinstance(error, BlocktrainError | DBAPIError)
            level = logging.ERROR if is_bug else logging.WARNING
            log.log(level, "expiring or merging failed, trying again: %s", error, exc_info=is_bug)
            self._stop.wait(ROUND_SECONDS)
