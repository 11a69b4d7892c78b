"""The life of an update, from its offer until it waits to be merged.

    state     how it gets there
    offered   a worker names the chunks it is about to send, and signs for them
    pending   all bytes are here, their numbers pass verification, and it is not too late
    refused   it failed verification or came too late (here), went stale or lost chunks while it
              waited (`merger`), was never sent (`collector`), or its worker was banned (`members`)
    merged    it is part of a version (`merger`)

An update goes from offered to pending to merged, and from offered or pending to refused. It is
settled once: a worker that asks again gets the same receipt. A small update is offered, sent and
settled by one request (`receive_whole`), a larger one by several (`offer`, `receive_chunk`,
`commit`).
"""

import logging
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from starlette.concurrency import run_in_threadpool

from blocktrain import faults
from blocktrain.coordinator import reports
from blocktrain.coordinator.executor import LedgerExecutor, VerificationQueue
from blocktrain.coordinator.leases import LeaseGrant, Leases, own_lease
from blocktrain.coordinator.limits import BoundedCache
from blocktrain.coordinator.members import Caller, Members
from blocktrain.coordinator.run import Run
from blocktrain.coordinator.verification import UpdateVerifier
from blocktrain.errors import ProtocolError, RefusedError
from blocktrain.ledger.rows import LeaseRow, UpdateRow, Version
from blocktrain.ledger.schema import HELD
from blocktrain.ledger.transaction import Transaction
from blocktrain.protocol.messages import (
    CHUNK_BYTES,
    Moved,
    Receipt,
    Recipe,
    UpdateClaim,
    UpdateOffer,
    UploadState,
)
from blocktrain.storage.chunks import name_of
from blocktrain.swarm import merging_rules
from blocktrain.swarm.merging_rules import UpdateRefusal

log = logging.getLogger(__name__)

URL_SECONDS = 3600
PIECE_BYTES = 1 << 20  # of a chunk on its way in: all of it that is in memory
MAX_CACHED_UPLOADS = 1024
# How long an upload is served from memory: a worker that is banned can send chunks for as long.
UPLOAD_CACHE_SECONDS = 5.0
VERIFIED_AT_ONCE = 2  # updates: each has a chunk in memory and keeps a processor busy


class Upload(NamedTuple):
    """An update on its way in: what its worker signed, and what its lease allows."""

    claim: UpdateClaim
    chunks: frozenset[str]
    steps: int
    base: Version
    looked_up: float


class Updates:
    """`on_settled` is called when an update may have become due for merging."""

    def __init__(
        self,
        run: Run,
        members: Members,
        leases: Leases,
        executor: LedgerExecutor,
        on_settled: Callable[[], None],
    ) -> None:
        self.run, self.members, self.leases = run, members, leases
        self._executor, self._on_settled = executor, on_settled
        self._verifier = UpdateVerifier(run)
        self._verifications = VerificationQueue(VERIFIED_AT_ONCE)
        self._uploads: BoundedCache[Upload] = BoundedCache(MAX_CACHED_UPLOADS)  # by lease

    # In one request

    async def receive_whole(self, caller: Caller, offer: UpdateOffer, data: memoryview) -> Receipt:
        claim = offer.claim
        grant: LeaseGrant | Receipt | None = self.leases.cached_grant(caller, claim.lease)
        if grant is None:
            grant = await self._executor.run(self.find_grant, caller, claim)
        if isinstance(grant, Receipt):
            return grant
        fault = await self._verifications.run(self.store_whole, grant, offer, data)
        upload = self._upload(claim, grant.steps, grant.base)
        receipt = await self._executor.run(self.settle, caller, upload, fault, offer)
        self._settled()
        return receipt

    def find_grant(self, caller: Caller, claim: UpdateClaim) -> LeaseGrant | Receipt:
        """What the lease of a claim allows, or the receipt of its update if it was settled."""
        with self.run.ledger.read() as tx:
            worker = self.members.check_welcome(tx, caller)
            lease = own_lease(tx, caller, claim.lease, claim.fence)
            row = _recorded(tx, claim)
            if row and row.state != "offered":
                return _receipt(row)
            base = tx.versions.get(lease.block, lease.base_version)
            return LeaseGrant(worker.id, worker.public_key, lease.fence, lease.steps, base)

    def store_whole(self, grant: LeaseGrant, offer: UpdateOffer, data: memoryview) -> str:
        """Check the offer, then store the bytes; what is wrong with their numbers."""
        recipe = offer.claim.recipe
        reports.check_downloads(offer.downloads, self.run.config.block_count)
        self._verifier.check_offer(offer, grant)
        if len(data) != recipe.size or (name_of(data),) != recipe.chunks:
            raise RefusedError("malformed", "these bytes are not those of the claim")
        self.run.chunks.put(data, recipe.chunks[0])
        faults.reached("chunk-stored")
        return self._verifier.find_fault(recipe, grant.base, grant.steps)

    # In several requests

    async def offer(self, caller: Caller, offer: UpdateOffer) -> UploadState:
        """Which chunks are to be sent, and where to; none if the update was settled before."""
        if not await self._executor.run(self.record_offer, caller, offer):
            return UploadState(missing=())
        return await run_in_threadpool(self.upload_state, offer.claim)

    def record_offer(self, caller: Caller, offer: UpdateOffer) -> bool:
        """False if the update was settled before."""
        claim, now = offer.claim, self.run.clock()
        reports.check_downloads(offer.downloads, self.run.config.block_count)
        with self.run.ledger.write() as tx:
            worker = self.members.seen(tx, caller, now)
            self._verifier.check_sender(claim, worker.id)
            lease = own_lease(tx, caller, claim.lease, claim.fence)
            if row := _recorded(tx, claim):
                return row.state == "offered"
            base = tx.versions.get(lease.block, lease.base_version)
            grant = LeaseGrant(worker.id, worker.public_key, lease.fence, lease.steps, base)
            self._verifier.check_offer(offer, grant)
            _record(tx, offer, lease)
            tx.leases.move(claim.lease, "sending")
            self._uploads.put(claim.lease, self._upload(claim, lease.steps, base))
            return True

    def upload_state(self, claim: UpdateClaim) -> UploadState:
        missing = self._missing(claim.lease, claim.recipe)
        urls = {name: self.run.chunks.put_url(claim.lease, name, URL_SECONDS) for name in missing}
        known = {name: url for name, url in urls.items() if url is not None}
        return UploadState(missing=missing, urls=known or None)

    async def receive_chunk(
        self, caller: Caller, lease_id: str, name: str, parts: AsyncIterator[bytes]
    ) -> int:
        """Store a chunk of an offered update; its size."""
        upload = await self._find_upload(caller, lease_id)
        if isinstance(upload, Receipt):
            raise RefusedError("conflict", f"this update is {upload.state} already")
        check_expected(upload, name)
        with self.run.chunks.incoming() as chunk:
            piece = bytearray()
            async for part in parts:
                piece += part
                if len(piece) >= PIECE_BYTES:  # in a thread, because the disk may be slow
                    await run_in_threadpool(chunk.write, piece)
                    piece = bytearray()
            await run_in_threadpool(chunk.write, piece)
            try:
                await run_in_threadpool(chunk.keep, name)
            except ProtocolError as error:
                raise RefusedError("malformed", str(error)) from None
        faults.reached("chunk-stored")
        await self.leases.chunk_received(caller, lease_id)
        return chunk.size

    async def commit(self, caller: Caller, lease_id: str) -> Receipt:
        """Verify an update that was sent, and settle it. However many requests wait for it, this
        is done once."""
        upload = await self._find_upload(caller, lease_id)
        if isinstance(upload, Receipt):
            return upload

        async def verify_and_settle() -> Receipt:
            fault = await self._verifications.run(self.verify, upload)
            return await self._executor.run(self.settle, caller, upload, fault)

        receipt = await self._verifications.run_once(lease_id, verify_and_settle)
        self._settled()
        return receipt

    async def _find_upload(self, caller: Caller, lease_id: str) -> Upload | Receipt:
        """From memory for a few seconds. It may have been settled since: chunks that come then are
        collected later."""
        upload = self._uploads.get(lease_id)
        is_own = upload is not None and upload.claim.worker == caller.worker
        if upload and is_own and self.run.clock() - upload.looked_up < UPLOAD_CACHE_SECONDS:
            return upload
        return await self._executor.run(self.find_upload, caller, lease_id)

    def find_upload(self, caller: Caller, lease_id: str) -> Upload | Receipt:
        """An offered update, or its receipt if it was settled."""
        with self.run.ledger.read() as tx:
            self.members.check_welcome(tx, caller)
            row = tx.updates.get(lease_id)
            if row is None or row.worker != caller.worker:
                raise RefusedError("not_found", "no update was offered for this lease; offer it")
            if row.state != "offered":
                return _receipt(row)
            base = tx.versions.get(row.block, row.base_version)
            upload = self._upload(signed_claim(row), row.steps, base)
            self._uploads.put(lease_id, upload)
            return upload

    def verify(self, upload: Upload) -> str:
        """What is wrong with the numbers that were sent; empty if nothing is."""
        claim = upload.claim
        if missing := self._missing(claim.lease, claim.recipe):
            raise RefusedError("conflict", f"{len(missing)} chunks are missing; offer it again")
        try:
            return self._verifier.find_fault(claim.recipe, upload.base, upload.steps)
        finally:
            self.run.chunks.clear_quarantine(claim.lease)

    # Both ways end here

    def settle(
        self, caller: Caller, upload: Upload, fault: str, offer: UpdateOffer | None = None
    ) -> Receipt:
        """Accept an update or refuse it, and close its lease. `offer`: of an update that came
        whole, which is recorded in the same transaction."""
        now, claim = self.run.clock(), upload.claim
        self._uploads.pop(claim.lease)
        self.leases.forget_grant(claim.lease)
        with self.run.ledger.write() as tx:
            tx.blocks.lock()
            self.members.seen(tx, caller, now)
            lease = own_lease(tx, caller, claim.lease, claim.fence)
            row = _recorded(tx, claim)
            if row and row.state != "offered":
                return _receipt(row)
            if row is None:
                assert offer is not None, "an update in chunks is recorded when it is offered"
                if lease.state not in HELD:
                    tx.versions.get(lease.block, lease.base_version)  # it may be gone by now
                row = _record(tx, offer, lease)
            return self._close(tx, lease, row, upload, fault, now)

    def _close(
        self,
        tx: Transaction,
        lease: LeaseRow,
        row: UpdateRow,
        upload: Upload,
        fault: str,
        now: float,
    ) -> Receipt:
        uploaded = {
            lease.block: Moved(up=upload.claim.recipe.size, up_raw=upload.base.weights.size)
        }
        # A worker that has returned the lease reported its downloads with that.
        returned = lease.state == "returned"
        downloads = () if returned else reports.downloads_from_json(row.downloads)
        reports.count_traffic(tx, lease.worker, uploaded, downloads)
        in_time = tx.leases.move(lease.id, "submitted")
        version, base = tx.blocks.get(lease.block).version, _base_of(tx, lease)
        weight = merging_rules.update_weight(self.run.config.swarm, version, base)
        reason = fault or self._lateness(tx, lease, base, version, in_time=in_time)
        if in_time:
            tx.blocks.count_lease(lease.block, met=not reason)
        if reason:
            return self._refuse(tx, lease, reason, now, in_time=in_time)
        tx.updates.accept(lease.id, base, weight, now)
        self.leases.speeds.completed(lease.worker, lease.steps, now - lease.created)
        kind = "uploaded" if weight == 1.0 else "late"
        tx.events.add(now, kind, lease.worker, lease.block, f"{lease.steps} steps")
        return Receipt(state="pending", reason="", weight=weight)

    def _refuse(
        self, tx: Transaction, lease: LeaseRow, reason: str, now: float, *, in_time: bool
    ) -> Receipt:
        tx.updates.refuse(lease.id, reason)
        if in_time:
            tx.blocks.give_back_range(lease.block, lease.first_batch, lease.steps)
        tx.events.add(now, "refused", lease.worker, lease.block, reason)
        fields = {"lease": lease.id, "worker": lease.worker, "block": lease.block}
        log.info("update refused: %s", reason, extra=fields)
        return Receipt(state="refused", reason=reason, weight=0.0)

    def _lateness(
        self, tx: Transaction, lease: LeaseRow, base: int, version: int, *, in_time: bool
    ) -> str:
        """Why an update does not count any more; empty if it does."""
        swarm = self.run.config.swarm

        def reclaim() -> bool:
            return tx.blocks.reclaim_range(lease.block, lease.first_batch, lease.steps)

        verdict = merging_rules.judge_update(swarm, version, base, in_time=in_time, reclaim=reclaim)
        match verdict.refusal:
            case UpdateRefusal.TOO_STALE:
                return (
                    f"it is {version - base} versions behind, more than {swarm.most_stale};"
                    " request a new lease"
                )
            case UpdateRefusal.HANDED_OUT_AGAIN:
                return (
                    f"the lease was {lease.state} and its text handed out again;"
                    " request a new lease, and send heartbeats until the commit is answered"
                )
            case None:
                return ""

    def _settled(self) -> None:
        faults.reached("settled")
        self._on_settled()

    def _upload(self, claim: UpdateClaim, steps: int, base: Version) -> Upload:
        return Upload(claim, frozenset(claim.recipe.chunks), steps, base, self.run.clock())

    def _missing(self, lease_id: str, recipe: Recipe) -> tuple[str, ...]:
        """Chunks that are not here yet, in order. Those in quarantine are checked and admitted."""
        stored = self.run.chunks.has(recipe.chunks)
        last = len(recipe.chunks) - 1
        missing = []
        for position, name in enumerate(recipe.chunks):
            size = CHUNK_BYTES if position < last else recipe.size - last * CHUNK_BYTES
            if name not in stored and not self.run.chunks.admit(lease_id, name, size):
                missing.append(name)
        return tuple(dict.fromkeys(missing))


def check_expected(upload: Upload, name: str) -> None:
    if name not in upload.chunks:
        raise RefusedError("forbidden", "this chunk is no part of the update that was offered")


def signed_claim(row: UpdateRow) -> UpdateClaim:
    return UpdateClaim.model_validate_json(row.offer)


def _record(tx: Transaction, offer: UpdateOffer, lease: LeaseRow) -> UpdateRow:
    row = UpdateRow(
        lease=lease.id,
        worker=lease.worker,
        block=lease.block,
        base_version=lease.base_version,
        steps=lease.steps,
        offer=offer.claim.model_dump_json(),
        signature=offer.signature,
        loss=offer.claim.loss,
        downloads=reports.downloads_to_json(offer.downloads),
        continues=lease.continues,
    )
    tx.updates.add(row)
    return row


def _recorded(tx: Transaction, claim: UpdateClaim) -> UpdateRow | None:
    """The update that was offered for a lease, if any; no other can be offered for it."""
    row = tx.updates.get(claim.lease)
    if row and row.offer != claim.model_dump_json():
        raise RefusedError("conflict", "another update was offered for this lease")
    return row


def _base_of(tx: Transaction, lease: LeaseRow) -> int:
    """The version a lease's update counts as trained from."""
    continued = tx.updates.get(lease.continues) if lease.continues else None
    return merging_rules.effective_base(
        lease.base_version, continued.merged_into if continued else None
    )


def _receipt(row: UpdateRow) -> Receipt:
    assert row.state != "offered"
    return Receipt(state=row.state, reason=row.reason, weight=row.weight)
