"""Members of a run: joining, tokens and rate limits; and the operator's invites and bans."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from blocktrain.coordinator.executor import BoundedCache
from blocktrain.coordinator.run import Run
from blocktrain.errors import RefusedError
from blocktrain.ledger.ledger import Ledger, Transaction
from blocktrain.ledger.schema import ACTIVE, LIVE, InviteRow, WorkerRow
from blocktrain.protocol import identity
from blocktrain.protocol.messages import (
    PROTOCOL,
    PROTOCOL_WITH_COMMITMENTS,
    Join,
    Joined,
    Role,
    Token,
    TokenRequest,
)
from blocktrain.swarm import reputation

log = logging.getLogger(__name__)

DAY = 24 * 3600.0
TOKEN_SECONDS = 3600
LONGEST_PAUSE = 30.0  # seconds until a worker that pauses asks again
VALIDATOR_SECONDS = 20.0  # silence after which a validator without a check has left
CLOCK_SKEW = 300.0
MOST_CACHED_INVITES = 16_384
SEEN_SECONDS = 1.0  # least time between two ledger writes of when a worker was last seen


@dataclass(frozen=True)
class Caller:
    """A worker, as identified by its token."""

    worker: str
    role: str


class Members:
    def __init__(self, run: Run) -> None:
        self.run = run
        self._invites: BoundedCache[str] = BoundedCache(MOST_CACHED_INVITES)  # by worker

    def join(self, request: Join) -> Joined:
        """Register a worker. A worker with a registered key may join again, even if the invite has
        no uses left."""
        if PROTOCOL not in request.protocols:
            reason = f"this run speaks protocol {PROTOCOL} only; update blocktrain"
            raise RefusedError("conflict", reason)
        key, run = request.public_key, self.run
        text = identity.join_text(run.id, request.invite)
        if not identity.verify(key, text, request.signature):
            raise RefusedError("unauthorized", "the signature does not match the public key")
        now, lease_seconds = run.clock(), run.config.swarm.lease_seconds
        with run.ledger.write() as tx:
            invite = self._valid_invite(tx, request.invite, now)
            row = tx.members.worker_of_key(key)
            if row:
                _refuse_banned(row)
                tx.members.touch_worker(row.id, now)
                tx.members.rename_worker(row.id, request.name, request.device)
                worker, role = row.id, row.role
                log.info("worker %s joined again", request.name, extra={"worker": worker})
            else:
                worker, role = _register(tx, invite, request, now, lease_seconds), invite.role
        return Joined(
            worker=worker,
            role=role,
            token=self._token(worker, role, now),
            token_seconds=TOKEN_SECONDS,
            description=run.description,
        )

    def protocols(self) -> tuple[int, ...]:
        """The versions of the protocol that this run speaks now."""
        with self.run.ledger.read() as tx:
            checks = tx.checks.required()
        return (PROTOCOL, PROTOCOL_WITH_COMMITMENTS) if checks else (PROTOCOL,)

    def renew(self, request: TokenRequest) -> Token:
        """Issue a new token to a worker that proves that it has its key."""
        now = self.run.clock()
        with self.run.ledger.read() as tx:
            worker = tx.members.worker(request.worker)
        text = identity.token_request_text(self.run.id, request.worker, request.time)
        if not worker or not identity.verify(worker.public_key, text, request.signature):
            reason = "the worker is unknown or the signature is wrong; join again"
            raise RefusedError("unauthorized", reason)
        if abs(request.time - now) > CLOCK_SKEW:
            reason = "your clock is more than five minutes off the coordinator's; correct it"
            raise RefusedError("unauthorized", reason)
        _refuse_banned(worker)
        return Token(token=self._token(worker.id, worker.role, now), token_seconds=TOKEN_SECONDS)

    def caller(self, token: str) -> Caller:
        claims = identity.check(self.run.token_secret, token, self.run.clock())
        return Caller(claims.worker, claims.role)

    def cached_invite(self, worker: str) -> str | None:
        """The invite that a worker joined with; None if it must be looked up."""
        return self._invites.get(worker)

    def invite_of(self, worker: str) -> str:
        """The invite that a worker joined with; "" if it is not recorded."""
        with self.run.ledger.read() as tx:
            row = tx.members.worker(worker)
        invite = row.invite or "" if row else ""
        self._invites.put(worker, invite)
        return invite

    def check_reader(self, secret: str) -> str:
        """Check an invite, which permits reading without joining. Returns its id."""
        with self.run.ledger.read() as tx:
            return self._valid_invite(tx, secret, self.run.clock()).id

    def touch(self, tx: Transaction, caller: Caller, now: float) -> WorkerRow:
        """Record that the worker was seen now. Returns its row."""
        worker = self.check_welcome(tx, caller)
        if now - worker.seen > SEEN_SECONDS:
            tx.members.touch_worker(caller.worker, now)
        return worker

    def check_welcome(self, tx: Transaction, caller: Caller) -> WorkerRow:
        """The worker's row. Refuses a banned worker, although its token is still valid."""
        worker = tx.members.worker(caller.worker)
        if worker is None:
            raise RefusedError("unauthorized", "this worker is not registered; join again")
        _refuse_banned(worker)
        return worker

    def note(self, caller: Caller) -> None:
        """Record that a worker that only reads was seen now."""
        with self.run.ledger.write() as tx:
            tx.members.touch_worker(caller.worker, self.run.clock())

    def _valid_invite(self, tx: Transaction, secret: str, now: float) -> InviteRow:
        invite = tx.members.invite(identity.hash_secret(secret))
        if invite is None:
            reason = "this invite is for another run or was altered; ask the operator for another"
            raise RefusedError("unauthorized", reason)
        if invite.revoked:
            raise RefusedError("gone", "this invite was revoked; ask the operator for another")
        if invite.expires < now:
            raise RefusedError("gone", "this invite has expired; ask the operator for another")
        return invite

    def _token(self, worker: str, role: str, now: float) -> str:
        return identity.issue(self.run.token_secret, worker, role, now, TOKEN_SECONDS)


def _register(
    tx: Transaction, invite: InviteRow, request: Join, now: float, lease_seconds: float
) -> str:
    if not tx.members.use_invite(invite.id):
        raise RefusedError("gone", "this invite has no uses left; ask the operator for another")
    worker = identity.new_identifier()
    start = reputation.at_joining(*tx.members.joined_with(invite.id))
    pause = reputation.pause_seconds(start.refused_in_a_row, lease_seconds)
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
            suspicion=start.suspicion,
            excluded_until=now + pause if pause else None,
        )
    )
    tx.events.add(now, "joined", worker, detail=f"{request.name}, {request.device}")
    return worker


def _refuse_banned(worker: WorkerRow) -> None:
    if worker.banned:
        reason = "the operator has banned this worker from the run; ask the operator why"
        raise RefusedError("forbidden", reason)
    if worker.excluded:
        what = "its checks were wrong" if worker.role == "validate" else "its updates failed checks"
        reason = f"this worker is excluded from the run, because {what}; ask the operator why"
        raise RefusedError("forbidden", reason)


def validators_present(tx: Transaction, now: float) -> set[str]:
    """Validators that ask for checks, or have one that is not overdue."""
    asking = tx.members.validators(now - VALIDATOR_SECONDS)
    return {each.id for each in asking} | {
        row.validator for row in tx.checks.due() if row.validator
    }


def end_work(tx: Transaction, worker: str, reason: str) -> None:
    """End a worker's leases, refuse its unmerged updates, and hand out their batches again."""
    ended = tx.leases.of_worker(worker, ACTIVE)
    for lease in ended:
        tx.leases.move(lease.id, "returned")
    for update in tx.updates.of_worker(worker, LIVE):
        tx.updates.refuse(update.lease, reason)
        if update.state == "pending" and (submitted := tx.leases.get(update.lease)):
            ended.append(submitted)
    for lease in ended:
        tx.blocks.give_back_range(lease.block, lease.first_batch, lease.steps)


class IssuedInvite(NamedTuple):
    invite: str
    secret: str


class InviteState(NamedTuple):
    invite: str
    role: Role
    uses_left: int
    seconds_left: float
    revoked: bool

    @property
    def is_usable(self) -> bool:
        """Whether a new worker can join with this invite."""
        return not self.revoked and self.uses_left > 0 and self.seconds_left > 0


class Operator:
    """Manages invites and bans. Needs only the ledger, so it works beside a running coordinator."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float]) -> None:
        self.ledger, self.clock = ledger, clock

    def invite(self, role: Role, uses: int, seconds: float) -> str:
        """Create an invite and return its secret. The ledger stores only a hash of it."""
        with self.ledger.write() as tx:
            return self._add_invite(tx, role, uses, seconds).secret

    def new_invite(self, role: Role, uses: int, seconds: float) -> "IssuedInvite":
        """Create an invite, and record an event."""
        with self.ledger.write() as tx:
            made = self._add_invite(tx, role, uses, seconds)
            detail = f"invite {made.invite}: {role}, {uses} uses, {seconds / DAY:g} days"
            tx.events.add(self.clock(), "invited", detail=detail)
        return made

    def _add_invite(self, tx: Transaction, role: Role, uses: int, seconds: float) -> "IssuedInvite":
        made = IssuedInvite(identity.new_identifier(), identity.new_secret())
        row = InviteRow(
            id=made.invite,
            secret_hash=identity.hash_secret(made.secret),
            role=role,
            uses_left=uses,
            expires=self.clock() + seconds,
        )
        tx.members.add_invite(row)
        return made

    def invites(self) -> list[InviteState]:
        now = self.clock()
        with self.ledger.read() as tx:
            return [_invite_state(row, now) for row in tx.members.invites()]

    def invite_of(self, secret: str) -> InviteState | None:
        """The invite with this secret, even if it is revoked or expired."""
        with self.ledger.read() as tx:
            row = tx.members.invite(identity.hash_secret(secret))
        return _invite_state(row, self.clock()) if row else None

    def revoke(self, invite: str, *, ban: bool = False) -> Sequence[WorkerRow]:
        """Revoke an invite. With `ban`, also ban the workers that joined with it, and return
        them."""
        with self.ledger.write() as tx:
            tx.blocks.lock()
            if not tx.members.revoke_invite(invite):
                reason = f"there is no invite {invite}; `blocktrain invite list` shows all ids"
                raise RefusedError("not_found", reason)
            tx.events.add(self.clock(), "revoked", detail=f"invite {invite}")
            workers = tx.members.workers_of_invite(invite) if ban else ()
            for worker in workers:
                self._ban(tx, worker.id)
        return workers

    def ban(self, name: str) -> WorkerRow:
        """Ban the worker with this name or id; a prefix of the id is enough."""
        with self.ledger.write() as tx:
            tx.blocks.lock()
            worker = find_worker(tx, name)
            self._ban(tx, worker.id)
        return worker

    def _ban(self, tx: Transaction, worker: str) -> None:
        """Ban a worker, and let the batches of its leases and unmerged updates be handed out
        again."""
        tx.members.ban_worker(worker)
        end_work(tx, worker, "the worker was banned")
        tx.events.add(self.clock(), "banned", worker)


def _invite_state(row: InviteRow, now: float) -> InviteState:
    return InviteState(row.id, row.role, row.uses_left, row.expires - now, row.revoked)


def find_worker(tx: Transaction, name: str) -> WorkerRow:
    """The only worker with this name, id or id prefix. A complete id takes precedence."""
    workers = tx.members.workers()
    matches = [worker for worker in workers if worker.id == name] or [
        worker for worker in workers if name and (worker.name == name or worker.id.startswith(name))
    ]
    if not matches:
        raise RefusedError(
            "not_found",
            f"there is no worker {name}; `blocktrain status INVITE` shows all names and ids",
        )
    if len(matches) > 1:
        each = ", ".join(f"{worker.id} ({worker.name})" for worker in matches)
        raise RefusedError("conflict", f"{name} matches several workers: {each}; give an id")
    return matches[0]
