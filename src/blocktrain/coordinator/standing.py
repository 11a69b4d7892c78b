"""Records how far workers are trusted (swarm/reputation.py), and excludes those that are not.

Call these functions in a transaction that has locked the blocks.
"""

import logging
from collections.abc import Iterable
from dataclasses import asdict

from blocktrain.coordinator.members import end_work
from blocktrain.coordinator.run import Run
from blocktrain.ledger.ledger import Transaction
from blocktrain.ledger.schema import LeaseRow, WorkerRow
from blocktrain.swarm import reputation
from blocktrain.swarm.reputation import Reputation

log = logging.getLogger(__name__)

SHORTEST_SECONDS = 1e-3  # of a lease; avoids a division by zero


def update_passed(
    run: Run, tx: Transaction, lease: LeaseRow, committed: float, evidence: float
) -> None:
    """An update passed its checks: credit the worker's speed with it. `evidence`:
    how much its checks nevertheless speak against the worker, or for it if below 0."""
    worker = _worker(tx, lease.worker)
    seconds = max(SHORTEST_SECONDS, committed - lease.created)
    speed = max(worker.speed or 0.0, lease.steps / seconds)
    standing = Reputation.of(worker).after_accepted(evidence)
    tx.checks.count_trained(worker.id, lease.block, lease.steps)
    _record(run, tx, worker, standing, speed=speed)


def update_refused(
    run: Run, tx: Transaction, lease: LeaseRow, reason: str, evidence: float = reputation.REFUSED
) -> None:
    """An update was refused: its worker gets no lease for a while."""
    worker = _worker(tx, lease.worker)
    standing = Reputation.of(worker).after_refused(evidence)
    pause = reputation.pause_seconds(standing.refused_in_a_row, run.config.swarm.lease_seconds)
    fields = {"worker": worker.id, "block": lease.block}
    log.warning("an update of worker %s was refused: %s", worker.name, reason, extra=fields)
    _record(run, tx, worker, standing, excluded_until=run.clock() + pause)


def replayed(
    run: Run, tx: Transaction, lease: LeaseRow, *, agrees: bool, was_refused: bool
) -> None:
    """A part of a lease was trained again. `was_refused`: a score had refused its update."""
    worker = _worker(tx, lease.worker)
    standing = Reputation.of(worker).after_replay(agrees=agrees, was_refused=was_refused)
    _record(run, tx, worker, standing)


def not_replayed(run: Run, tx: Transaction, lease: LeaseRow) -> bool:
    """A replay was impossible because of its worker. Returns whether the worker is excluded."""
    worker = _worker(tx, lease.worker)
    standing = Reputation.of(worker).after_no_replay()
    _record(run, tx, worker, standing)
    return standing.excluded


def judge_validators(
    run: Run, tx: Transaction, lease: LeaseRow, confirmed: Iterable[str], overruled: Iterable[str]
) -> None:
    """Validators have checked the same update: those that agree are confirmed, the others not."""
    for name in overruled:
        detail = f"two other validators found something else about the update of lease {lease.id}"
        tx.events.add(run.clock(), "checked", name, lease.block, detail)
    by_evidence = {reputation.CONFIRMED: confirmed, reputation.OVERRULED: overruled}
    for evidence, names in by_evidence.items():
        for name in names:
            worker = _worker(tx, name)
            _record(run, tx, worker, Reputation.of(worker).suspected(evidence))


def _worker(tx: Transaction, name: str) -> WorkerRow:
    worker = tx.members.worker(name)
    assert worker is not None, "the ledger refers to workers that it has"
    return worker


def _record(
    run: Run, tx: Transaction, worker: WorkerRow, standing: Reputation, **columns: float
) -> None:
    tx.members.record_standing(worker.id, **asdict(standing), **columns)
    if not standing.excluded or worker.excluded:
        return
    end_work(tx, worker.id, "its worker was excluded from the run")
    detail = f"{standing.refused} of {standing.refused + standing.accepted} updates failed checks"
    if worker.role == "validate":
        detail = "other validators could not repeat its results"
    detail = f"{worker.name}: {detail} (suspicion {reputation.distrust(standing):.1f})"
    tx.events.add(run.clock(), "excluded", worker.id, detail=detail)
    log.warning("a worker is excluded: %s", detail, extra={"worker": worker.id})
