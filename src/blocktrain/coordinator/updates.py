"""The life cycle of an update, from its offer until it is ready to be merged.

    state     how an update reaches it
    offered   a worker signs a claim that lists the chunks it is about to send
    pending   all chunks are stored, verification passes, and it is not too late. If the run
              requires checks, it then waits for the results of validators (`checks`, `verdicts`)
    refused   it failed verification or came too late (here), failed its checks (`verdicts`), went
              stale or lost chunks while it waited (`merger`), was never sent (`collector`), or its
              worker was banned or excluded (`members`, `standing`)
    merged    it is part of a version (`merger`)

An update is settled once: repeated requests get the same receipt. A small update is offered, sent
and settled in one request (`receive_whole`), a larger one in several (`offer`, `receive_chunk`,
`commit`).
"""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

from pydantic import TypeAdapter
from starlette.concurrency import run_in_threadpool

from blocktrain import faults
from blocktrain.coordinator import reports, standing
from blocktrain.coordinator.executor import BoundedCache, LedgerExecutor
from blocktrain.coordinator.leases import (
    LeaseGrant,
    Leases,
    add_event,
    give_back_batches,
    own_lease,
)
from blocktrain.coordinator.members import Caller, Members
from blocktrain.coordinator.run import Run
from blocktrain.coordinator.verification import Finding, UpdateVerifier, VerificationQueue
from blocktrain.errors import ProtocolError, RefusedError
from blocktrain.ledger.ledger import Transaction
from blocktrain.ledger.schema import (
    ACTIVE,
    LeaseRow,
    UpdateRow,
    UpdateStatus,
    Version,
    WorkerRow,
)
from blocktrain.protocol.messages import (
    CHUNK_BYTES,
    Downloaded,
    Receipt,
    Recipe,
    UpdateClaim,
    UpdateOffer,
    UploadState,
)
from blocktrain.protocol.status_messages import Moved
from blocktrain.storage.chunks import name_of
from blocktrain.swarm import merging_rules, reputation
from blocktrain.swarm.merging_rules import UpdateRefusal

URL_SECONDS = 3600
PIECE_BYTES = 1 << 20  # write size of an incoming chunk; bounds its memory
MAX_CACHED_UPLOADS = 1024
# How long a cached upload is used before the ledger is read again. A banned worker can go on
# sending chunks for that long.
UPLOAD_CACHE_SECONDS = 5.0
DOWNLOADS = TypeAdapter(tuple[Downloaded, ...])
UNSENT: tuple[UpdateStatus, ...] = ("offered",)
INVITE_SHARE = 0.5  # of the free disk space, for unfinished uploads of one invite's workers
UPLOADS_FULL = "unfinished uploads of this invite's workers fill the coordinator's disk; try later"
VERIFIED_AT_ONCE = 2  # each keeps a chunk in memory and a CPU core busy


class Upload(NamedTuple):
    """An update in transit: the worker's signed claim, and what its lease allows."""

    claim: UpdateClaim
    chunks: Mapping[str, int]  # the size of each, by name
    lease: LeaseRow
    base: Version
    looked_up: float


class Updates:
    """Receives, verifies and settles updates. `on_pending` is called with the lease of an update
    that has become pending, in the same transaction; `on_settled`, when an update may have become
    due for a check or for merging."""

    def __init__(
        self,
        run: Run,
        members: Members,
        leases: Leases,
        executor: LedgerExecutor,
        on_pending: Callable[[Transaction, str], None],
        on_settled: Callable[[], None],
        size_of_revealed: Callable[[Caller, str, str], int | None],
    ) -> None:
        """`size_of_revealed`: the size of a chunk of a file that a worker was asked for, for a
        replay of a lease; None if it was not."""
        self.run, self.members, self.leases = run, members, leases
        self._executor, self._size_of_revealed = executor, size_of_revealed
        self._on_pending, self._on_settled = on_pending, on_settled
        self._verifier = UpdateVerifier(run)
        self._verifications = VerificationQueue(VERIFIED_AT_ONCE)
        self._uploads: BoundedCache[Upload] = BoundedCache(MAX_CACHED_UPLOADS)  # by lease

    # In one request

    async def receive_whole(self, caller: Caller, offer: UpdateOffer, data: memoryview) -> Receipt:
        """Verify and settle an update that arrived in one request with its offer."""
        claim = offer.claim
        grant: LeaseGrant | Receipt | None
        grant = self.leases.cached_grant(caller, claim.lease, claim.fence)
        if grant is None:
            grant = await self._executor.run(self.find_grant, caller, claim)
        if isinstance(grant, Receipt):
            return grant
        finding = await self._verifications.run(self.store_whole, grant, offer, data)
        upload = self._upload(claim, grant.lease, grant.base)
        return await self._settled(caller, upload, finding, offer)

    def find_grant(self, caller: Caller, claim: UpdateClaim) -> LeaseGrant | Receipt:
        """The grant that a claim names, or the receipt of its update if that is settled."""
        with self.run.ledger.read() as tx:
            worker = self.members.check_welcome(tx, caller)
            lease = own_lease(tx, caller, claim.lease, claim.fence)
            row = _recorded(tx, claim)
            if row and row.state != "offered":
                return _receipt(row)
            return LeaseGrant(worker, lease, tx.versions.get(lease.block, lease.base_version))

    def store_whole(self, grant: LeaseGrant, offer: UpdateOffer, data: memoryview) -> Finding:
        """Check the offer of a whole update, store its bytes and examine its numbers."""
        recipe = offer.claim.recipe
        reports.check_downloads(offer.downloads, self.run.config.block_count)
        self._verifier.check_offer(offer, grant)
        if len(data) != recipe.size or (name_of(data),) != recipe.chunks:
            raise RefusedError("malformed", "the data does not match the hash in the claim")
        self.run.chunks.put(data, recipe.chunks[0])
        faults.reached("chunk-stored")
        return self._verifier.examine(recipe, grant.lease, grant.base)

    # In several requests

    async def offer(self, caller: Caller, offer: UpdateOffer) -> UploadState:
        """Record an offer. Returns the chunks to send and their URLs; none if the update is settled
        already."""
        if not await self._executor.run(self.record_offer, caller, offer):
            return UploadState(missing=())
        claim = offer.claim
        return await run_in_threadpool(upload_state, self.run, claim.lease, [claim.recipe])

    def record_offer(self, caller: Caller, offer: UpdateOffer) -> bool:
        """Record an offer, and mark its lease as sending. Returns False if the update is settled
        already."""
        claim, now = offer.claim, self.run.clock()
        reports.check_downloads(offer.downloads, self.run.config.block_count)
        with self.run.ledger.write() as tx:
            worker = self.members.touch(tx, caller, now)
            self._verifier.check_sender(claim, worker.id)
            lease = own_lease(tx, caller, claim.lease, claim.fence)
            if row := _recorded(tx, claim):
                return row.state == "offered"
            base = tx.versions.get(lease.block, lease.base_version)
            self._verifier.check_offer(offer, LeaseGrant(worker, lease, base))
            self._check_quota(tx, worker, claim.recipe.size)
            _record(tx, offer, lease)
            tx.leases.move(claim.lease, "sending")
            self._uploads.put(claim.lease, self._upload(claim, lease, base))
            return True

    def _check_quota(self, tx: Transaction, worker: WorkerRow, size: int) -> None:
        """Limit what a worker and its invite may leave on the disk without a commit."""
        held = {lease.id for lease in tx.leases.of_worker(worker.id, ACTIVE)}
        for row in tx.updates.of_worker(worker.id, UNSENT):
            if row.lease not in held:
                tx.updates.refuse(row.lease, "the worker offered a newer update before it sent it")
        free = self.run.chunks.free_bytes()
        if worker.invite is None or free is None:
            return
        offered = tx.updates.offered_with(worker.invite)
        if offered and (offered + 1) * size > INVITE_SHARE * free:
            raise RefusedError("unavailable", UPLOADS_FULL)

    async def receive_chunk(
        self,
        caller: Caller,
        lease_id: str,
        name: str,
        parts: Callable[[int], AsyncIterator[bytes]],
    ) -> int:
        """Store a chunk of an offered update. Returns its size. `parts` returns the parts of the
        chunk, and refuses it if it is longer than expected."""
        upload = await self._find_upload(caller, lease_id)
        if isinstance(upload, Receipt):
            size = await run_in_threadpool(self._size_of_revealed, caller, lease_id, name)
            if size is None:
                raise RefusedError("conflict", f"this update is already {upload.state}")
            expected = size
        else:
            expected = expected_size(upload, name)
        with self.run.chunks.incoming() as chunk:
            piece = bytearray()
            async for part in parts(expected):
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
        """Verify a sent update and settle it. Concurrent requests for it share one verification."""
        upload = await self._find_upload(caller, lease_id)
        if isinstance(upload, Receipt):
            return upload

        async def verify_and_settle() -> Receipt:
            finding = await self._verifications.run(self.verify, upload)
            return await self._settled(caller, upload, finding)

        return await self._verifications.run_once(lease_id, verify_and_settle)

    async def _find_upload(self, caller: Caller, lease_id: str) -> Upload | Receipt:
        """The upload of a lease, or its receipt, from a cache that is at most a few seconds old. If
        the update was settled in these seconds, chunks that still arrive are collected as garbage
        later."""
        upload = self._uploads.get(lease_id)
        is_own = upload is not None and upload.claim.worker == caller.worker
        if upload and is_own and self.run.clock() - upload.looked_up < UPLOAD_CACHE_SECONDS:
            return upload
        return await self._executor.run(self.find_upload, caller, lease_id)

    def find_upload(self, caller: Caller, lease_id: str) -> Upload | Receipt:
        """An offered update, or its receipt if it is settled."""
        with self.run.ledger.read() as tx:
            self.members.check_welcome(tx, caller)
            row = tx.updates.get(lease_id)
            if row is None or row.worker != caller.worker:
                reason = "no update was offered for this lease; send its offer first"
                raise RefusedError("not_found", reason)
            if row.state != "offered":
                return _receipt(row)
            lease = tx.leases.get(lease_id)
            assert lease is not None
            base = tx.versions.get(row.block, row.base_version)
            upload = self._upload(signed_claim(row), lease, base)
            self._uploads.put(lease_id, upload)
            return upload

    def verify(self, upload: Upload) -> Finding:
        """Check that all chunks have arrived, and examine the numbers."""
        claim = upload.claim
        if missing := _missing(self.run, claim.lease, claim.recipe):
            reason = f"chunks of the update are missing ({len(missing)}); offer the update again"
            raise RefusedError("conflict", reason)
        try:
            return self._verifier.examine(claim.recipe, upload.lease, upload.base)
        finally:
            self.run.chunks.clear_quarantine(claim.lease)

    # Settling

    async def _settled(
        self, caller: Caller, upload: Upload, finding: Finding, offer: UpdateOffer | None = None
    ) -> Receipt:
        receipt = await self._executor.run(self.settle, caller, upload, finding, offer)
        faults.reached("settled")
        self._on_settled()
        return receipt

    def settle(
        self, caller: Caller, upload: Upload, finding: Finding, offer: UpdateOffer | None = None
    ) -> Receipt:
        """Accept or refuse an update, and close its lease. `offer`: the offer of a whole update,
        which is recorded in the same transaction."""
        claim = upload.claim
        self._uploads.pop(claim.lease)
        self.leases.grants.pop(claim.lease)
        with self.run.ledger.write() as tx:
            tx.blocks.lock()
            self.members.touch(tx, caller, self.run.clock())
            lease = own_lease(tx, caller, claim.lease, claim.fence)
            row = _recorded(tx, claim)
            if row and row.state != "offered":
                return _receipt(row)
            if row is None:
                assert offer is not None, "an update in chunks is recorded when it is offered"
                if lease.state not in ACTIVE:
                    tx.versions.get(lease.block, lease.base_version)  # raises if it was deleted
                row = _record(tx, offer, lease)
            return self._close(tx, lease, row, upload, finding)

    def _close(
        self, tx: Transaction, lease: LeaseRow, row: UpdateRow, upload: Upload, finding: Finding
    ) -> Receipt:
        now = self.run.clock()
        moved = Moved(up=upload.claim.recipe.size, up_raw=upload.base.weights.size)
        # A worker that returned the lease has already reported its downloads.
        text = row.downloads if lease.state != "returned" else None
        downloads = DOWNLOADS.validate_json(text) if text else ()
        reports.count_traffic(tx, lease.worker, {lease.block: moved}, downloads)
        in_time = tx.leases.move(lease.id, "submitted")
        continued = tx.updates.get(lease.continues) if lease.continues else None
        merged_into = continued.merged_into if continued else None
        base = merging_rules.effective_base(lease.base_version, merged_into)
        version = tx.blocks.get(lease.block).version
        reason = finding.fault or self._lateness(tx, lease, version, base, in_time=in_time)
        if in_time:
            tx.blocks.count_lease(lease.block, met=not reason)
        if reason:
            refuse_update(tx, lease, reason, now, give_back=in_time)
            if finding.fault:
                evidence = reputation.UNUSUAL if finding.is_possible else reputation.REFUSED
                standing.update_refused(self.run, tx, lease, finding.fault, evidence)
            return Receipt(state="refused", reason=reason, weight=0.0)
        weight = merging_rules.update_weight(self.run.config.swarm, version, base)
        norms = finding.move.to_json() if finding.move else None
        tx.updates.accept(lease.id, base, weight, now, norms)
        add_event(tx, now, "uploaded" if weight == 1.0 else "late", lease, f"{lease.steps} steps")
        if tx.checks.required():
            self._on_pending(tx, lease.id)
        else:
            self.leases.speeds.completed(lease.worker, lease.steps, now - lease.created)
        return Receipt(state="pending", reason="", weight=weight)

    def _lateness(
        self, tx: Transaction, lease: LeaseRow, version: int, base: int, *, in_time: bool
    ) -> str:
        """Why an update comes too late to count; empty if it does not."""
        swarm, batches = self.run.config.swarm, (lease.block, lease.first_batch, lease.steps)
        reclaim = partial(tx.blocks.reclaim_range, *batches)
        verdict = merging_rules.judge_update(swarm, version, base, in_time=in_time, reclaim=reclaim)
        if verdict.refusal is UpdateRefusal.TOO_STALE:
            behind = f"the update is {version - base} versions behind, more than"
            return f"{behind} {swarm.most_stale}; request a new lease"
        if verdict.refusal is UpdateRefusal.HANDED_OUT_AGAIN:
            return (
                f"the lease is {lease.state} and its batches were handed out again;"
                " request a new lease, and send heartbeats until the commit is answered"
            )
        return ""

    def _upload(self, claim: UpdateClaim, lease: LeaseRow, base: Version) -> Upload:
        return Upload(claim, chunk_sizes(claim.recipe), lease, base, self.run.clock())


def upload_state(run: Run, lease: str, recipes: Iterable[Recipe]) -> UploadState:
    """The chunks of files that are not stored yet, and where to send them."""
    names = [name for recipe in recipes for name in _missing(run, lease, recipe)]
    missing = tuple(dict.fromkeys(names))
    urls = {name: url for name in missing if (url := run.chunks.put_url(lease, name, URL_SECONDS))}
    return UploadState(missing=missing, urls=urls or None)


def _missing(run: Run, lease: str, recipe: Recipe) -> list[str]:
    """Chunks of a file that are not stored yet, in order. Chunks in quarantine are checked, and
    stored if they are intact."""
    stored = run.chunks.has(recipe.chunks)
    return [
        name
        for name, size in chunk_sizes(recipe).items()
        if name not in stored and not run.chunks.admit(lease, name, size)
    ]


def expected_size(upload: Upload, name: str) -> int:
    """The size of a chunk; refused if it is not part of the update."""
    if name not in upload.chunks:
        raise RefusedError("forbidden", "this chunk is not part of the offered update")
    return upload.chunks[name]


def chunk_sizes(recipe: Recipe) -> dict[str, int]:
    """The sizes of a file's chunks, by name."""
    sizes: dict[str, int] = {}
    for position, name in enumerate(recipe.chunks):
        sizes.setdefault(name, min(CHUNK_BYTES, recipe.size - position * CHUNK_BYTES))
    return sizes


def signed_claim(row: UpdateRow) -> UpdateClaim:
    return UpdateClaim.model_validate_json(row.offer)


def refuse_update(
    tx: Transaction, lease: LeaseRow, reason: str, now: float, *, give_back: bool
) -> None:
    """Refuse an update unless it is merged or refused already. `give_back`: let its batches be
    handed out again."""
    if tx.updates.refuse(lease.id, reason):
        if give_back:
            give_back_batches(tx, lease)
        add_event(tx, now, "refused", lease, reason)


def _record(tx: Transaction, offer: UpdateOffer, lease: LeaseRow) -> UpdateRow:
    """Record an offered update in the ledger."""
    row = UpdateRow(
        lease=lease.id,
        worker=lease.worker,
        block=lease.block,
        base_version=lease.base_version,
        steps=lease.steps,
        offer=offer.claim.model_dump_json(),
        signature=offer.signature,
        loss=offer.claim.loss,
        downloads=DOWNLOADS.dump_json(offer.downloads).decode() if offer.downloads else None,
        continues=lease.continues,
    )
    tx.updates.add(row)
    return row


def _recorded(tx: Transaction, claim: UpdateClaim) -> UpdateRow | None:
    """The update offered for a lease, if any. A lease can have only one."""
    row = tx.updates.get(claim.lease)
    if row and row.offer != claim.model_dump_json():
        raise RefusedError(
            "conflict", "another update was offered for this lease before; request a new lease"
        )
    return row


def _receipt(row: UpdateRow) -> Receipt:
    assert row.state != "offered"
    return Receipt(state=row.state, reason=row.reason, weight=row.weight)
