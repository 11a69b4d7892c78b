"""Invites, and the workers that joined with them."""

from sqlalchemy import bindparam, insert, select, update

from blocktrain.ledger.rows import InviteRow, Statements, WorkerRow
from blocktrain.ledger.schema import in_state, invites, leases, the_worker, workers


class Members(Statements):
    def add_invite(self, row: InviteRow) -> None:
        self.write(insert(invites), **vars(row))

    def invites(self) -> list[InviteRow]:
        return self.rows(InviteRow, select(invites).order_by(invites.c.expires))

    def invite(self, secret_hash: str) -> InviteRow | None:
        return self.first(InviteRow, select(invites).where(invites.c.secret_hash == secret_hash))

    def revoke_invite(self, invite: str) -> bool:
        """False if there is no such invite."""
        return bool(self.write(update(invites).where(invites.c.id == invite).values(revoked=True)))

    def use_invite(self, invite: str) -> bool:
        """Count one use; False if none is left."""
        unused = update(invites).where(invites.c.id == invite, invites.c.uses_left > 0)
        return bool(self.write(unused.values(uses_left=invites.c.uses_left - 1)))

    def add_worker(self, row: WorkerRow) -> None:
        self.write(insert(workers), **vars(row))

    WORKER = select(workers).where(workers.c.id == the_worker)
    TOUCH = update(workers).where(workers.c.id == the_worker).values(seen=bindparam("now"))

    def worker(self, worker: str) -> WorkerRow | None:
        return self.first(WorkerRow, self.WORKER, the_worker=worker)

    def worker_of_key(self, public_key: str) -> WorkerRow | None:
        return self.first(WorkerRow, select(workers).where(workers.c.public_key == public_key))

    def workers(self) -> list[WorkerRow]:
        return self.rows(WorkerRow, select(workers).order_by(workers.c.joined))

    def workers_of_invite(self, invite: str) -> list[WorkerRow]:
        """Workers that joined with an invite and are not banned."""
        joined = select(workers).where(workers.c.invite == invite, ~workers.c.banned)
        return self.rows(WorkerRow, joined.order_by(workers.c.joined))

    def touch_worker(self, worker: str, now: float) -> None:
        """Note when a worker was last heard from."""
        self.write(self.TOUCH, the_worker=worker, now=now)

    def rename_worker(self, worker: str, name: str, device: str) -> None:
        same = update(workers).where(workers.c.id == worker)
        self.write(same.values(name=name, device=device))

    def ban_worker(self, worker: str) -> bool:
        """False if there is no such worker."""
        return bool(self.write(update(workers).where(workers.c.id == worker).values(banned=True)))

    def lost_workers(self) -> set[str]:
        """Ids of workers whose lease expired and that were not heard from since."""
        expired = select(workers.c.id).join(leases, leases.c.worker == workers.c.id)
        silent = leases.c.deadline >= workers.c.seen
        lost = expired.where(in_state(leases, "expired"), silent)
        return set(self.connection.execute(lost).scalars())
