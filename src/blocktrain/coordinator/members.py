"""Who takes part in a run: joining, tokens and heartbeats; and the operator's invites and bans."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from blocktrain.coordinator.run import Run
from blocktrain.errors import RefusedError
from blocktrain.ledger.ledger import Ledger
from blocktrain.ledger.rows import InviteRow, WorkerRow
from blocktrain.ledger.schema import HELD, LIVE
from blocktrain.ledger.transaction import Transaction
from blocktrain.protocol import identity
from blocktrain.protocol.messages import PROTOCOL, Join, Joined, Role, Token, TokenRequest

log = logging.getLogger(__name__)

TOKEN_SECONDS = 3600
CLOCK_SKEW = 300.0
SEEN_SECONDS = 1.0  # a worker's last request is written to the ledger at most this often


@dataclass(frozen=True)
class Caller:
    """A worker, as its token says."""

    worker: str
    role: str


class Members:
    def __init__(self, run: Run) -> None:
        self.run = run

    def join(self, request: Join) -> Joined:
        """Register a worker. One whose key is registered may join again, even if the invite has no
        uses left."""
        if PROTOCOL not in request.protocols:
            raise RefusedError(
                "conflict", f"this run speaks protocol {PROTOCOL} only; update blocktrain"
            )
        if not identity.verify_join(
            request.public_key, self.run.id, request.invite, request.signature
        ):
            raise RefusedError("unauthorized", "the signature was not made by the key that joins")
        now = self.run.clock()
        with self.run.ledger.write() as tx:
            invite = self._valid_invite(tx, request.invite, now)
            row = tx.members.worker_of_key(request.public_key)
            if row:
                _refuse_banned(row)
                tx.members.touch_worker(row.id, now)
                tx.members.rename_worker(row.id, request.name, request.device)
                worker, role = row.id, row.role
            else:
                worker, role = _register(tx, invite, request, now), invite.role
        log.info("worker joined: %s", request.name, extra={"worker": worker, "role": role})
        return Joined(
            worker=worker,
            role=role,
            token=self._token(worker, role, now),
            token_seconds=TOKEN_SECONDS,
            description=self.run.description,
        )

    def renew(self, request: TokenRequest) -> Token:
        now = self.run.clock()
        with self.run.ledger.read() as tx:
            worker = tx.members.worker(request.worker)
        if worker is None or not identity.verify_token_request(
            worker.public_key, self.run.id, request.worker, request.time, request.signature
        ):
            raise RefusedError(
                "unauthorized", "this worker is unknown or did not sign this; join again"
            )
        if abs(request.time - now) > CLOCK_SKEW:
            raise RefusedError(
                "unauthorized", "the clocks differ by more than five minutes; set this machine's"
            )
        _refuse_banned(worker)
        return Token(token=self._token(worker.id, worker.role, now), token_seconds=TOKEN_SECONDS)

    def caller(self, token: str) -> Caller:
        claims = identity.check(self.run.token_secret, token, self.run.clock())
        return Caller(claims.worker, claims.role)

    def check_reader(self, secret: str) -> None:
        """Anyone with an invite may read without joining."""
        with self.run.ledger.read() as tx:
            self._valid_invite(tx, secret, self.run.clock())

    def seen(self, tx: Transaction, caller: Caller, now: float) -> WorkerRow:
        """The worker's row, after noting that it was heard of now."""
        worker = self.check_welcome(tx, caller)
        if now - worker.seen > SEEN_SECONDS:
            tx.members.touch_worker(caller.worker, now)
        return worker

    def check_welcome(self, tx: Transaction, caller: Caller) -> WorkerRow:
        """The worker's row. A banned worker is refused although its token is still valid."""
        worker = tx.members.worker(caller.worker)
        if worker is None:
            raise RefusedError("unauthorized", "this worker is unknown here; join again")
        _refuse_banned(worker)
        return worker

    def note(self, caller: Caller) -> None:
        """Note that a worker which only reads was heard of now."""
        with self.run.ledger.write() as tx:
            tx.members.touch_worker(caller.worker, self.run.clock())

    def _valid_invite(self, tx: Transaction, secret: str, now: float) -> InviteRow:
        invite = tx.members.invite(identity.hash_secret(secret))
        if invite is None:
            raise RefusedError("unauthorized", "this invite is not of this run")
        if invite.revoked:
            raise RefusedError("gone", "this invite was revoked; ask the operator for another")
        if invite.expires < now:
            raise RefusedError("gone", "this invite has expired; ask the operator for another")
        return invite

    def _token(self, worker: str, role: str, now: float) -> str:
        return identity.issue(self.run.token_secret, worker, role, now, TOKEN_SECONDS)


def _register(tx: Transaction, invite: InviteRow, request: Join, now: float) -> str:
    if not tx.members.use_invite(invite.id):
        raise RefusedError("gone", "this invite has no uses left; ask the operator for another")
    worker = identity.new_identifier()
    tx.members.add_worker(
        WorkerRow(
            id=worker,
            public_key=request.public_key,
            name=request.name,
            device=request.device,
            role=invite.role,
            invite=invite.id,
            joined=now,
            seen=now,
        )
    )
    tx.events.add(now, "joined", worker, detail=f"{request.name}, {request.device}")
    return worker


def _refuse_banned(worker: WorkerRow) -> None:
    if worker.banned:
        raise RefusedError("forbidden", "this worker was banned from the run")


class InviteState(NamedTuple):
    invite: str
    role: Role
    uses_left: int
    seconds_left: float
    revoked: bool

    @property
    def is_usable(self) -> bool:
        """Whether a new worker can join with it."""
        return not self.revoked and self.uses_left > 0 and self.seconds_left > 0


class Operator:
    """Invites and bans. Needs the ledger only, so that it works beside a running coordinator."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float]) -> None:
        self.ledger, self._clock = ledger, clock

    def invite(self, role: Role, uses: int, seconds: float) -> str:
        """The secret of a new invite. The ledger holds its hash only."""
        secret = identity.new_secret()
        with self.ledger.write() as tx:
            tx.members.add_invite(
                InviteRow(
                    id=identity.new_identifier(),
                    secret_hash=identity.hash_secret(secret),
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
        """The invite with this secret, also if it was revoked or has expired."""
        with self.ledger.read() as tx:
            row = tx.members.invite(identity.hash_secret(secret))
        return _invite_state(row, self._clock()) if row else None

    def revoke(self, invite: str, *, ban: bool = False) -> Sequence[WorkerRow]:
        """End an invite. With `ban`, the workers that joined by it are banned, and returned."""
        with self.ledger.write() as tx:
            tx.blocks.lock()
            if not tx.members.revoke_invite(invite):
                raise RefusedError(
                    "not_found", f"there is no invite {invite}; `invite list` shows them"
                )
            workers = tx.members.workers_of_invite(invite) if ban else ()
            for worker in workers:
                self._ban(tx, worker.id)
        return workers

    def ban(self, name: str) -> WorkerRow:
        """Ban the worker of this name or id; the first characters of an id will do."""
        with self.ledger.write() as tx:
            tx.blocks.lock()
            worker = _find_worker(tx.members.workers(), name)
            self._ban(tx, worker.id)
        return worker

    def _ban(self, tx: Transaction, worker: str) -> None:
        """Its leases, and its updates that are not merged, are handed out to others."""
        tx.members.ban_worker(worker)
        for lease in tx.leases.of_worker(worker, HELD):
            tx.leases.move(lease.id, "returned")
            tx.blocks.give_back_range(lease.block, lease.first_batch, lease.steps)
        for update in tx.updates.of_worker(worker, LIVE):
            lease_of_update = tx.leases.get(update.lease)
            assert lease_of_update is not None
            tx.updates.refuse(update.lease, "the worker was banned")
            if update.state == "pending":
                tx.blocks.give_back_range(
                    lease_of_update.block, lease_of_update.first_batch, lease_of_update.steps
                )
        tx.events.add(self._clock(), "banned", worker)
        log.info("worker banned", extra={"worker": worker})


def _invite_state(row: InviteRow, now: float) -> InviteState:
    return InviteState(row.id, row.role, row.uses_left, row.expires - now, row.revoked)


def _find_worker(workers: Sequence[WorkerRow], name: str) -> WorkerRow:
    """The one worker of this name or id; a whole id counts before all else."""
    matches = [worker for worker in workers if worker.id == name] or [
        worker for worker in workers if name and (worker.name == name or worker.id.startswith(name))
    ]
    if not matches:
        raise RefusedError("not_found", f"there is no worker {name}; `status` shows them")
    if len(matches) > 1:
        each = ", ".join(f"{worker.id} ({worker.name})" for worker in matches)
        raise RefusedError("conflict", f"{name} may be any of {each}; name one by its id")
    return matches[0]
