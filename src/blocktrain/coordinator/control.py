"""Pauses, drains and resumes a run. All coordinators of the run follow, because the ledger says
so."""

from collections.abc import Callable

from blocktrain.ledger.ledger import Ledger, Transaction
from blocktrain.protocol.page_messages import Control

WAIT_SECONDS = 10.0  # until a worker asks again whether the run goes on
REASONS: dict[Control, str] = {
    "paused": "the operator has paused the run; this worker goes on when it is resumed",
    "draining": "the operator lets the open leases end and hands out no new ones; this worker goes"
    " on when the run is resumed",
}
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
