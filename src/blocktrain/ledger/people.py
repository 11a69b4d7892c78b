"""Who may come, and who came: invites and workers, inside of one transaction."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import insert, select, update

from blocktrain.ledger import statements
from blocktrain.ledger.prepared import Found
from blocktrain.ledger.schema import invites, leases, workers
from blocktrain.ledger.session import StatementSession
from blocktrain.ledger.statements import in_state


class People:
    def __init__(self, session: StatementSession) -> None:
        self._session = session

    def add_invite(self, **values: Any) -> None:
        self._session.run(insert(invites).values(**values, revoked=False))

    def invites(self) -> Sequence[Found]:
        return self._session.run(select(invites).order_by(invites.c.expires)).all()

    def revoke_invite(self, invite: str) -> bool:
        return self._session.changed(
            update(invites).where(invites.c.id == invite).values(revoked=True)
        )

    def invite(self, secret_hash: str) -> Found | None:
        return self._session.run(
            select(invites).where(invites.c.secret_hash == secret_hash)
        ).first()

    def use_invite(self, invite: str) -> bool:
        """Count one use; False where none is left."""
        chosen = update(invites).where(invites.c.id == invite, invites.c.uses_left > 0)
        return self._session.changed(chosen.values(uses_left=invites.c.uses_left - 1))

    def add_worker(self, **values: Any) -> None:
        self._session.run(
            insert(workers).values(**values, banned=False, batches_merged=0, updates_merged=0)
        )

    def worker(self, worker: str) -> Found | None:
        return self._session.first(statements.WORKER, of_worker=worker)

    def worker_of_key(self, public_key: str) -> Found | None:
        return self._session.run(select(workers).where(workers.c.public_key == public_key)).first()

    def workers(self) -> Sequence[Found]:
        return self._session.run(select(workers).order_by(workers.c.joined)).all()

    def workers_of_invite(self, invite: str) -> Sequence[Found]:
        """Those who joined with it and are not banned."""
        chosen = select(workers).where(workers.c.invite == invite, ~workers.c.banned)
        return self._session.run(chosen.order_by(workers.c.joined)).all()

    def touch_worker(self, worker: str, now: float) -> None:
        self._session.tell(statements.TOUCH_WORKER, of_worker=worker, now=now)

    def rename_worker(self, worker: str, name: str, device: str) -> None:
        chosen = update(workers).where(workers.c.id == worker)
        self._session.run(chosen.values(name=name, device=device))

    def ban_worker(self, worker: str) -> bool:
        return self._session.changed(
            update(workers).where(workers.c.id == worker).values(banned=True)
        )

    def lost_workers(self) -> set[str]:
        """Whose lease ran out, and of whom nothing was heard since."""
        chosen = select(workers.c.id).join(leases, leases.c.worker == workers.c.id)
        silent = leases.c.deadline >= workers.c.seen
        return set(self._session.run(chosen.where(in_state(leases, "expired"), silent)).scalars())
