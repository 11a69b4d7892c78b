"""Who takes part: invites, workers, tokens, bans."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from blocktrain.coordinator.run import Run
from blocktrain.errors import RefusedError
from blocktrain.protocol import identity, tokens
from blocktrain.protocol.messages import (
    PROTOCOL,
    Join,
    Joined,
    Role,
    Token,
    TokenRequest,
)
from blocktrain.storage.prepared import Found
from blocktrain.storage.schema import HELD, LIVE
from blocktrain.storage.transaction import Transaction

TOKEN_SECONDS = 3600
CLOCK_SKEW = 300.0
SEEN_SECONDS = 1.0  # signs of life closer to each other than this are one


@dataclass(frozen=True)
class Caller:
    """A worker, by its token."""

    worker: str
    role: str


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


class Members:
    def __init__(self, run: Run) -> None:
        self.run = run

    def join(self, asked: Join) -> Joined:
        """Take a worker in; one that is known by its key is taken in again, whatever the invite
        has left."""
        if PROTOCOL not in asked.protocols:
            raise RefusedError("conflict", f"this run speaks protocol {PROTOCOL} alone")
        if not identity.verify_join(asked.public_key, self.run.id, asked.invite, asked.signature):
            raise RefusedError("unauthorized", "the signature is not by the key that joins")
        now = self.run.clock()
        with self.run.ledger.write() as tx:
            invite = self._valid_invite(tx, asked.invite, now)
            known = tx.people.worker_of_key(asked.public_key)
            if known:
                worker, role = self._again(tx, known, asked, now), known.role
            else:
                worker, role = self._first(tx, invite, asked, now), invite.role
        return Joined(
            worker=worker,
            role=role,
            token=self._token(worker, role, now),
            token_seconds=TOKEN_SECONDS,
            description=self.run.description,
        )

    def renew(self, asked: TokenRequest) -> Token:
        now = self.run.clock()
        with self.run.ledger.read() as tx:
            worker = tx.people.worker(asked.worker)
        if worker is None or not identity.verify_token_request(
            worker.public_key, self.run.id, asked.worker, asked.time, asked.signature
        ):
            raise RefusedError("unauthorized", "this worker is unknown or did not sign this")
        if abs(asked.time - now) > CLOCK_SKEW:
            raise RefusedError("unauthorized", "the clocks differ by more than five minutes")
        _refuse_banned(worker)
        return Token(token=self._token(worker.id, worker.role, now), token_seconds=TOKEN_SECONDS)

    def caller(self, token: str) -> Caller:
        claims = tokens.check(self.run.token_secret, token, self.run.clock())
        return Caller(claims.worker, claims.role)

    def check_reader(self, secret: str) -> None:
        """Someone with an invite may look on without joining."""
        with self.run.ledger.read() as tx:
            self._valid_invite(tx, secret, self.run.clock())

    def seen(self, tx: Transaction, caller: Caller, now: float) -> Found:
        """The worker's row, its last sign of life noted."""
        worker = self.check_welcome(tx, caller)
        if now - worker.seen > SEEN_SECONDS:
            tx.people.touch_worker(caller.worker, now)
        return worker

    def check_welcome(self, tx: Transaction, caller: Caller) -> Found:
        """The worker's row; a banned one gets no further, whatever its token says."""
        worker = tx.people.worker(caller.worker)
        if worker is None:
            raise RefusedError("unauthorized", "this worker is unknown here")
        _refuse_banned(worker)
        return worker

    def invite(self, role: Role, uses: int, seconds: float) -> str:
        """A new invite's secret: told here and never again, kept as a hash."""
        secret = tokens.new_secret()
        with self.run.ledger.write() as tx:
            tx.people.add_invite(
                id=tokens.new_identifier(),
                secret_hash=tokens.hash_secret(secret),
                role=role,
                uses_left=uses,
                expires=self.run.clock() + seconds,
            )
        return secret

    def invites(self) -> list[InviteState]:
        now = self.run.clock()
        with self.run.ledger.read() as tx:
            return [_invite_state(row, now) for row in tx.people.invites()]

    def invite_of(self, secret: str) -> InviteState | None:
        """The invite that has this secret, whatever became of it."""
        with self.run.ledger.read() as tx:
            row = tx.people.invite(tokens.hash_secret(secret))
        return _invite_state(row, self.run.clock()) if row else None

    def revoke(self, invite: str) -> None:
        with self.run.ledger.write() as tx:
            if not tx.people.revoke_invite(invite):
                raise RefusedError("not_found", f"there is no invite {invite}")

    def ban(self, named: str) -> Found:
        """Nothing more from the worker of this name or id (its beginning will do); what it holds,
        or sent and was not merged, is handed out to others."""
        now = self.run.clock()
        with self.run.ledger.write() as tx:
            tx.lock_blocks()
            found = _named(tx.people.workers(), named)
            worker: str = found.id
            tx.people.ban_worker(worker)
            for lease in tx.leases_of(worker, HELD):
                tx.move_lease(lease.id, "returned")
                tx.give_back_range(lease.block, lease.first_batch, lease.steps)
            for update in tx.updates_of(worker, LIVE):
                covered = tx.lease(update.lease)
                assert covered is not None
                tx.refuse_update(update.lease, "the worker was banned")
                if update.state == "pending":
                    tx.give_back_range(covered.block, covered.first_batch, covered.steps)
            tx.records.add_event(now, "banned", worker)
        return found

    def note(self, caller: Caller) -> None:
        """A sign of life, of a worker that only reads for now."""
        with self.run.ledger.write() as tx:
            tx.people.touch_worker(caller.worker, self.run.clock())

    def _again(self, tx: Transaction, known: Found, asked: Join, now: float) -> str:
        _refuse_banned(known)
        tx.people.touch_worker(known.id, now)
        tx.people.rename_worker(known.id, asked.name, asked.device)
        return str(known.id)

    def _first(self, tx: Transaction, invite: Found, asked: Join, now: float) -> str:
        if not tx.people.use_invite(invite.id):
            raise RefusedError("gone", "this invite has no uses left; ask for another")
        worker = tokens.new_identifier()
        tx.people.add_worker(
            id=worker,
            public_key=asked.public_key,
            name=asked.name,
            device=asked.device,
            role=invite.role,
            joined=now,
            seen=now,
        )
        tx.records.add_event(now, "joined", worker, detail=f"{asked.name}, {asked.device}")
        return worker

    def _valid_invite(self, tx: Transaction, secret: str, now: float) -> Found:
        invite = tx.people.invite(tokens.hash_secret(secret))
        if invite is None:
            raise RefusedError("unauthorized", "this invite is not of this run")
        if invite.revoked:
            raise RefusedError("gone", "this invite was revoked; ask for another")
        if invite.expires < now:
            raise RefusedError("gone", "this invite has expired; ask for another")
        return invite

    def _token(self, worker: str, role: str, now: float) -> str:
        return tokens.issue(self.run.token_secret, worker, role, now, TOKEN_SECONDS)


def _invite_state(row: Found, now: float) -> InviteState:
    return InviteState(row.id, row.role, row.uses_left, row.expires - now, row.revoked)


def _named(workers: Sequence[Found], named: str) -> Found:
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


def _refuse_banned(worker: Found) -> None:
    if worker.banned:
        raise RefusedError("forbidden", "this worker was banned from the run")
