"""Versions that follow each other by differences: what is published, told and kept of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.coordinator import SetClock, join, open_stores, running
from tests.support.frugal import frugal, make_version, send_learned

from blocktrain import faults
from blocktrain.coordinator.merger import COLLECT_SECONDS, Collector, Merger
from blocktrain.coordinator.run import open_run
from blocktrain.coordinator.service import Service
from blocktrain.protocol.messages import MOST_DIFFERENCES, Blob
from blocktrain.storage.chunks import LocalChunks, place_of
from blocktrain.storage.weights_file import follow_blobs


@pytest.fixture
def service(tmp_path: Path, clock: SetClock) -> Iterator[Service]:
    with frugal(tmp_path, clock) as service:
        yield service


def weights_at(service: Service, version: int) -> Blob:
    with service.run.ledger.read() as tx:
        return tx.versions.get(0, version).weights


def led(service: Service, after: int, to: int) -> tuple[Blob, ...]:
    return service.reports.differences(0, after, to).differences


def test_differences_lead_from_any_version_to_any_later_one(service: Service):
    first, second = join(service), join(service)
    for members in ((first,), (first, second), (second,), (first, second)):
        make_version(service, *members)
    for after in range(4):
        for to in range(after + 1, 5):
            steps = led(service, after, to)
            reached = follow_blobs(service.run.blobs, weights_at(service, after), steps)
            assert reached == weights_at(service, to)
    assert sum(step.size for step in led(service, 0, 4)) < weights_at(service, 0).size / 20


def test_what_is_owed_goes_from_version_to_version(service: Service):
    first, second = join(service), join(service)
    owed = []
    for _ in range(2):
        make_version(service, first, second)
        with service.run.ledger.read() as tx:
            owed.append(tx.versions.get(0).residual)
    assert None not in owed and owed[0] != owed[1]


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "recipe gone"])
def test_a_block_goes_on_without_what_was_owed_and_is_lost(
    service: Service, caplog: pytest.LogCaptureFixture, damage: str
):
    """It is owed to nobody in particular: differences lead to the next version all the same."""
    member = join(service)
    make_version(service, member)
    with service.run.ledger.read() as tx:
        owed = tx.versions.get(0).residual
    assert owed is not None
    (chunk,) = service.run.blobs.recipe(owed.name).chunks
    assert isinstance(service.run.chunks, LocalChunks)
    path = service.run.chunks.folder / place_of(owed.name if damage == "recipe gone" else chunk)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    if damage.endswith("gone"):
        path.unlink()
    else:
        path.write_bytes(data[:-5] if damage == "cut" else data)
    make_version(service, member)
    assert "the residual of the last delta is lost" in caplog.text
    with service.run.ledger.read() as tx:
        assert tx.versions.get(0, 2).residual not in (None, owed)
    steps = led(service, 1, 2)
    assert follow_blobs(service.run.blobs, weights_at(service, 1), steps) == weights_at(service, 2)
    caplog.clear()
    service.collector.collect()  # which looks at all that versions name
    make_version(service, member)  # what is owed since then is there
    assert "owe" not in caplog.text


def test_a_lost_version_is_not_taken_for_what_it_owed(service: Service):
    member = join(service)
    make_version(service, member)
    (chunk,) = service.run.blobs.recipe(weights_at(service, 1).name).chunks
    service.run.chunks.delete(chunk)
    send_learned(member, member.lease(blocks=(0,), steps_per_second=0.1))
    assert service.merger.merge_due() == 0


def test_versions_that_were_never_made_have_no_way_to_them(service: Service):
    make_version(service, join(service))
    assert len(led(service, 0, 1)) == 1
    for after, to in ((0, 2), (1, 2), (1, 0), (1, 1), (0, MOST_DIFFERENCES + 5)):
        assert led(service, after, to) == ()
    assert service.reports.differences(7, 0, 1).differences == ()


def test_a_run_without_a_codec_has_no_differences(tmp_path: Path, clock: SetClock):
    with running(tmp_path, clock) as service:
        join(service).work(blocks=(0,))
        service.round()
        assert led(service, 0, 1) == ()
        with service.run.ledger.read() as tx:
            assert tx.versions.get(0).version == 1 and tx.versions.get(0).residual is None


def test_differences_outlive_their_versions_while_following_them_is_shorter(
    tmp_path: Path, clock: SetClock
):
    with frugal(tmp_path, clock, swarm__keep_versions=1) as service:
        member = join(service)
        for _ in range(5):
            make_version(service, member)
        clock.forward(COLLECT_SECONDS + 10)
        before = weights_at(service, 0)
        held = service.run.blobs.reader(before).chunk(0)
        service.collector.collect()
        with service.run.ledger.read() as tx:
            assert [item.version for item in tx.versions.all() if item.block == 0] == [5]
        service.run.chunks.put(held)
        service.run.blobs.write([held])
        reached = follow_blobs(service.run.blobs, before, led(service, 0, 5))
        assert reached == weights_at(service, 5)
        make_version(service, member)  # what is owed was kept too


def test_differences_go_when_the_whole_is_shorter(tmp_path: Path, clock: SetClock):
    """Each is half a version: two are no use, unless they lead to what is there."""
    with frugal(tmp_path, clock, swarm__keep_versions=1, swarm__codec="bf16") as service:
        member = join(service)
        for _ in range(4):
            make_version(service, member)
        clock.forward(1)
        lease = member.lease(blocks=(0,), steps_per_second=0.1)
        make_version(service, join(service))
        clock.forward(COLLECT_SECONDS + 10)
        service.collector.collect()
        with service.run.ledger.read() as tx:
            assert list(tx.versions.deltas(0)) == [lease.base_version, 5] == [4, 5]
        assert len(led(service, 3, 5)) == 2 and led(service, 2, 5) == ()


def test_of_two_coordinators_that_merge_at_once_one_publishes(
    tmp_path: Path, clock: SetClock, service: Service, monkeypatch: pytest.MonkeyPatch
):
    """The loser leaves neither a difference nor a debt behind."""
    member = join(service)
    send_learned(member, member.lease(blocks=(0,)))
    run = open_run(*open_stores(tmp_path), clock)
    rival = Merger(run, Collector(run))

    def let_rival_publish(point: str) -> None:
        if point == "merge-written":
            monkeypatch.undo()
            clock.forward(3600)  # the claim has run out
            assert rival.merge_due() == 1

    monkeypatch.setattr(faults, "reached", let_rival_publish)
    assert service.merger.merge_due() == 0
    rival.run.ledger.close()
    with service.run.ledger.read() as tx:
        assert list(tx.versions.deltas(0)) == [1]
    assert follow_blobs(
        service.run.blobs, weights_at(service, 0), led(service, 0, 1)
    ) == weights_at(service, 1)
