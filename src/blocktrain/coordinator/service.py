"""One coordinator: its parts, and the thread that expires leases, merges and collects."""

import logging
import math
import threading
import time

from sqlalchemy.exc import DBAPIError

from blocktrain.coordinator.collector import Collector
from blocktrain.coordinator.executor import LedgerExecutor, Notifier
from blocktrain.coordinator.leases import Leases
from blocktrain.coordinator.members import Members, Operator
from blocktrain.coordinator.merger import Merger
from blocktrain.coordinator.reports import Reports
from blocktrain.coordinator.run import Run
from blocktrain.coordinator.updates import Updates
from blocktrain.errors import BlocktrainError

log = logging.getLogger(__name__)

ROUND_SECONDS = 0.25
MIN_ROUND_SECONDS = 0.005
COLLECT_SECONDS = 60.0
COLLECT_SHARE = 0.02  # of the time, at most: merges wait meanwhile


class Service:
    def __init__(self, run: Run) -> None:
        self.run = run
        self.executor = LedgerExecutor(run.ledger)  # started and stopped with the HTTP server
        self.new_versions = Notifier()
        self.operator = Operator(run.ledger, run.clock)
        self.members = Members(run)
        self.leases = Leases(run, self.members, self.executor, self.new_versions)
        self.updates = Updates(run, self.members, self.leases, self.executor, self.wake)
        self.collector = Collector(run)
        self.merger = Merger(run, self.collector)
        self.reports = Reports(run, self.members)
        self._stop, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="rounds", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()
        self._thread.join()

    def wake(self) -> None:
        """Something may be due: do not wait for the next round."""
        self._wake.set()

    def round(self, *, expire: bool = True) -> None:
        if expire:
            self.leases.expire()
        if self.merger.merge_due():
            self.new_versions.notify()

    def _work(self) -> None:
        collect_at, ended = time.monotonic() + COLLECT_SECONDS, -math.inf
        expire_at = -math.inf
        while not self._stop.is_set():
            self._wake.wait(ROUND_SECONDS)
            # One round for all updates that arrive close together; no delay for a single one.
            self._stop.wait(max(0.0, ended + MIN_ROUND_SECONDS - time.monotonic()))
            self._wake.clear()
            try:
                if expire := time.monotonic() >= expire_at:
                    expire_at = time.monotonic() + ROUND_SECONDS
                self.round(expire=expire)
                if (began := time.monotonic()) >= collect_at:
                    collect_at = began + COLLECT_SECONDS  # also if it fails
                    self.collector.collect()
                    took = time.monotonic() - began
                    collect_at = max(collect_at, began + took / COLLECT_SHARE)
            except (BlocktrainError, DBAPIError) as error:
                # A database that restarts, or a store that does not answer.
                log.warning("round failed, will try again: %s", error)
                self._stop.wait(ROUND_SECONDS)
            except Exception:
                # A coordinator that answers but never merges would be worse than this log.
                log.exception("round failed, will try again")
                self._stop.wait(ROUND_SECONDS)
            ended = time.monotonic()
