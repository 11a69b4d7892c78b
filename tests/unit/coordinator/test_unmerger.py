"""A block that is rebuilt without some updates is what the others alone would have made of it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.blobs import whole
from tests.support.coordinator import (
    Member,
    SetClock,
    first_weights,
    join,
    running,
    tensors_of,
    weights_now,
)

from blocktrain import faults
from blocktrain.cli.main import cli
from blocktrain.codec import update_codec
from blocktrain.codec.frames import encode
from blocktrain.coordinator.merger import COLLECT_SECONDS
from blocktrain.coordinator.service import Service
from blocktrain.coordinator.unmerger import Unmerged, Unmerger
from blocktrain.coordinator.updates import signed_claim
from blocktrain.errors import RunError
from blocktrain.ledger import schema
from blocktrain.ledger.ledger import Ledger
from blocktrain.ledger.schema import UpdateRow
from blocktrain.protocol.messages import Lease

NUMBERS = 24  # of a block
CODECS = {
    "none": {},
    "int8": {"swarm__codec": "int8"},
    "sparse": {"swarm__codec": "sparse", "swarm__top_k_per_4096": 512},
}


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


def send(member: Member, lease: Lease, change: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    """An update that changes the weights of its base by these numbers."""
    swarm = member.service.run.config.swarm
    codec = update_codec(swarm)
    if codec is None:
        base, at = tensors_of(member.service.run, lease.base), 0
        ends = {}
        for name in sorted(base):
            size = base[name].size
            ends[name] = base[name] + change[at : at + size].reshape(base[name].shape)
            at += size
        made = member.signer.update(lease, ends)
    else:
        data = b"".join(encode(change, codec))
        made = member.signer.update_of_bytes(lease, data, codec=swarm.codec)
    assert member.send(made).state == "pending"


def changes(seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).normal(size=NUMBERS).astype(np.float32)


def merged_rows(service: Service, block: int = 0) -> list[UpdateRow]:
    with service.run.ledger.read() as tx:
        return tx.updates.merged_after(block, 0)


def flat(service: Service) -> bytes:
    now = weights_now(service.run, 0)
    return b"".join(now[name].tobytes() for name in sorted(now))


def velocity(service: Service) -> bytes | None:
    with service.run.ledger.read() as tx:
        blob = tx.versions.get(0).velocity
    if blob is None:
        return None
    tensors = tensors_of(service.run, blob)
    return b"".join(tensors[name].tobytes() for name in sorted(tensors))


def residual(service: Service) -> bytes | None:
    with service.run.ledger.read() as tx:
        blob = tx.versions.get(0).residual
    return whole(service.run.blobs, blob) if blob else None


def unmerge_worker(service: Service, member: Member) -> Unmerged | None:
    return Unmerger(service.run).unmerge(0, lambda row: row.worker == member.id, "a test")


class Play:
    """A run of which each round is a version: which workers send an update for it."""

    FIXED: ClassVar = {
        "train__steps": 1000,
        "swarm__first_steps": 10,
        "swarm__most_steps": 10,
        "swarm__keep_updates": 16,
    }

    def __init__(self, service: Service, clock: SetClock, workers: int = 3) -> None:
        self.service, self.clock = service, clock
        self.members = [join(service, name=f"worker-{i}") for i in range(workers)]
        self.rounds = 0

    def version(self, *senders: int, scale: float = 1.0) -> None:
        self.rounds += 1
        leases = {}
        for sender in sorted(senders):
            self.clock.forward(1)  # ids of leases are in the order of time, and so are sums
            leases[sender] = self.members[sender].lease(blocks=(0,))
        for sender, lease in leases.items():
            send(self.members[sender], lease, scale * changes(10 * self.rounds + sender))
        self.service.merger.merge_due()

    def skip(self) -> None:
        self.rounds += 1


ROUNDS = st.lists(st.sets(st.integers(0, 2), min_size=1), min_size=1, max_size=6)
HOSTILE = 2


@pytest.mark.parametrize(("codec", "momentum"), [("int8", 0.9), ("sparse", 0.0)])
@settings(max_examples=3, deadline=None)
@given(rounds=ROUNDS)
@example(rounds=[{0}, {0, 1}, {1, HOSTILE}, {0}, {HOSTILE}, {0, 1, HOSTILE}])
def test_it_is_the_block_of_a_run_without_these_updates(
    tmp_path_factory: pytest.TempPathFactory, codec: str, momentum: float, rounds: list[set[int]]
):
    outer = {"swarm__outer_momentum": momentum, "swarm__outer_rate": 0.7, **CODECS[codec]}
    found = {}
    for which in ("rebuilt", "without"):
        clock = SetClock(1e9)
        with running(tmp_path_factory.mktemp(which), clock, **Play.FIXED, **outer) as service:
            play = Play(service, clock)
            for senders in rounds:
                wanted = senders if which == "rebuilt" else senders - {HOSTILE}
                play.version(*wanted) if wanted else play.skip()
            if which == "rebuilt":
                done = unmerge_worker(service, play.members[HOSTILE])
                assert (done is None) == all(HOSTILE not in senders for senders in rounds)
            found[which] = flat(service), velocity(service), residual(service)
    assert found["rebuilt"] == found["without"]


@pytest.fixture(params=["none", "int8"])
def play(tmp_path: Path, clock: SetClock, request: pytest.FixtureRequest) -> Iterator[Play]:
    with running(tmp_path, clock, **{**Play.FIXED, **CODECS[request.param]}) as service:
        yield Play(service, clock)


def version_numbers(ledger: Ledger, block: int) -> list[int]:
    with ledger.read() as tx:
        return sorted(each.version for each in tx.versions.all() if each.block == block)


def number_of_versions(service: Service) -> int:
    with service.run.ledger.read() as tx:
        return tx.blocks.get(0).version


def test_what_others_have_learned_stays(play: Play):
    """Also from a version that contained the hostile update, and by a lease that was open."""
    service, (_, other, hostile) = play.service, play.members
    play.version(0)
    play.version(HOSTILE, scale=100.0)
    play.version(0, 1)
    open_lease = other.lease(blocks=(0,))
    done = unmerge_worker(service, hostile)
    assert done and (done.version, done.start, done.steps) == (4, 1, 10)
    learned = [changes(10), (changes(30) + changes(31)) / 2]
    assert_close(service, learned)
    send(other, open_lease, changes(0))  # it is one version late, so it counts half
    service.merger.merge_due()
    assert_close(service, [*learned, changes(0) / 2])


def assert_close(service: Service, learned: Sequence[np.ndarray[Any, Any]]) -> None:
    now, before = weights_now(service.run, 0), first_weights(0)
    change = np.concatenate([(now[name] - before[name]).reshape(-1) for name in sorted(now)])
    room = 1e-4 if service.run.config.swarm.codec == "none" else 0.1
    np.testing.assert_allclose(change, sum(learned), atol=room)


def test_a_second_removal_starts_before_the_first(play: Play):
    service, (_, other, hostile) = play.service, play.members
    play.version(0)
    play.version(1, HOSTILE, scale=3.0)
    play.version(0, 1)
    first = flat(service)
    assert unmerge_worker(service, hostile) is not None
    play.version(0)
    done = unmerge_worker(service, other)
    assert done and (done.version, done.start) == (6, 1)
    assert {row.merged_into for row in done.removed} == {2, 3}
    assert_close(service, [changes(10), changes(30), changes(40)])
    assert unmerge_worker(service, other) is None
    assert unmerge_worker(service, hostile) is None
    assert flat(service) != first


def test_a_version_with_a_removed_update_is_no_start(play: Play):
    service, (_, other, hostile) = play.service, play.members
    play.version(0)
    play.version(HOSTILE, scale=100.0)
    play.version(0)
    play.version(1)
    assert unmerge_worker(service, hostile) is not None
    done = unmerge_worker(service, other)  # it was merged into version 4, but 2 and 3 are spoilt
    assert done and (done.version, done.start) == (6, 1)
    assert_close(service, [changes(10), changes(30)])


def test_its_batches_are_trained_again_and_its_worker_loses_the_credit(play: Play):
    service, hostile = play.service, play.members[HOSTILE]
    play.version(0, HOSTILE)
    row = next(row for row in merged_rows(service) if row.worker == hostile.id)
    unmerge_worker(service, hostile)
    with service.run.ledger.read() as tx:
        state, worker = tx.blocks.states()[0], tx.members.worker(hostile.id)
        taken, removed = tx.leases.get(row.lease), tx.updates.get(row.lease)
    assert worker and taken and removed
    assert (state.merged_batches, state.returned_batches) == (10, 10)
    assert (worker.batches_merged, worker.updates_merged) == (0, 0)
    assert (removed.state, removed.reason) == ("refused", "removed again: a test")
    assert play.members[1].lease(blocks=(0,)).first_batch == taken.first_batch
    event = next(each for each in service.reports.events(0, 100) if each.kind == "unmerged")
    assert "version 2 is version 0 and the updates since then without 1 update" in event.detail


def test_a_finished_run_goes_on(tmp_path: Path, clock: SetClock):
    settings = {**Play.FIXED, "train__steps": 10}
    with running(tmp_path, clock, **settings) as service:
        member = join(service)
        for block in (0, 1):
            member.work(blocks=(block,))
            service.round()
        service.round()
        assert service.reports.status().state == "finished"
        assert Unmerger(service.run).unmerge(0, lambda row: True, "a test")
        assert service.reports.status().state == "running"
        member.work(blocks=(0,))
        service.round()
        service.round()
        assert service.reports.status().state == "finished"


def test_there_is_no_delta_to_a_rebuilt_version_but_from_it(play: Play):
    service, swarm = play.service, play.service.run.config.swarm
    play.version(0)
    play.version(HOSTILE)
    unmerge_worker(service, play.members[HOSTILE])
    play.version(1)
    assert service.reports.differences(0, 2, 3).differences == ()
    assert service.reports.differences(0, 0, 4).differences == ()
    assert len(service.reports.differences(0, 3, 4).differences) == (swarm.codec != "none")


def test_only_the_updates_of_the_newest_versions_are_kept(tmp_path: Path, clock: SetClock):
    few = {"swarm__keep_updates": 4, "swarm__keep_versions": 1, **CODECS["int8"]}
    with running(tmp_path, clock, **{**Play.FIXED, **few}) as service:
        play = Play(service, clock)
        for number in range(11):
            play.version(*((0, HOSTILE) if number < 3 else (0,)))
            clock.forward(COLLECT_SECONDS + 10)
            service.collector.collect()
        assert unmerge_worker(service, play.members[HOSTILE]) is None
        # Every fourth version is kept, so 4 and not 7 = 11 - 4.
        assert version_numbers(service.run.ledger, 0) == [4, 8, 11]
        chunks = {name for name, _ in service.run.chunks.stored()}
        for row in merged_rows(service):
            if row.merged_into != 4:  # its update is also the delta to a version that is kept
                is_stored = set(signed_claim(row).recipe.chunks) <= chunks
                assert is_stored == ((row.merged_into or 0) > 4)
        done = Unmerger(service.run).unmerge(0, lambda row: row.merged_into == 5, "a test")
        assert done and (done.start, done.version) == (4, 12)
        clock.forward(COLLECT_SECONDS + 10)
        service.collector.collect()
        assert version_numbers(service.run.ledger, 0) == [4, 12]  # 8 and 11 contain the update
        play.version(0)
        assert Unmerger(service.run).unmerge(0, lambda row: row.merged_into == 6, "a test")


def test_without_a_codec_the_bases_of_updates_are_kept(tmp_path: Path, clock: SetClock):
    few = {"swarm__keep_updates": 2, "swarm__keep_versions": 1}
    with running(tmp_path, clock, **{**Play.FIXED, **few}) as service:
        play = Play(service, clock)
        late = play.members[2].lease(blocks=(0,))
        for _ in range(2):
            play.version(0)
        send(play.members[2], late, changes(0))
        for _ in range(3):
            play.version(0, 1)
            clock.forward(COLLECT_SECONDS + 10)
            service.collector.collect()
        assert version_numbers(service.run.ledger, 0) == [3, 4, 5]
        before = weights_now(service.run, 0)
        assert Unmerger(service.run).unmerge(0, lambda row: row.worker == play.members[1].id, "")
        assert not np.array_equal(before["body.weight"], weights_now(service.run, 0)["body.weight"])


def test_a_merge_that_is_published_meanwhile_is_not_lost(
    play: Play, clock: SetClock, monkeypatch: pytest.MonkeyPatch
):
    service, honest = play.service, play.members[0]
    play.version(1, HOSTILE, scale=0.5)
    lease = honest.lease(blocks=(0,))

    def merge_now(point: str) -> None:
        if point == "rebuilt":
            monkeypatch.undo()
            send(honest, lease, changes(7))
            clock.forward(3600)  # the claim has run out
            assert service.merger.merge_due() == 1

    monkeypatch.setattr(faults, "reached", merge_now)
    done = unmerge_worker(service, play.members[HOSTILE])
    assert done and (done.version, len(done.removed)) == (3, 1)
    assert_close(service, [changes(11) / 2, changes(7)])


def test_while_it_is_rebuilt_no_other_coordinator_merges(
    play: Play, monkeypatch: pytest.MonkeyPatch
):
    service, merged = play.service, []
    play.version(HOSTILE)
    send(play.members[0], play.members[0].lease(blocks=(0,)), changes(7))
    monkeypatch.setattr(faults, "reached", lambda point: merged.append(service.merger.merge_due()))
    assert unmerge_worker(service, play.members[HOSTILE])
    assert merged == [0]
    monkeypatch.undo()
    assert service.merger.merge_due() == 1


def test_a_lost_file_changes_nothing(play: Play):
    service = play.service
    play.version(HOSTILE)
    play.version(0, 1)
    row = merged_rows(service)[-1]
    for name in signed_claim(row).recipe.chunks:
        service.run.chunks.delete(name)
    before = number_of_versions(service)
    with pytest.raises(RunError, match="a file is lost"):
        unmerge_worker(service, play.members[HOSTILE])
    assert number_of_versions(service) == before
    play.version(1)
    assert number_of_versions(service) == before + 1  # the claim was released


def test_an_update_of_an_older_release_is_not_touched(play: Play):
    service = play.service
    play.version(0, HOSTILE)
    play.version(0)
    with service.run.ledger.write() as tx:
        old = schema.updates.update().where(schema.updates.c.merged_into == 1)
        tx.write(old.values(merged_as=None))
    assert unmerge_worker(service, play.members[HOSTILE]) is None
    assert Unmerger(service.run).unmerge(0, lambda row: row.merged_into == 2, "a test")


def test_the_commands(play: Play, tmp_path: Path):
    service, hostile = play.service, play.members[HOSTILE]

    def blocktrain(*words: str) -> Result:
        command = [*words, "--data-dir", str(tmp_path)]
        return CliRunner().invoke(cli, command)

    play.version(0, HOSTILE)
    play.version(1, HOSTILE)
    play.version(1)
    banned = blocktrain("ban", hostile.id)
    assert banned.exit_code == 0, banned.output
    told = f" unmerge {hostile.id} --data-dir "
    assert "2 merged updates of it remain; to remove them: " in banned.output
    assert told in banned.output
    removed = blocktrain("unmerge", "0:3", "--reason", "wrong text")
    assert "version 4 is version 2 and the updates since then without 1 update" in removed.output
    assert "wrong text" in service.reports.events(0, 100)[-1].detail
    both = blocktrain("ban", hostile.id, "--unmerge")
    assert "block 0: version 5" in both.output and "without 2 updates (20 steps)" in both.output
    assert_close(service, [changes(10), changes(21)])
    again = blocktrain("unmerge", hostile.id)
    assert again.exit_code and "can be removed" in str(again.exception)
    unknown = blocktrain("unmerge", "nobody")
    assert unknown.exit_code and "there is no worker nobody" in str(unknown.exception)
