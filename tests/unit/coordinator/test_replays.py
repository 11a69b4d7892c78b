"""Leases are trained again: on a real run, with made-up states and results."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.coordinator import (
    Member,
    SetClock,
    join,
    losses,
    moved,
    running,
    tensors_of,
)

from blocktrain.coordinator.replays import NO_MOMENTS, REVEAL_SECONDS
from blocktrain.coordinator.service import Service
from blocktrain.errors import RefusedError
from blocktrain.ledger.schema import UpdateStatus, WorkerRow
from blocktrain.protocol.check_messages import Check, ReplayCheck, ReplayResult, ScoreResult, Unable
from blocktrain.protocol.messages import (
    Commitment,
    Lease,
    Recipe,
    Reveal,
    RevealOffer,
    Wait,
)
from blocktrain.storage import tensor_file
from blocktrain.storage.blobs import blob_of
from blocktrain.storage.chunks import name_of
from blocktrain.swarm import reputation

SETTINGS = {"train__steps": 4000, "train__warmup": 0, "swarm__quorum": 1}
STATES: tuple[UpdateStatus, ...] = ("offered", "pending", "merged", "refused")
AGREES = ReplayResult(identical=True, cosine=1.0, distance=0.0, moments_distance=0.0)
DIFFERS = ReplayResult(identical=False, cosine=0.1, distance=1.0, moments_distance=1.0)


@pytest.fixture
def service(tmp_path: Path, clock: SetClock) -> Iterator[Service]:
    with running(tmp_path, clock, requires_checks=True, **SETTINGS) as service:
        yield service


@pytest.fixture
def worker(service: Service) -> "Committing":
    return Committing(join(service))


@pytest.fixture
def validator(service: Service) -> Member:
    return join(service, "validate")


@dataclass
class File:
    data: bytes

    @property
    def recipe(self) -> Recipe:
        return Recipe(size=len(self.data), chunks=(name_of(self.data),))

    @property
    def name(self) -> str:
        return blob_of(self.recipe).name


class Committing:
    """A worker that commits to one segment, and keeps the files."""

    def __init__(self, member: Member) -> None:
        self.member, self.service = member, member.service
        self.moments, self.files = NO_MOMENTS, {}
        self.add(b"".join(tensor_file.encode({})))

    def add(self, data: bytes) -> str:
        file = File(data)
        self.files[file.name] = file
        return file.name

    def work(self, *validators: Member, by: float = 1.0, state: str = "pending") -> Lease:
        """A lease of block 0, to its merge if it is accepted."""
        clock = self.service.run.clock
        assert isinstance(clock, SetClock)
        clock.forward(0.01)  # leases are ordered by the time of their grant
        lease = self.member.lease(blocks=(0,))
        update = blob_of(self.member.make(lease, by).offer.claim.recipe).name
        before, self.moments = self.moments, self.add(b"moments of " + lease.lease.encode())
        commitment = Commitment(weights=(lease.base.name, update), moments=(before, self.moments))
        made = self.member.make(lease, by, commitment=commitment)
        assert self.member.send(made).state == state
        score(*validators)
        self.service.round()
        return lease

    def asked(self) -> Reveal | None:
        return self.member.ask(blocks=(1,)).reveal

    def reveal(self, wanted: Reveal) -> None:
        replays, caller = self.service.checks.replays, self.member.caller
        offer = RevealOffer(recipes=tuple(self.files[name].recipe for name in wanted.files))
        chosen, largest = replays.find(caller, wanted.lease)
        missing = replays.store(chosen, largest, offer).missing
        chunks = {chunk: file.data for file in self.files.values() for chunk in file.recipe.chunks}
        for name in missing:
            assert replays.size_of_revealed(caller, wanted.lease, name) == len(chunks[name])
            self.service.run.chunks.put(chunks[name], name)
        assert replays.store(chosen, largest, offer).missing == ()
        replays.arrived(chosen.row.id)

    def reveal_all(self) -> int:
        count = 0
        while wanted := self.asked():
            self.reveal(wanted)
            count += 1
        return count

    @property
    def row(self) -> WorkerRow:
        with self.service.run.ledger.read() as tx:
            worker = tx.members.worker(self.member.id)
        assert worker is not None
        return worker


def score(*validators: Member) -> None:
    """They all praise the newest update, as far as they are asked."""
    for validator in validators:
        if isinstance(check := validator.request_check(), Check):
            assert check.task.method == "score"
            validator.report(check, ScoreResult(hidden=losses(0.02), own=losses(0.1)))


def replay_of(validator: Member) -> Check:
    check = validator.check()
    assert isinstance(check.task, ReplayCheck), check
    return check


def test_the_first_updates_are_replayed_and_count_meanwhile(
    service: Service, worker: Committing, validator: Member
):
    by_base = {lease.base: lease for lease in (worker.work(validator) for _ in range(2))}
    with service.run.ledger.read() as tx:
        assert tx.blocks.get(0).version == 2
    assert isinstance(validator.request_check(), Wait)  # until the files are there
    assert worker.reveal_all() == 2
    for _ in range(2):
        check = replay_of(validator)
        task = check.task
        assert isinstance(task, ReplayCheck)
        lease = by_base.pop(task.start.weights)
        assert (task.first_step, task.steps) == (0, lease.steps)
        assert (
            tensors_of(service.run, task.end.weights)["scale"]
            == moved(tensors_of(service.run, lease.base), 1.0)["scale"]
        )
        validator.report(check, AGREES)
    assert (worker.row.replayed, worker.row.suspicion) == (2, 0.0)


def test_who_never_commits_is_excluded_and_what_it_sent_is_removed(tmp_path: Path, clock: SetClock):
    keep = {**SETTINGS, "swarm__keep_updates": 16}
    with running(tmp_path, clock, requires_checks=True, **keep) as service:
        member, validator, leases = join(service), join(service, "validate"), 0
        while True:
            try:
                member.work(blocks=(0,))
            except RefusedError:
                break
            leases += 1
            score(validator)
            service.round()
        assert leases == math.ceil(reputation.EXCLUDED / reputation.UNEXPLAINED)
        with service.run.ledger.read() as tx:
            assert {row.state for row in tx.updates.of_worker(member.id, STATES)} == {"refused"}


def test_a_worker_that_was_asked_and_sends_nothing_is_suspected(
    service: Service, worker: Committing, validator: Member, clock: SetClock
):
    worker.work(validator)
    assert worker.asked() == worker.asked() is not None
    clock.forward(REVEAL_SECONDS + 1)
    service.round()
    assert worker.row.unexplained == reputation.UNEXPLAINED
    assert worker.asked() is None


def test_good_scores_do_not_make_up_for_what_was_not_sent(
    service: Service, worker: Committing, validator: Member, clock: SetClock
):
    """A backdoor scores well."""
    worker.work(validator)
    worker.asked()
    clock.forward(REVEAL_SECONDS + 1)
    service.round()
    for _ in range(6):
        worker.work(validator)
    assert worker.row.accepted == 7
    assert worker.row.unexplained == reputation.UNEXPLAINED
    assert worker.reveal_all() == 6  # all of them are drawn now
    for _ in range(3):
        validator.report(replay_of(validator), AGREES)
    assert worker.row.unexplained == 0.0


def test_a_worker_says_that_its_files_are_gone(
    service: Service, worker: Committing, validator: Member
):
    worker.work(validator)
    wanted = worker.asked()
    assert wanted
    replays, caller = service.checks.replays, worker.member.caller
    chosen, _ = replays.find(caller, wanted.lease)
    for _ in range(2):  # the answer was lost
        replays.give_up(chosen.row.id, chosen.lease)
    assert worker.row.unexplained == reputation.UNEXPLAINED
    assert worker.asked() is None


def test_a_worker_that_owes_files_gets_only_some_more_leases(
    service: Service, worker: Committing, validator: Member, clock: SetClock
):
    for _ in range(1 + reputation.MOST_OWING):
        worker.work(validator)
        clock.forward(1.0)
    answer = worker.member.ask(blocks=(0,)).answer
    assert isinstance(answer, Wait)
    assert "first send the files" in answer.reason
    worker.reveal_all()
    assert isinstance(worker.member.ask(blocks=(0,)).answer, Lease)


def test_a_worker_that_left_before_it_was_asked_is_not(
    service: Service, worker: Committing, validator: Member, clock: SetClock
):
    worker.work(validator)
    clock.forward(10 * REVEAL_SECONDS)
    service.round()
    clock.forward(10 * 3600.0)
    service.round()
    assert worker.row.suspicion == 0.0
    assert worker.asked() is None


def test_only_files_that_were_asked_for_are_taken(
    service: Service, worker: Committing, validator: Member
):
    lease = worker.work(validator)
    other = join(service)
    replays, caller = service.checks.replays, worker.member.caller
    assert worker.asked() is not None
    with pytest.raises(RefusedError, match="no files of this lease"):
        replays.find(other.caller, lease.lease)
    chosen, largest = replays.find(caller, lease.lease)
    with pytest.raises(RefusedError, match="not requested"):
        replays.store(chosen, largest, RevealOffer(recipes=(File(b"else").recipe,)))
    assert replays.size_of_revealed(other.caller, lease.lease, name_of(b"else")) is None
    huge = worker.files[worker.moments].recipe.model_copy(update={"size": largest + 1})
    with pytest.raises(RefusedError):
        replays.store(chosen, largest, RevealOffer(recipes=(huge,)))


def test_a_difference_is_confirmed_by_a_second_validator(
    service: Service, worker: Committing, validator: Member
):
    second = join(service, "validate")
    worker.work(validator, second)
    worker.reveal_all()
    validator.report(replay_of(validator), DIFFERS)
    assert worker.row.suspicion == 0.0
    second.report(replay_of(second), DIFFERS)
    assert worker.row.excluded


def test_merged_updates_of_a_dishonest_worker_are_removed_and_no_others(
    tmp_path: Path, clock: SetClock
):
    keep = {**SETTINGS, "swarm__keep_updates": 16}
    with running(tmp_path, clock, requires_checks=True, **keep) as service:
        worker, other = Committing(join(service)), Committing(join(service))
        validator = join(service, "validate")
        removed, kept = worker.work(validator), other.work(validator)
        worker.reveal_all()
        validator.report(replay_of(validator), DIFFERS)
        service.round()
        with service.run.ledger.read() as tx:
            states = [tx.updates.get(lease.lease).state for lease in (removed, kept)]
            assert tx.blocks.get(0).version == 3
        assert states == ["refused", "merged"]
        assert other.row.suspicion == 0.0


def test_a_validator_that_lies_about_a_replay_is_overruled(
    service: Service, worker: Committing, validator: Member
):
    liar = join(service, "validate")
    others = [validator, join(service, "validate")]
    worker.work(liar, *others)
    worker.reveal_all()
    liar.report(replay_of(liar), DIFFERS)
    for member in others:
        member.report(replay_of(member), AGREES)
    assert (worker.row.suspicion, worker.row.replayed) == (0.0, 1)
    with service.run.ledger.read() as tx:
        assert tx.members.worker(liar.id).suspicion == reputation.OVERRULED


def test_a_replay_that_no_validator_can_do_says_nothing(
    service: Service, worker: Committing, validator: Member
):
    worker.work(validator)
    worker.reveal_all()
    validator.report(replay_of(validator), Unable(reason="too little memory"))
    assert (worker.row.suspicion, worker.row.replayed) == (0.0, 0)
    assert isinstance(validator.request_check(), Wait)


def test_moments_that_come_from_nowhere_are_noticed(
    service: Service, worker: Committing, validator: Member
):
    """Training from them is honest, but they decide where it goes."""
    worker.moments = worker.add(b"moments made by hand")
    worker.work(validator)
    worker.reveal_all()
    validator.report(replay_of(validator), AGREES)
    assert (worker.row.unexplained, worker.row.replayed) == (reputation.UNEXPLAINED, 0)


def test_a_lease_that_follows_a_refused_one_is_not_held_against_its_worker(
    service: Service, worker: Committing, validator: Member, clock: SetClock
):
    """It had begun before the worker knew."""
    worker.work(by=1e9, state="refused")
    clock.forward(service.run.config.swarm.lease_seconds + 1)
    worker.work(validator)
    suspicion = worker.row.suspicion
    worker.reveal_all()
    validator.report(replay_of(validator), AGREES)
    assert worker.row.suspicion == suspicion == reputation.REFUSED
    assert worker.row.replayed == 0


def test_a_commitment_must_begin_at_the_base_and_end_at_the_update(
    service: Service, worker: Committing, validator: Member
):
    member = worker.member
    lease = member.lease(blocks=(0,))
    update = blob_of(member.make(lease).offer.claim.recipe).name
    other = "0" * 64
    for weights in ((other, update), (lease.base.name, other)):
        commitment = Commitment(weights=weights, moments=(NO_MOMENTS, other))
        with pytest.raises(RefusedError, match="begins with other weights"):
            member.send(member.make(lease, commitment=commitment))


def test_what_a_replay_needs_is_not_deleted(
    service: Service, worker: Committing, validator: Member, clock: SetClock
):
    first = worker.work(validator)
    for _ in range(8):
        worker.work(validator)
        clock.forward(1.0)
        service.round()
        service.collector.collect()
    with service.run.ledger.read() as tx:
        stored = {each.version for each in tx.versions.all() if each.block == 0}
    assert first.base_version in stored and len(stored) < 9  # the others are deleted
    starts = []
    for _ in range(worker.reveal_all()):
        starts.append((check := replay_of(validator)).task.start.weights)
        validator.report(check, AGREES)
    assert first.base in starts
