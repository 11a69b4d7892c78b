"""Taking updates in: offered, sent in chunks, verified, counted once.

Each method asks either the ledger or the store, never both: the one is done at the desk, the other
may take its time.
"""

from typing import NamedTuple

from blocktrain import faults
from blocktrain.codec.frames import largest_encoded_size
from blocktrain.codec.registry import Codec, update_codec
from blocktrain.coordinator import traffic
from blocktrain.coordinator.leases import LeaseGrant, own_lease
from blocktrain.coordinator.limits import LruCache
from blocktrain.coordinator.members import Caller, Members
from blocktrain.coordinator.run import Run
from blocktrain.errors import ProtocolError, RefusedError
from blocktrain.ledger.rows import LeaseRow, UpdateRow, Version
from blocktrain.ledger.schema import HELD
from blocktrain.ledger.transaction import Transaction
from blocktrain.protocol import identity
from blocktrain.protocol.messages import (
    CHUNK_BYTES,
    Moved,
    Receipt,
    Recipe,
    UpdateClaim,
    UpdateOffer,
    UploadState,
)
from blocktrain.storage.chunks import IncomingChunk, name_of
from blocktrain.storage.tensor_file import TensorSpec
from blocktrain.storage.validation import check_encoded, check_update
from blocktrain.storage.weights_file import weights_form
from blocktrain.swarm import merging_rules
from blocktrain.swarm.attendance import Speeds
from blocktrain.swarm.merging_rules import UpdateRefusal

URL_SECONDS = 3600
BYTES_OF_A_NUMBER = 4
MOST_COMING = 1024  # offers in memory; whoever is not among them costs a look into the ledger
ROUNDING = 1e-4  # of the weights: every step rounds them to float32
MOMENT = 5.0  # seconds: so long a worker that was banned may go on sending what it had offered


class OfferedUpdate(NamedTuple):
    """An update that was offered and is on its way in."""

    worker: str
    lease: str
    recipe: Recipe
    chunks: frozenset[str]
    steps: int
    base: Version
    looked_up: float


class Updates:
    def __init__(
        self, run: Run, members: Members, handed_out: LruCache[LeaseGrant], speeds: Speeds
    ) -> None:
        self.run, self.members, self._handed_out = run, members, handed_out
        self._speeds = speeds
        self._forms: dict[int, list[TensorSpec]] = {}
        self._coming: LruCache[OfferedUpdate] = LruCache(MOST_COMING)  # by lease: see `coming`

    def offer(self, caller: Caller, offer: UpdateOffer) -> bool:
        """Take down what a worker is about to send; whether it is to be sent."""
        claim, now = offer.claim, self.run.clock()
        traffic.check_downloads(offer.downloads, self.run.config.block_count)
        with self.run.ledger.write() as tx:
            worker = self.members.seen(tx, caller, now)
            self._check_named(claim, worker.id)
            lease = own_lease(tx, caller, claim.lease, claim.fence)
            if known := _known(tx, claim):
                return bool(known.state == "offered")
            base = tx.versions.get(lease.block, lease.base_version)
            self._check_fits(claim, base)
            _check_signed(offer, worker.public_key)  # last: with 65,536 chunks it takes long
            _take_down(tx, offer, lease)
            tx.leases.move(claim.lease, "sending")
            self._remember(claim, lease.steps, base)
            return True

    def upload_state(self, lease: str, recipe: Recipe) -> UploadState:
        """Which chunks of an offered update are still to be sent, and where to."""
        missing = self._missing(lease, recipe)
        return UploadState(missing=missing, urls=self._put_urls(lease, missing))

    def coming(self, caller: Caller, lease: str) -> OfferedUpdate | None:
        """An update whose offer was looked up a moment ago, without asking the ledger again. It
        may have been settled since: then its chunks are collected like any that nobody needs."""
        known = self._coming.get(lease)
        if not known or known.worker != caller.worker:
            return None
        return known if self.run.clock() - known.looked_up < MOMENT else None

    def keep_chunk(self, arrived: IncomingChunk, name: str) -> None:
        try:
            arrived.keep(name)
        except ProtocolError as error:
            raise RefusedError("malformed", str(error)) from None
        faults.reached("chunk-stored")

    def find(self, caller: Caller, lease: str) -> Receipt | OfferedUpdate:
        """What became of an update, or what is still to come of it."""
        with self.run.ledger.read() as tx:
            self.members.check_welcome(tx, caller)
            offered = _offered(tx, caller, lease)
            if offered.state != "offered":
                return _receipt(offered)
            base = tx.versions.get(offered.block, offered.base_version)
            return self._remember(claimed(offered), offered.steps, base)

    def verify(self, coming: OfferedUpdate) -> str:
        """What is wrong with the bytes that were sent; empty where nothing is."""
        if missing := self._missing(coming.lease, coming.recipe):
            raise RefusedError("conflict", f"{len(missing)} chunks are missing")
        try:
            return self._fault(coming.recipe, coming.base, coming.steps)
        finally:
            self.run.chunks.clear_quarantine(coming.lease)

    def _fault(self, recipe: Recipe, base: Version, steps: int) -> str:
        form, codec, blobs = self._form(base), self._largest_codec(), self.run.blobs
        try:
            if codec:
                return self._too_far(steps, check_encoded(blobs, recipe, form, codec))
            changes = check_update(blobs, recipe, base.weights, form)
        except ProtocolError as error:
            return str(error)
        faults = (self._too_far(steps, moved, size, name) for name, moved, size in changes)
        return next(filter(None, faults), "")

    def _too_far(self, steps: int, moved: float, size: float = 0.0, tensor: str = "") -> str:
        """What is wrong with a distance; `size`: of the weights it starts from."""
        config = self.run.config
        most = merging_rules.largest_move(config.train, config.swarm, steps, size) + ROUNDING * size
        if moved <= most:
            return ""
        what = f"tensor {tensor!r}" if tensor else "the block"
        return (
            f"it moves {what} by {moved:.3g}, {steps} steps can move it by {most:.3g} at most"
            " (rms); train on from the base version of the lease"
        )

    # Small ones, in one request

    def held(self, caller: Caller, lease: str) -> LeaseGrant | None:
        """A lease that was handed out here a moment ago, without asking the ledger."""
        known = self._handed_out.get(lease)
        return known if known and known.worker == caller.worker else None

    def find_held(self, caller: Caller, claim: UpdateClaim) -> LeaseGrant | Receipt:
        """The same from the ledger; the receipt of an update that is settled."""
        with self.run.ledger.read() as tx:
            worker = self.members.check_welcome(tx, caller)
            lease = own_lease(tx, caller, claim.lease, claim.fence)
            known = _known(tx, claim)
            if known and known.state != "offered":
                return _receipt(known)
            base = tx.versions.get(lease.block, lease.base_version)
            return LeaseGrant(worker.id, worker.public_key, lease.fence, lease.steps, base)

    def take_whole(self, held: LeaseGrant, offer: UpdateOffer, data: memoryview) -> str:
        """Store an update that came whole; what is wrong with its numbers, empty where nothing is.
        Of whoever cannot show that it is his to send, and fits, nothing is stored; of one lease, no
        more than it takes to settle it."""
        claim = offer.claim
        traffic.check_downloads(offer.downloads, self.run.config.block_count)
        self._check_named(claim, held.worker)
        if claim.fence != held.fence:
            raise RefusedError("conflict", "the fencing token is not this lease's")
        self._check_fits(claim, held.base)
        _check_signed(offer, held.public_key)
        if len(data) != claim.recipe.size or (name_of(data),) != claim.recipe.chunks:
            raise RefusedError("malformed", "these bytes are not those of the claim")
        self.run.chunks.put(data, claim.recipe.chunks[0])
        faults.reached("chunk-stored")
        return self._fault(claim.recipe, held.base, held.steps)

    def settle_whole(
        self, caller: Caller, held: LeaseGrant, offer: UpdateOffer, fault: str
    ) -> Receipt:
        """Take it down and count it or refuse it, at once; asked again, the same answer."""
        now, claim = self.run.clock(), offer.claim
        self._handed_out.forget(claim.lease)
        with self.run.ledger.write() as tx:
            tx.blocks.lock()
            self.members.seen(tx, caller, now)
            lease = own_lease(tx, caller, claim.lease, claim.fence)
            known = _known(tx, claim)
            if known and known.state != "offered":
                return _receipt(known)
            if lease.state not in HELD:
                tx.versions.get(lease.block, lease.base_version)  # nobody kept it for this lease
            offered = known or _take_down(tx, offer, lease)
            return self._close(tx, lease, offered, claim.recipe.size, held.base, fault, now)

    def _remember(self, claim: UpdateClaim, steps: int, base: Version) -> OfferedUpdate:
        chunks = frozenset(claim.recipe.chunks)
        now = self.run.clock()
        coming = OfferedUpdate(claim.worker, claim.lease, claim.recipe, chunks, steps, base, now)
        self._coming.remember(claim.lease, coming)
        return coming

    def _form(self, version: Version) -> list[TensorSpec]:
        """A block's tensors, which are the same in all of its versions."""
        if version.block not in self._forms:
            reader = self.run.blobs.reader(version.weights)
            self._forms[version.block] = weights_form(reader)
        return self._forms[version.block]

    def settle(self, caller: Caller, lease: str, fault: str) -> Receipt:
        """Count an update or refuse it, and close its lease: once; asked again, the same answer."""
        now = self.run.clock()
        coming = self._coming.forget(lease)
        with self.run.ledger.write() as tx:
            tx.blocks.lock()
            self.members.seen(tx, caller, now)
            held, offered = tx.leases.get(lease), _offered(tx, caller, lease)
            assert held is not None
            if offered.state != "offered":
                return _receipt(offered)
            size, started_from = (
                (coming.recipe.size, coming.base)
                if coming
                else (
                    claimed(offered).recipe.size,
                    tx.versions.get(offered.block, offered.base_version),
                )
            )
            return self._close(tx, held, offered, size, started_from, fault, now)

    def _close(
        self,
        tx: Transaction,
        lease: LeaseRow,
        offered: UpdateRow,
        size: int,
        started_from: Version,
        fault: str,
        now: float,
    ) -> Receipt:
        """Of an update that was sent and verified: its bytes, its lease, whether it counts."""
        moved = {lease.block: Moved(up=size, up_raw=started_from.weights.size)}
        # Who has given the lease back has told then what it downloaded.
        downloads = (
            () if lease.state == "returned" else traffic.downloads_from_json(offered.downloads)
        )
        traffic.count_traffic(tx, lease.worker, moved, downloads)
        in_time = lease.state in HELD
        tx.leases.move(lease.id, "submitted")
        version, base = tx.blocks.get(lease.block).version, _base_of(tx, lease)
        weight = merging_rules.update_weight(self.run.config.swarm, version, base)
        reason = fault or self._too_late(tx, lease, base, version, in_time=in_time)
        if in_time:
            tx.blocks.count_lease(lease.block, met=not reason)
        if not reason:
            tx.updates.accept(lease.id, base, weight, now)
            self._speeds.completed(lease.worker, lease.steps, now - lease.created)
            kind = "uploaded" if weight == 1.0 else "late"
            tx.events.add(now, kind, lease.worker, lease.block, f"{lease.steps} steps")
            return Receipt(state="pending", reason="", weight=weight)
        tx.updates.refuse(lease.id, reason)
        if in_time:
            tx.blocks.give_back_range(lease.block, lease.first_batch, lease.steps)
        tx.events.add(now, "refused", lease.worker, lease.block, reason)
        return Receipt(state="refused", reason=reason, weight=0.0)

    def _too_late(
        self, tx: Transaction, lease: LeaseRow, base: int, version: int, *, in_time: bool
    ) -> str:
        """Why an update does not count any more; empty if it counts."""
        swarm = self.run.config.swarm

        def reclaim() -> bool:
            return tx.blocks.reclaim_range(lease.block, lease.first_batch, lease.steps)

        verdict = merging_rules.judge_update(swarm, version, base, in_time=in_time, reclaim=reclaim)
        match verdict.refusal:
            case UpdateRefusal.TOO_STALE:
                return f"it is {version - base} versions behind, more than {swarm.most_stale}"
            case UpdateRefusal.HANDED_OUT_AGAIN:
                return f"the lease was {lease.state} and its text handed out again"
            case None:
                return ""

    def _check_named(self, claim: UpdateClaim, worker: str) -> None:
        if claim.run != self.run.id or claim.worker != worker:
            raise RefusedError("forbidden", "the claim is for another run or by another worker")

    def _check_fits(self, claim: UpdateClaim, base: Version) -> None:
        """Before a byte is taken: the right block, the right base, the right size."""
        if (claim.block, claim.base_version) != (base.block, base.version):
            raise RefusedError("conflict", "the claim's block or base version is not the lease's")
        swarm, size = self.run.config.swarm, claim.recipe.size
        if claim.codec != swarm.codec:
            raise RefusedError("conflict", f"updates of this run have the codec {swarm.codec}")
        codec, most = self._largest_codec(), base.weights.size
        if codec:
            most = largest_encoded_size(codec, most // BYTES_OF_A_NUMBER)
        if size > most:
            raise RefusedError("too_large", f"the update has {size} bytes, the most is {most}")
        if size < most and not codec:
            raise RefusedError("malformed", f"the update has {size} bytes, the block {most}")
        chunks = -(-size // CHUNK_BYTES)
        if len(claim.recipe.chunks) != chunks:
            raise RefusedError("malformed", f"{size} bytes are {chunks} chunks")

    def _largest_codec(self) -> Codec | None:
        """Any update may be a worker's final one."""
        return update_codec(self.run.config.swarm, final=True)

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


def _check_signed(offer: UpdateOffer, public_key: str) -> None:
    if not identity.verify_update(public_key, offer.claim, offer.signature):
        raise RefusedError("forbidden", "the signature does not fit the claim")


def _offered(tx: Transaction, caller: Caller, lease: str) -> UpdateRow:
    offered = tx.updates.get(lease)
    if offered is None or offered.worker != caller.worker:
        raise RefusedError("not_found", "no update was offered for this lease")
    return offered


def _take_down(tx: Transaction, offer: UpdateOffer, lease: LeaseRow) -> UpdateRow:
    row = UpdateRow(
        lease=lease.id,
        worker=lease.worker,
        block=lease.block,
        base_version=lease.base_version,
        steps=lease.steps,
        offer=offer.claim.model_dump_json(),
        signature=offer.signature,
        loss=offer.claim.loss,
        downloads=traffic.downloads_to_json(offer.downloads),
        continues=lease.continues,
    )
    tx.updates.add(row)
    return row


def _known(tx: Transaction, claim: UpdateClaim) -> UpdateRow | None:
    """The update that was offered for a lease, if any: it can be no other than this."""
    known = tx.updates.get(claim.lease)
    if known and known.offer != claim.model_dump_json():
        raise RefusedError("conflict", "another update was offered for this lease")
    return known


def _base_of(tx: Transaction, lease: LeaseRow) -> int:
    """The version a lease's update counts as trained from."""
    continued = tx.updates.get(lease.continues) if lease.continues else None
    return merging_rules.effective_base(
        lease.base_version, continued.merged_into if continued else None
    )


def claimed(update: UpdateRow) -> UpdateClaim:
    return UpdateClaim.model_validate_json(update.offer)


def _receipt(update: UpdateRow) -> Receipt:
    assert update.state != "offered"
    return Receipt(state=update.state, reason=update.reason, weight=update.weight)
