"""Who takes part: joining, tokens, signs of life."""

from dataclasses import dataclass

from blocktrain.coordinator.run import Run
from blocktrain.errors import RefusedError
from blocktrain.ledger.rows import InviteRow, WorkerRow
from blocktrain.ledger.transaction import Transaction
from blocktrain.protocol import identity, tokens
from blocktrain.protocol.messages import PROTOCOL, Join, Joined, Token, TokenRequest

TOKEN_SECONDS = 3600
CLOCK_SKEW = 300.0
SEEN_SECONDS = 1.0  # signs of life closer to each other than this are one


@dataclass(frozen=True)
class Caller:
    """A worker, by its token."""

    worker: str
    role: str


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
            known = tx.members.worker_of_key(asked.public_key)
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
            worker = tx.members.worker(asked.worker)
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

    def seen(self, tx: Transaction, caller: Caller, now: float) -> WorkerRow:
        """The worker's row, its last sign of life noted."""
        worker = self.check_welcome(tx, caller)
        if now - worker.seen > SEEN_SECONDS:
            tx.members.touch_worker(caller.worker, now)
        return worker

    def check_welcome(self, tx: Transaction, caller: Caller) -> WorkerRow:
        """The worker's row; a banned one gets no further, whatever its token says."""
        worker = tx.members.worker(caller.worker)
        if worker is None:
            raise RefusedError("unauthorized", "this worker is unknown here")
        _refuse_banned(worker)
        return worker

    def note(self, caller: Caller) -> None:
        """A sign of life, of a worker that only reads for now."""
        with self.run.ledger.write() as tx:
            tx.members.touch_worker(caller.worker, self.run.clock())

    def _again(self, tx: Transaction, known: WorkerRow, asked: Join, now: float) -> str:
        _refuse_banned(known)
        tx.members.touch_worker(known.id, now)
        tx.members.rename_worker(known.id, asked.name, asked.device)
        return str(known.id)

    def _first(self, tx: Transaction, invite: InviteRow, asked: Join, now: float) -> str:
        if not tx.members.use_invite(invite.id):
            raise RefusedError("gone", "this invite has no uses left; ask for another")
        worker = tokens.new_identifier()
        tx.members.add_worker(
            WorkerRow(
                id=worker,
                public_key=asked.public_key,
                name=asked.name,
                device=asked.device,
                role=invite.role,
                invite=invite.id,
                joined=now,
                seen=now,
            )
        )
        tx.events.add(now, "joined", worker, detail=f"{asked.name}, {asked.device}")
        return worker

    def _valid_invite(self, tx: Transaction, secret: str, now: float) -> InviteRow:
        invite = tx.members.invite(tokens.hash_secret(secret))
        if invite is None:
            raise RefusedError("unauthorized", "this invite is not of this run")
        if invite.revoked:
            raise RefusedError("gone", "this invite was revoked; ask for another")
        if invite.expires < now:
            raise RefusedError("gone", "this invite has expired; ask for another")
        return invite

    def _token(self, worker: str, role: str, now: float) -> str:
        return tokens.issue(self.run.token_secret, worker, role, now, TOKEN_SECONDS)


def _refuse_banned(worker: WorkerRow) -> None:
    if worker.banned:
        raise RefusedError("forbidden", "this worker was banned from the run")
