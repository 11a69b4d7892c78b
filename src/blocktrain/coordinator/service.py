"""One coordinator: all it can be asked, and the rounds it makes by itself."""

import logging
import math
import threading
import time

from sqlalchemy.exc import DBAPIError

from blocktrain.coordinator.collector import Collector
from blocktrain.coordinator.executor import Notifier
from blocktrain.coordinator.leases import LeaseGrant, Leases
from blocktrain.coordinator.limits import LruCache
from blocktrain.coordinator.members import Members
from blocktrain.coordinator.merger import Merger
from blocktrain.coordinator.operator import Operator
from blocktrain.coordinator.reports import Reports
from blocktrain.coordinator.run import Run
from blocktrain.coordinator.updates import Updates
from blocktrain.errors import BlocktrainError
from blocktrain.swarm.attendance import Speeds

log = logging.getLogger(__name__)

ROUND_SECONDS = 0.25
SHORTEST_ROUND = 0.005
COLLECT_SECONDS = 60.0
COLLECT_SHARE = 0.02  # of the time, at most: merges wait meanwhile
MOST_REMEMBERED = 4096  # leases in memory; any other costs a look into the ledger


class Service:
    def __init__(self, run: Run) -> None:
        self.run = run
        self.operator = Operator(run.ledger, run.clock)
        self.members = Members(run)
        handed_out: LruCache[LeaseGrant] = LruCache(MOST_REMEMBERED)
        self.speeds = Speeds(run.config.swarm)
        self.leases = Leases(run, self.members, handed_out, self.speeds)
        self.updates = Updates(run, self.members, handed_out, self.speeds)
        self.collector = Collector(run)
        self.merger = Merger(run, self.collector)
        self.versions_made = Notifier()
        self.reports = Reports(run, self.members)
        self._stop, self._wake = threading.Event(), threading.Event()
        self._rounds = threading.Thread(target=self._make_rounds, name="rounds", daemon=True)

    def start(self) -> None:
        self._rounds.start()

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()
        self._rounds.join()

    def wake(self) -> None:
        """Something arrived: look now rather than at the next round."""
        self._wake.set()

    def round(self, *, expire: bool = True) -> None:
        if expire:
            self.leases.expire()
        if self.merger.merge_due():
            self.versions_made.notify()

    def _make_rounds(self) -> None:
        collect_at, ended = time.monotonic() + COLLECT_SECONDS, -math.inf
        expire_at = -math.inf
        while not self._stop.is_set():
            self._wake.wait(ROUND_SECONDS)
            # What arrives close together is looked at once; what arrives alone, at once.
            self._stop.wait(max(0.0, ended + SHORTEST_ROUND - time.monotonic()))
            self._wake.clear()
            try:
                if expire := time.monotonic() >= expire_at:
                    expire_at = time.monotonic() + ROUND_SECONDS
                self.round(expire=expire)
                if (began := time.monotonic()) >= collect_at:
                    collect_at = began + COLLECT_SECONDS  # where it fails, too
                    self.collector.collect()
                    took = time.monotonic() - began
                    collect_at = max(collect_at, began + took / COLLECT_SHARE)
            except (BlocktrainError, DBAPIError) as error:
                # A database that restarts, a store that does not answer: the next round tries.
                log.warning("round failed, will try again: %s", error)
                self._stop.wait(ROUND_SECONDS)
            except Exception:
                # Whatever it is: a coordinator that answers but never merges would be worse.
                log.exception("round failed, will try again")
                self._stop.wait(ROUND_SECONDS)
            ended = time.monotonic()
