"""Replays: which parts of which leases are trained again, what their workers must send for that,
and what follows from the results (swarm/replay.py, swarm/reputation.py).

    state      how a replay reaches it
    hidden     it was drawn, after the worker signed its claim; the worker is asked for its files
               with the answer to its next lease request
    waiting    the files have arrived; from here on, it is a check like any other (`checks`)

An update is merged without waiting for its replay: that would keep its worker from training on.
"""

from collections.abc import Iterable
from typing import NamedTuple

from starlette.concurrency import run_in_threadpool

from blocktrain.config import Config
from blocktrain.coordinator import standing
from blocktrain.coordinator.executor import BoundedCache, LedgerExecutor
from blocktrain.coordinator.leases import add_event, newest_predecessors
from blocktrain.coordinator.members import Caller, validators_present
from blocktrain.coordinator.run import SECRET_NUMBERS, Run, secret_number
from blocktrain.coordinator.updates import (
    chunk_sizes,
    refuse_update,
    signed_claim,
    upload_state,
)
from blocktrain.coordinator.verdicts import OPINIONS, RESULT, add_check
from blocktrain.errors import NotFoundError, RefusedError
from blocktrain.ledger.ledger import Transaction
from blocktrain.ledger.schema import CheckRow, LeaseRow, UpdateRow, Version
from blocktrain.protocol.check_messages import (
    EncodingLink,
    ReplayCheck,
    ReplayResult,
    StartLink,
    TrainingState,
)
from blocktrain.protocol.messages import (
    Blob,
    Commitment,
    Hash,
    Predecessor,
    Recipe,
    Reveal,
    RevealOffer,
    UpdateClaim,
    UploadState,
)
from blocktrain.storage import tensor_file
from blocktrain.storage.blobs import blob_of
from blocktrain.storage.chunks import name_of
from blocktrain.swarm import replay, reputation
from blocktrain.swarm.judgement import Consensus, consensus
from blocktrain.swarm.replay import Comparison

# How long a worker has to send files after it was asked. One that was never asked has left.
REVEAL_SECONDS, REVEAL_BYTES_PER_SECOND = 120.0, 1e5
FORGOTTEN_SECONDS = 3600.0
MOST_FILES_SIZE = 10  # of all files together, in sizes of the block
LARGEST_FILE = 3  # in sizes of the block, and so much more for headers:
HEADER_BYTES = 1 << 20
EARLIER = 8  # updates of a worker in which the state may be found that a lease began with
MOST_CACHED = 1024
_NOTHING = b"".join(tensor_file.encode({}))
NO_MOMENTS = blob_of(Recipe(size=len(_NOTHING), chunks=(name_of(_NOTHING),))).name


class _Replay(NamedTuple):
    """A replay with its update. `earlier`: commitments of the worker's accepted updates before,
    newest first, by lease; `refused`: those of updates that were refused at once."""

    row: CheckRow
    update: UpdateRow
    lease: LeaseRow
    base: Version | None  # None: it was deleted
    claim: UpdateClaim
    earlier: dict[str, Commitment]
    refused: dict[str, Commitment]

    @property
    def commitment(self) -> Commitment:
        assert self.claim.commitment is not None, "only leases with a commitment are replayed"
        return self.claim.commitment

    @property
    def segment(self) -> int:
        assert self.row.segment is not None
        return self.row.segment

    @property
    def is_encoded(self) -> bool:
        return self.claim.codec != "none"

    @property
    def residual(self) -> Hash | None:
        """What earlier encodings had left out when the lease was trained; None: nothing."""
        return next((each.residual for each in self.earlier.values()), None)

    @property
    def added(self) -> Hash | None:
        """What must be added to the base to get the first weights of the lease; None: nothing."""
        first, continued = self.commitment.weights[0], self.earlier.get(self.lease.continues or "")
        if continued and continued.weights[-1] == first:
            return None
        if continued:
            return continued.learned
        return None if self.base and self.base.weights.name == first else self.residual

    @property
    def begins_at_base(self) -> bool:
        """Whether names alone show where the first weights come from."""
        known = {each.weights[-1] for each in self.earlier.values()}
        if self.base:
            known.add(self.base.weights.name)
        return self.commitment.weights[0] in known

    @property
    def continues_unknown(self) -> bool:
        """Whether the lease starts where one ended whose update was not accepted."""
        return self.lease.continues is not None and self.lease.continues not in self.earlier

    @property
    def is_linked(self) -> bool:
        """Whether the lease began with the moments that an earlier one ended with, or with none;
        and with weights that are known. Only the first segment depends on it."""
        known = {NO_MOMENTS, *(each.moments[-1] for each in self.earlier.values())}
        has_known_moments = self.commitment.moments[0] in known
        return self.segment > 0 or (has_known_moments and not self.continues_unknown)

    @property
    def follows_refused(self) -> bool:
        """Whether the lease began with the end of one whose update was refused at once. A worker
        learns of a refusal only while it trains the next lease."""
        ends = {each.moments[-1] for each in self.refused.values()}
        return self.commitment.moments[0] in ends

    @property
    def has_opening(self) -> bool:
        """Whether a validator must check how the first weights of the lease came about."""
        is_first = self.is_encoded and self.segment == 0
        return is_first and not (self.begins_at_base or self.continues_unknown)

    def files(self) -> list[Hash]:
        """The files that the replay needs, besides the update itself."""
        own, at = self.commitment, self.segment
        files = [*own.weights[at : at + 2], *own.moments[at : at + 2]]
        if self.has_opening and self.added:
            files.append(self.added)
        if self.is_encoded:
            residual = [self.residual] if self.residual else []
            files += [own.weights[0], own.weights[-1], *residual]
        sent = blob_of(self.claim.recipe).name  # without a codec, the last weights
        return [name for name in dict.fromkeys(files) if name != sent]


class Replays:
    def __init__(self, run: Run, executor: LedgerExecutor) -> None:
        self.run, self._executor = run, executor
        self._dishonest: set[str] = set()
        # Whether some replay may wait for files, so that most lease requests need no query. Several
        # times a second `noticed` corrects it by what other coordinators have added.
        self._any_hidden = False
        # Chunks of files that workers were asked for, with their sizes, by lease.
        self._expected: BoundedCache[dict[str, int]] = BoundedCache(MOST_CACHED)

    # Choosing

    def draw(self, tx: Transaction, lease_id: str) -> None:
        """Decide by lot whether a part of a lease is replayed, now that its claim is signed."""
        update = tx.updates.get(lease_id)
        worker = tx.members.worker(update.worker) if update else None
        if update is None or worker is None:
            return
        lot = secret_number(self.run, "replay", lease_id) / SECRET_NUMBERS
        if lot >= reputation.replay_probability(worker):
            return
        if signed_claim(update).commitment is None:
            lease = tx.leases.get(lease_id)
            assert lease is not None
            self._not_replayed(tx, lease, "its update names no states to train it again from")
        else:
            self.add(tx, update)

    def add(self, tx: Transaction, update: UpdateRow) -> None:
        """Queue the replay of a part of a lease, unless it is queued already or the worker has made
        no commitment."""
        commitment = signed_claim(update).commitment
        rows = tx.checks.of_update(update.lease)
        if commitment is None or any(row.method == "replay" for row in rows):
            return
        lease = tx.leases.get(update.lease)
        if lease is None or self._had_other_rates(lease):
            return
        segment = secret_number(self.run, "segment", update.lease)
        segment %= len(commitment.weights) - 1
        add_check(self.run, tx, update.lease, "replay", state="hidden", segment=segment)
        self._any_hidden = True

    # Files of workers

    def reveal_of(self, tx: Transaction, worker: str, now: float) -> Reveal | None:
        """What a worker has to send for the oldest replay that waits for it."""
        if not self._any_hidden:
            return None
        row = tx.checks.hidden_of(worker)
        chosen = self._replay(tx, row) if row else None
        if row is None or chosen is None:
            return None
        files = chosen.files()
        missing = sorted(set(files) - self.run.chunks.has(files))
        if not missing:
            tx.checks.files_arrived(row.id, now)
            return None
        if row.deadline is None:
            size = tx.versions.get(chosen.update.block).weights.size
            seconds = REVEAL_SECONDS + MOST_FILES_SIZE * size / REVEAL_BYTES_PER_SECOND
            tx.checks.ask_for_files(row.id, now + seconds)
        return Reveal(lease=row.lease, files=tuple(missing))

    async def receive(self, caller: Caller, lease: str, offer: RevealOffer) -> UploadState:
        """Take the recipes of files that a worker was asked for. Returns the chunks that are still
        missing; once there are none, validators may have the replay. Without recipes there is no
        replay."""
        chosen, largest = await self._executor.run(self.find, caller, lease)
        if not offer.recipes:
            await self._executor.run(self.give_up, chosen.row.id, chosen.lease)
            return UploadState(missing=())
        state = await run_in_threadpool(self.store, chosen, largest, offer)
        if not state.missing:
            await self._executor.run(self.arrived, chosen.row.id)
            await run_in_threadpool(self.run.chunks.clear_quarantine, lease)
        return state

    def find(self, caller: Caller, lease: str) -> tuple[_Replay, int]:
        """The replay that needs files of this worker, and the largest size of one."""
        with self.run.ledger.read() as tx:
            row = tx.checks.hidden_of(caller.worker)
            chosen = self._replay(tx, row) if row and row.lease == lease else None
            if chosen is None:
                reason = "no files of this lease are needed; continue with other leases"
                raise RefusedError("not_found", reason)
            size = tx.versions.get(chosen.update.block).weights.size
        return chosen, LARGEST_FILE * size + HEADER_BYTES

    def store(self, chosen: _Replay, largest: int, offer: RevealOffer) -> UploadState:
        files, chunks = set(chosen.files()), self.run.chunks
        if any(blob_of(recipe).name not in files for recipe in offer.recipes):
            raise RefusedError("forbidden", "a recipe is of a file that was not requested")
        if any(recipe.size > largest for recipe in offer.recipes):
            raise RefusedError("too_large", f"a file of a replay has at most {largest} bytes")
        for recipe in offer.recipes:
            self.run.blobs.add_recipe(recipe)
        known = chunks.has(files)
        recipes = [self.run.blobs.recipe(name) for name in sorted(known)]
        lease = chosen.lease.id
        self._expected.put(lease, _sizes(recipes))
        state = upload_state(self.run, lease, recipes)
        if known != files and not state.missing:  # the worker has offered only a part of them
            raise RefusedError("conflict", "files are missing; offer every file that was requested")
        return state

    def size_of_revealed(self, caller: Caller, lease: str, chunk: str) -> int | None:
        """The size of a chunk of a file that a worker was asked for; None if it was not."""
        expected = self._expected.get(lease)
        if expected is None:  # another coordinator took the recipes
            try:
                chosen, _ = self.find(caller, lease)
            except RefusedError:
                return None
            names = self.run.chunks.has(chosen.files())
            expected = _sizes([self.run.blobs.recipe(name) for name in names])
            self._expected.put(lease, expected)
        return expected.get(chunk)

    def arrived(self, check: str) -> None:
        with self.run.ledger.write() as tx:
            tx.checks.files_arrived(check, self.run.clock())

    def give_up(self, check: str, lease: LeaseRow) -> None:
        """Drop a replay whose files its worker does not have any more."""
        with self.run.ledger.write() as tx:
            tx.blocks.lock()
            if tx.checks.get(check):
                tx.checks.drop(check)
                self._not_replayed(tx, lease, "its worker does not have what a replay needs")

    def noticed(self, due: Iterable[CheckRow]) -> None:
        """Take note of all checks without a result."""
        self._any_hidden = any(row.state == "hidden" for row in due)

    def expire(self, tx: Transaction, now: float) -> None:
        """Give up replays whose files did not arrive in time."""
        for row in tx.checks.hidden():
            if row.deadline is not None and row.deadline < now:
                tx.checks.drop(row.id)
                lease = tx.leases.get(row.lease)
                assert lease is not None
                self._not_replayed(tx, lease, "its worker did not send what a replay needs")
            elif row.deadline is None and row.created < now - FORGOTTEN_SECONDS:
                tx.checks.drop(row.id)

    # Checks

    def task(
        self, tx: Transaction, row: CheckRow
    ) -> tuple[ReplayCheck, tuple[Predecessor, ...]] | None:
        """The work for a validator, with the predecessors that the lease was trained on; None if
        versions that it needs were deleted."""
        chosen = self._replay(tx, row)
        worker = tx.members.worker(chosen.update.worker) if chosen else None
        try:
            predecessors = self._predecessors(tx, chosen) if chosen else ()
            if chosen is None or worker is None or (chosen.is_encoded and chosen.base is None):
                return None
            if self._had_other_rates(chosen.lease):
                return None
            own, at = chosen.commitment, chosen.segment
            cuts = replay.cuts(chosen.lease.steps, len(own.weights) - 1)
            task = ReplayCheck(
                first_step=cuts[at],
                steps=cuts[at + 1] - cuts[at],
                start=self._state(chosen, at),
                end=self._state(chosen, at + 1),
                device=worker.device,
                opening=self._opening(chosen),
                closing=self._closing(chosen),
            )
        except NotFoundError:
            return None
        return task, predecessors

    def _state(self, chosen: _Replay, at: int) -> TrainingState:
        own, update = chosen.commitment, blob_of(chosen.claim.recipe)
        weights = own.weights[at]
        return TrainingState(
            weights=update if weights == update.name else self._blob(weights),
            moments=self._blob(own.moments[at]),
        )

    def _opening(self, chosen: _Replay) -> StartLink | None:
        if not chosen.has_opening:
            return None
        assert chosen.base is not None
        added = self._blob(chosen.added) if chosen.added else None
        return StartLink(base=chosen.base.weights, added=added)

    def _closing(self, chosen: _Replay) -> EncodingLink | None:
        own = chosen.commitment
        if not chosen.is_encoded:
            return None
        assert own.learned is not None and own.residual is not None, "checked with the offer"
        return EncodingLink(
            update=blob_of(chosen.claim.recipe),
            start=self._blob(own.weights[0]),
            end=self._blob(own.weights[-1]),
            residual=self._blob(chosen.residual) if chosen.residual else None,
            learned=own.learned,
            left_out=own.residual,
        )

    def _predecessors(self, tx: Transaction, chosen: _Replay) -> tuple[Predecessor, ...]:
        newest = newest_predecessors(tx, self.run.config, chosen.update.block)
        versions = chosen.commitment.predecessors
        return tuple(
            Predecessor(
                block=each.block,
                version=version,
                weights=tx.versions.get(each.block, version).weights,
            )
            for each, version in zip(newest, versions, strict=True)
        )

    def _had_other_rates(self, lease: LeaseRow) -> bool:
        """Whether a lease was trained with learning rates that an extension has changed: it began
        before the extension, and its schedule reaches past the former end."""
        if self.run.extended is None or lease.created > self.run.extended:
            return False
        last = lease.schedule_start + lease.schedule_stride * (lease.steps - 1)
        return last >= self.run.config.train.ends[0]

    def _blob(self, name: str) -> Blob:
        return Blob(name=name, size=self.run.blobs.recipe(name).size)

    def _replay(self, tx: Transaction, row: CheckRow) -> _Replay | None:
        update, lease = tx.updates.get(row.lease), tx.leases.get(row.lease)
        assert update is not None and lease is not None, "a check has an update and a lease"
        claim = signed_claim(update)
        earlier: dict[str, Commitment] = {}
        refused: dict[str, Commitment] = {}
        try:
            base = tx.versions.get(lease.block, claim.base_version)
        except NotFoundError:
            base = None
        if claim.commitment is None:
            return None
        for before in tx.updates.earlier(update, EARLIER):
            if (commitment := signed_claim(before).commitment) and before.state != "offered":
                was_accepted = before.committed is not None
                (earlier if was_accepted else refused)[before.lease] = commitment
        return _Replay(row, update, lease, base, claim, earlier, refused)

    # Results

    def decide(self, tx: Transaction, lease_id: str) -> None:
        """Conclude from the results of a lease's replay, or ask another validator. Call this in a
        transaction that has locked the blocks."""
        rows = [row for row in tx.checks.of_update(lease_id) if row.method == "replay"]
        if any(row.state != "done" for row in rows):
            return
        opinions = [
            (row.validator or "", self._fault(result))
            for row in rows
            if row.result and isinstance(result := RESULT.validate_json(row.result), ReplayResult)
        ]
        found = consensus(opinions, lambda a, b: bool(a) == bool(b))
        asked = {row.validator for row in rows}
        free = validators_present(tx, self.run.clock()) - asked
        is_unsure = found is None or (len(opinions) == 1 and bool(found.value))
        if free and is_unsure and len(rows) < OPINIONS:
            add_check(self.run, tx, lease_id, "replay", segment=rows[0].segment)
            return
        if found is None and opinions:
            found = Consensus(opinions[0][1])
        if found:
            self._conclude(tx, rows[0], found.value)
            lease = tx.leases.get(lease_id)
            assert lease is not None
            standing.judge_validators(self.run, tx, lease, found.confirmed, found.overruled)

    def take_dishonest(self) -> set[str]:
        """Workers that were excluded because of replays since the last call."""
        dishonest, self._dishonest = self._dishonest, set()
        return dishonest

    def _fault(self, result: Comparison) -> str:
        return replay.disagreement(result, self.run.config.train.precision)

    def _conclude(self, tx: Transaction, row: CheckRow, fault: str) -> None:
        chosen = self._replay(tx, row)
        assert chosen is not None
        lease, now = chosen.lease, self.run.clock()
        was_refused = chosen.update.state == "refused" and chosen.update.gain is not None
        if fault:
            add_event(tx, now, "checked", lease, f"replay: {fault}")
            refuse_update(tx, lease, f"replay: {fault}", now, give_back=True)
            standing.replayed(self.run, tx, lease, agrees=False, was_refused=was_refused)
            self._dishonest.add(lease.worker)
        elif chosen.is_linked:
            standing.replayed(self.run, tx, lease, agrees=True, was_refused=was_refused)
        elif not chosen.follows_refused:
            detail = "replay: it did not begin where an earlier lease ended, nor anew"
            self._not_replayed(tx, lease, detail)

    def _not_replayed(self, tx: Transaction, lease: LeaseRow, detail: str) -> None:
        """A replay shows nothing, because of something that the worker did."""
        add_event(tx, self.run.clock(), "checked", lease, detail)
        if standing.not_replayed(self.run, tx, lease):
            self._dishonest.add(lease.worker)


def _sizes(recipes: Iterable[Recipe]) -> dict[str, int]:
    """The sizes of all chunks of these files, by name."""
    return {name: size for recipe in recipes for name, size in chunk_sizes(recipe).items()}


def replayed_versions(tx: Transaction, config: Config) -> set[tuple[int, int]]:
    """The versions that replays need, by block and number."""
    claims = [signed_claim(update) for update in tx.checks.being_replayed()]
    bases = {(claim.block, claim.base_version) for claim in claims}
    read = (
        zip(config.frozen_blocks(claim.block), claim.commitment.predecessors, strict=True)
        for claim in claims
        if claim.commitment
    )
    return bases | {pair for pairs in read for pair in pairs}
