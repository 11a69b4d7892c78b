"""One coordinator: all it can be asked, and the rounds it makes by itself."""

import logging
import threading

from sqlalchemy.exc import DBAPIError

from blocktrain.coordinator.leases import Leases
from blocktrain.coordinator.members import Members
from blocktrain.coordinator.merger import Merger
from blocktrain.coordinator.reports import Reports
from blocktrain.coordinator.run import Run
from blocktrain.coordinator.updates import Updates
from blocktrain.errors import BlocktrainError

log = logging.getLogger(__name__)

ROUND_SECONDS = 0.25
SHORTEST_ROUND = 0.02
COLLECT_SECONDS = 300.0


class Service:
    def __init__(self, run: Run) -> None:
        self.run = run
        self.members = Members(run)
        self.leases = Leases(run, self.members)
        self.updates = Updates(run, self.members)
        self.merger = Merger(run)
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

    def round(self) -> None:
        self.leases.expire()
        self.merger.merge_due()

    def _make_rounds(self) -> None:
        collected = self.run.clock()
        while not self._stop.is_set():
            self._wake.wait(ROUND_SECONDS)
            self._stop.wait(SHORTEST_ROUND)  # what arrives close together is looked at once
            self._wake.clear()
            try:
                self.round()
                if self.run.clock() - collected > COLLECT_SECONDS:
                    collected = self.run.clock()
                    self.merger.collect()
            except (BlocktrainError, DBAPIError) as error:
                # A database that restarts, a store that does not answer: the next round tries.
                log.warning("round failed, will try again: %s", error)
                self._stop.wait(ROUND_SECONDS)
            except Exception:
                # Whatever it is: a coordinator that answers but never merges would be worse.
                log.exception("round failed, will try again")
                self._stop.wait(ROUND_SECONDS)
