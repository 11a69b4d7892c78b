"""Taking updates in: offered, sent in chunks, verified, counted once.

Each method asks either the ledger or the store, never both: the one is done at the desk, the other
may take its time.
"""

from typing import NamedTuple

from blocktrain.coordinator import plan
from blocktrain.coordinator.leases import own_lease
from blocktrain.coordinator.members import Caller, Members
from blocktrain.coordinator.run import Run
from blocktrain.core import faults
from blocktrain.errors import ProtocolError, RefusedError
from blocktrain.protocol import identity
from blocktrain.protocol.messages import (
    CHUNK_BYTES,
    Receipt,
    Recipe,
    UpdateClaim,
    UpdateOffer,
    UploadState,
)
from blocktrain.protocol.tensors import TensorSpec
from blocktrain.storage.chunks import Incoming
from blocktrain.storage.ledger import Transaction, Version
from blocktrain.storage.merging import check_update, weights_form
from blocktrain.storage.prepared import Found

URL_SECONDS = 3600


class Sent(NamedTuple):
    """An update that is said to be here."""

    lease: str
    recipe: Recipe
    base: Version


class Updates:
    def __init__(self, run: Run, members: Members) -> None:
        self.run, self.members = run, members
        self._forms: dict[int, list[TensorSpec]] = {}

    def offer(self, caller: Caller, offer: UpdateOffer) -> bool:
        """Take down what a worker is about to send; whether it is to be sent."""
        claim, now = offer.claim, self.run.clock()
        with self.run.ledger.write() as tx:
            worker = self.members.seen(tx, caller, now)
            self._check_signed(worker, offer)
            lease = own_lease(tx, caller, claim.lease, claim.fence)
            known = tx.update(claim.lease)
            if known is None:
                self._check_fits(tx, claim, lease)
                tx.add_update(
                    lease=claim.lease,
                    worker=caller.worker,
                    block=claim.block,
                    base_version=claim.base_version,
                    steps=lease.steps,
                    offer=claim.model_dump_json(),
                    signature=offer.signature,
                    loss=claim.loss,
                )
                tx.move_lease(claim.lease, "sending")
            elif known.offer != claim.model_dump_json():
                raise RefusedError("conflict", "another update was offered for this lease")
            elif known.state != "offered":
                return False
        return True

    def upload_state(self, lease: str, recipe: Recipe) -> UploadState:
        """Which chunks of an offered update are still to be sent, and where to."""
        missing = self._missing(lease, recipe)
        return UploadState(missing=missing, urls=self._put_urls(lease, missing))

    def check_expected(self, caller: Caller, lease: str, name: str) -> None:
        """Whether this chunk of this update is waited for."""
        with self.run.ledger.read() as tx:
            self.members.check_welcome(tx, caller)
            offered = self._offered(tx, caller, lease)
        if offered.state != "offered":
            raise RefusedError("conflict", f"this update is {offered.state} already")
        if name not in claimed(offered).recipe.chunks:
            raise RefusedError("forbidden", "this chunk is no part of the update that was offered")

    def keep_chunk(self, arrived: Incoming, name: str) -> None:
        try:
            arrived.keep(name)
        except ProtocolError as error:
            raise RefusedError("malformed", str(error)) from None
        faults.reached("chunk-stored")

    def find(self, caller: Caller, lease: str) -> Receipt | Sent:
        """What became of an update, or what there is to verify before it counts."""
        with self.run.ledger.read() as tx:
            offered = self._offered(tx, caller, lease)
            if offered.state != "offered":
                return _receipt(offered)
            base = tx.version(offered.block, offered.base_version)
        return Sent(lease, claimed(offered).recipe, base)

    def verify(self, sent: Sent) -> str:
        """What is wrong with the bytes that were sent; empty where nothing is."""
        if missing := self._missing(sent.lease, sent.recipe):
            raise RefusedError("conflict", f"{len(missing)} chunks are missing")
        try:
            check_update(self.run.blobs.reader(sent.recipe), self._form(sent.base))
        except ProtocolError as error:
            return str(error)
        finally:
            self.run.chunks.clear_quarantine(sent.lease)
        return ""

    def _form(self, version: Version) -> list[TensorSpec]:
        """A block's tensors, which are the same in all of its versions."""
        if version.block not in self._forms:
            reader = self.run.blobs.reader(version.weights)
            self._forms[version.block] = weights_form(reader)
        return self._forms[version.block]

    def settle(self, caller: Caller, lease: str, fault: str) -> Receipt:
        """Count an update or refuse it, and close its lease: once; asked again, the same answer."""
        now = self.run.clock()
        with self.run.ledger.write() as tx:
            tx.lock_blocks()
            self.members.seen(tx, caller, now)
            held, offered = tx.lease(lease), tx.update(lease)
            assert held is not None and offered is not None
            if offered.state != "offered":
                return _receipt(offered)
            in_time = tx.move_lease(lease, "submitted")
            reason = fault or self._too_late(tx, held, in_time=in_time)
            if reason:
                tx.refuse_update(lease, reason)
                if in_time:
                    tx.give_back_range(held.block, held.first_batch, held.steps)
                tx.add_event(now, "refused", caller.worker, held.block, reason)
            else:
                block = tx.block(held.block)
                assert block is not None
                weight = plan.weight(self.run.config.swarm, block.version, held.base_version)
                tx.accept_update(lease, weight, now)
                kind = "uploaded" if weight == 1.0 else "late"
                tx.add_event(now, kind, caller.worker, held.block, f"{held.steps} steps")
            if in_time:
                tx.count_lease(held.block, met=not reason)
            settled = tx.update(lease)
            assert settled is not None
            return _receipt(settled)

    def _too_late(self, tx: Transaction, lease: Found, *, in_time: bool) -> str:
        """Why an update does not count any more; empty where it does."""
        block = tx.block(lease.block)
        assert block is not None
        swarm = self.run.config.swarm
        if plan.weight(swarm, block.version, lease.base_version) == 0.0:
            behind = block.version - lease.base_version
            return f"it is {behind} versions behind, more than {swarm.most_stale}"
        if in_time or tx.reclaim_range(lease.block, lease.first_batch, lease.steps):
            return ""
        return f"the lease was {lease.state} and its text handed out again"

    def _check_signed(self, worker: Found, offer: UpdateOffer) -> None:
        if offer.claim.run != self.run.id or offer.claim.worker != worker.id:
            raise RefusedError("forbidden", "the claim is for another run or by another worker")
        if not identity.verify_update(worker.public_key, offer.claim, offer.signature):
            raise RefusedError("forbidden", "the signature does not fit the claim")

    def _check_fits(self, tx: Transaction, claim: UpdateClaim, lease: Found) -> None:
        """Before a byte is taken: the right block, the right base, the right size."""
        if (claim.block, claim.base_version) != (lease.block, lease.base_version):
            raise RefusedError("conflict", "the claim's block or base version is not the lease's")
        expected = tx.version(lease.block, lease.base_version).weights.size
        if claim.recipe.size != expected:
            raise RefusedError(
                "too_large" if claim.recipe.size > expected else "malformed",
                f"the update has {claim.recipe.size} bytes, the block {expected}",
            )
        chunks = -(-claim.recipe.size // CHUNK_BYTES)
        if len(claim.recipe.chunks) != chunks:
            raise RefusedError("malformed", f"{claim.recipe.size} bytes are {chunks} chunks")

    def _missing(self, lease: str, recipe: Recipe) -> tuple[str, ...]:
        """Chunks not here yet, in order; what lies in quarantine is verified and taken in."""
        held = self.run.chunks.has(recipe.chunks)
        last = len(recipe.chunks) - 1
        missing = []
        for position, name in enumerate(recipe.chunks):
            size = CHUNK_BYTES if position < last else recipe.size - last * CHUNK_BYTES
            if name not in held and not self.run.chunks.admit(lease, name, size):
                missing.append(name)
        return tuple(dict.fromkeys(missing))

    def _put_urls(self, lease: str, missing: tuple[str, ...]) -> dict[str, str] | None:
        urls = {name: self.run.chunks.put_url(lease, name, URL_SECONDS) for name in missing}
        return {name: url for name, url in urls.items() if url is not None} or None

    def _offered(self, tx: Transaction, caller: Caller, lease: str) -> Found:
        offered = tx.update(lease)
        if offered is None or offered.worker != caller.worker:
            raise RefusedError("not_found", "no update was offered for this lease")
        return offered


def claimed(update: Found) -> UpdateClaim:
    return UpdateClaim.model_validate_json(update.offer)


def _receipt(update: Found) -> Receipt:
    return Receipt(state=update.state, reason=update.reason, weight=update.weight)
