"""What the operator of a run does: invites and bans. The ledger will do for it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from blocktrain.errors import RefusedError
from blocktrain.ledger.ledger import Ledger
from blocktrain.ledger.rows import InviteRow, WorkerRow
from blocktrain.ledger.schema import HELD, LIVE
from blocktrain.ledger.transaction import Transaction
from blocktrain.protocol import tokens
from blocktrain.protocol.messages import Role


class InviteState(NamedTuple):
    invite: str
    role: Role
    uses_left: int
    seconds_left: float
    revoked: bool

    @property
    def good(self) -> bool:
        """Whether somebody new can join with it."""
        return not self.revoked and self.uses_left > 0 and self.seconds_left > 0


class Operator:
    def __init__(self, ledger: Ledger, clock: Callable[[], float]) -> None:
        self.ledger, self._clock = ledger, clock

    def invite(self, role: Role, uses: int, seconds: float) -> str:
        """A new invite's secret: told here and never again, kept as a hash."""
        secret = tokens.new_secret()
        with self.ledger.write() as tx:
            tx.members.add_invite(
                InviteRow(
                    id=tokens.new_identifier(),
                    secret_hash=tokens.hash_secret(secret),
                    role=role,
                    uses_left=uses,
                    expires=self._clock() + seconds,
                )
            )
        return secret

    def invites(self) -> list[InviteState]:
        now = self._clock()
        with self.ledger.read() as tx:
            return [_invite_state(row, now) for row in tx.members.invites()]

    def invite_of(self, secret: str) -> InviteState | None:
        """The invite that has this secret, whatever became of it."""
        with self.ledger.read() as tx:
            row = tx.members.invite(tokens.hash_secret(secret))
        return _invite_state(row, self._clock()) if row else None

    def revoke(self, invite: str, *, ban: bool = False) -> Sequence[WorkerRow]:
        """Nobody new joins with it; with `ban`, those who did are banned, and returned."""
        with self.ledger.write() as tx:
            tx.blocks.lock()
            if not tx.members.revoke_invite(invite):
                raise RefusedError("not_found", f"there is no invite {invite}")
            found = tx.members.workers_of_invite(invite) if ban else ()
            for worker in found:
                self._ban(tx, worker.id)
        return found

    def ban(self, named: str) -> WorkerRow:
        """Nothing more from the worker of this name or id (its beginning will do)."""
        with self.ledger.write() as tx:
            tx.blocks.lock()
            found = _named(tx.members.workers(), named)
            self._ban(tx, found.id)
        return found

    def _ban(self, tx: Transaction, worker: str) -> None:
        """What it holds, or sent and was not merged, is handed out to others."""
        tx.members.ban_worker(worker)
        for lease in tx.leases.of_worker(worker, HELD):
            tx.leases.move(lease.id, "returned")
            tx.blocks.give_back_range(lease.block, lease.first_batch, lease.steps)
        for update in tx.updates.of_worker(worker, LIVE):
            covered = tx.leases.get(update.lease)
            assert covered is not None
            tx.updates.refuse(update.lease, "the worker was banned")
            if update.state == "pending":
                tx.blocks.give_back_range(covered.block, covered.first_batch, covered.steps)
        tx.events.add(self._clock(), "banned", worker)


def _invite_state(row: InviteRow, now: float) -> InviteState:
    return InviteState(row.id, row.role, row.uses_left, row.expires - now, row.revoked)


def _named(workers: Sequence[WorkerRow], named: str) -> WorkerRow:
    """The one worker that is meant; an id counts before what merely looks like one."""
    found = [worker for worker in workers if worker.id == named] or [
        worker for worker in workers if named in (worker.name, worker.id[: len(named)]) and named
    ]
    if not found:
        raise RefusedError("not_found", f"there is no worker {named}")
    if len(found) > 1:
        each = ", ".join(f"{worker.id} ({worker.name})" for worker in found)
        raise RefusedError("conflict", f"{named} may be any of {each}: name one by its id")
    return found[0]
