"""Pauses, drains, resumes and extends a run. All coordinators of the run follow, because the ledger
says so."""

from collections.abc import Callable

from blocktrain.config import Config, from_toml
from blocktrain.errors import RefusedError
from blocktrain.ledger.ledger import Ledger, Transaction
from blocktrain.protocol.page_messages import Control

WAIT_SECONDS = 10.0  # until a worker asks again whether the run goes on
REASONS: dict[Control, str] = {
    "paused": "the operator has paused the run; this worker goes on when it is resumed",
    "draining": "the operator lets the open leases end and hands out no new ones; this worker goes"
    " on when the run is resumed",
}
OUTDATED = "the run was extended; this coordinator must be started again"
EVENTS: dict[Control, str] = {"running": "resumed", "paused": "paused", "draining": "draining"}


def reason_to_wait(tx: Transaction) -> str | None:
    """Why no leases are handed out; None if they are."""
    return REASONS.get(tx.history.control())


def set_control(ledger: Ledger, clock: Callable[[], float], wanted: Control) -> int:
    """Change what the run does. `paused` also ends the leases that are being trained, whose batches
    will be handed out again; updates that are on their way still count. Returns the number of ended
    leases."""
    with ledger.write() as tx:
        tx.blocks.lock()
        if not tx.history.set_control(wanted):
            return 0
        ended = [lease for lease in tx.leases.active() if lease.state == "open"]
        ended = ended if wanted == "paused" else []
        for lease in ended:
            tx.leases.move(lease.id, "returned")
            tx.blocks.give_back_range(lease.block, lease.first_batch, lease.steps)
        detail = f"{len(ended)} leases ended" if wanted == "paused" else ""
        tx.events.add(clock(), EVENTS[wanted], detail=detail)
    return len(ended)


def extend(ledger: Ledger, clock: Callable[[], float], steps: int) -> Config:
    """Extend the run to this many steps per block, and return its new settings. Open leases
    continue. A running coordinator has other settings now, and ends."""
    with ledger.write() as tx:
        tx.blocks.lock()
        row = tx.run()
        assert row is not None, "an operator opens a ledger with a run"
        before = from_toml(row.config)
        extended = before.extended_to(steps)
        tx.extend_run(extended.to_toml(), steps, clock())
        detail = f"from {before.train.steps} to {steps} steps per block"
        tx.events.add(clock(), "extended", detail=detail)
    return extended


def require_current(total_batches: int, config: Config, run_steps: int | None) -> None:
    """Refuse work if this coordinator, or the worker that asks, has the settings from before an
    extension. `total_batches`: of a block in the ledger. `run_steps`: as in a `LeaseRequest`."""
    steps = config.train.steps
    if total_batches != steps:
        raise RefusedError("unavailable", OUTDATED)
    if config.train.extended_at and run_steps != steps:
        reason = f"the run was extended to {steps} steps after this worker joined; join it again"
        raise RefusedError("conflict", reason)
