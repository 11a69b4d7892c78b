"""Taking updates in: offered, sent in chunks, verified, counted once."""

from blocktrain.coordinator import plan
from blocktrain.coordinator.leases import own_lease
from blocktrain.coordinator.members import Caller, Members
from blocktrain.coordinator.run import Run
from blocktrain.core import faults
from blocktrain.errors import ProtocolError, RefusedError
from blocktrain.protocol import identity
from blocktrain.protocol.messages import (
    CHUNK_BYTES,
    Blob,
    Receipt,
    Recipe,
    UpdateClaim,
    UpdateOffer,
    UploadState,
)
from blocktrain.storage.chunks import name_of
from blocktrain.storage.ledger import Found, Transaction
from blocktrain.storage.merging import check_update

URL_SECONDS = 3600


class Updates:
    def __init__(self, run: Run, members: Members) -> None:
        self.run, self.members = run, members

    def offer(self, caller: Caller, offer: UpdateOffer) -> UploadState:
        """Take down what a worker is about to send; which chunks of it are missing."""
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
                return UploadState(missing=())
        missing = self._missing(claim.lease, claim.recipe)
        return UploadState(missing=missing, urls=self._put_urls(claim.lease, missing))

    def put_chunk(self, caller: Caller, lease: str, name: str, data: bytes) -> None:
        with self.run.ledger.read() as tx:
            self.members.check_welcome(tx, caller)
            offered = self._offered(tx, caller, lease)
        if offered.state != "offered":
            raise RefusedError("conflict", f"this update is {offered.state} already")
        if name not in claimed(offered).recipe.chunks:
            raise RefusedError("forbidden", "this chunk is no part of the update that was offered")
        if name_of(data) != name:
            raise RefusedError("malformed", "these bytes do not have the hash they are sent as")
        self.run.chunks.put(data)
        faults.reached("chunk-stored")

    def commit(self, caller: Caller, lease: str) -> Receipt:
        """Verify what was sent and count it, once; asked again, the same answer."""
        with self.run.ledger.read() as tx:
            offered = self._offered(tx, caller, lease)
            if offered.state != "offered":
                return _receipt(offered)
            base = tx.version(offered.block, offered.base_version)
        recipe = claimed(offered).recipe
        if missing := self._missing(lease, recipe):
            raise RefusedError("conflict", f"{len(missing)} chunks are missing")
        blob = self.run.blobs.add_recipe(recipe)
        try:
            check_update(self.run.blobs, blob, base.weights)
        except ProtocolError as error:
            receipt = self._settle(caller, lease, None, str(error))
        else:
            receipt = self._settle(caller, lease, blob, "")
        self.run.chunks.clear_quarantine(lease)
        return receipt

    def _settle(self, caller: Caller, lease: str, blob: Blob | None, fault: str) -> Receipt:
        """Count an update or refuse it, and close its lease, in one transaction."""
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
            if blob is None or reason:
                tx.refuse_update(lease, reason)
                if in_time:
                    tx.give_back_range(held.block, held.first_batch, held.steps)
                tx.add_event(now, "refused", caller.worker, held.block, reason)
            else:
                block = tx.block(held.block)
                assert block is not None
                weight = plan.weight(self.run.config.swarm, block.version, held.base_version)
                tx.accept_update(lease, blob, weight, now)
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
