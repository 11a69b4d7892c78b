"""Every byte is counted once, up when it is verified, down when it is reported."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError
from tests.support.coordinator import Member, SetClock, commit, join, open_stores
from tests.support.frugal import frugal, send_learned

from blocktrain.coordinator.endpoints import MAX_MESSAGE_BYTES
from blocktrain.coordinator.run import open_run
from blocktrain.coordinator.service import Service
from blocktrain.coordinator.updates import Upload
from blocktrain.coordinator.verification import Finding
from blocktrain.errors import RefusedError
from blocktrain.protocol.messages import MOST_DOWNLOADS, Downloaded, Lease, LeaseReturn
from blocktrain.protocol.status_messages import Moved, Score

TOLD = (Downloaded(block=0, whole=7, differences=0, raw=7),)


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def service(tmp_path: Path, clock: SetClock) -> Iterator[Service]:
    with frugal(tmp_path, clock) as service:
        yield service


def give_back(member: Member, lease: Lease) -> None:
    told = LeaseReturn(fence=lease.fence, reason="stopped", downloads=TOLD)
    member.service.leases.give_back(member.caller, lease.lease, told)


def by_block(service: Service) -> list[Moved]:
    return [block.moved for block in service.reports.status().blocks]


def by_worker(service: Service) -> dict[str, Moved]:
    return {worker.worker: worker.moved for worker in service.reports.status().workers}


def test_updates_and_downloads_are_counted_by_worker_and_by_block(service: Service):
    first, second = join(service), join(service)
    raw = first.lease(blocks=(0,)).base.size
    assert by_block(service) == [Moved(), Moved()]
    told = (
        Downloaded(block=0, whole=raw, differences=0, raw=raw),
        Downloaded(block=1, whole=0, differences=70, raw=raw),
    )
    size, _ = send_learned(first, first.lease(blocks=(0,)), told)
    again, _ = send_learned(second, second.lease(blocks=(0,)))
    assert by_worker(service) == {
        first.id: Moved(up=size, up_raw=raw, down_whole=raw, down_differences=70, down_raw=2 * raw),
        second.id: Moved(up=again, up_raw=raw),
    }
    assert by_block(service) == [
        Moved(up=size + again, up_raw=2 * raw, down_whole=raw, down_raw=raw),
        Moved(down_differences=70, down_raw=raw),
    ]


def test_all_that_may_be_told_at_once_fits_into_a_request():
    most = (Downloaded(block=4095, whole=2**40, differences=2**40, raw=2**40),) * MOST_DOWNLOADS
    told = LeaseReturn(fence=2**53, reason="\n" * 500, downloads=most)
    scored = Score(
        block=None,
        versions=(10**6,) * 4096,
        split="valid",
        windows="w" * 64,
        ce=1.5,
        downloads=most,
    )
    for message in (told, scored):
        assert len(message.model_dump_json()) <= MAX_MESSAGE_BYTES
    with pytest.raises(ValidationError):
        LeaseReturn(fence=1, reason="", downloads=(*most, most[0]))


def test_what_is_sent_again_is_counted_once(service: Service):
    member = join(service)
    lease = member.lease(blocks=(0,))
    told = (Downloaded(block=0, whole=5, differences=6, raw=7),)
    size, _ = send_learned(member, lease, told)
    assert commit(service, member.caller, lease.lease).state == "pending"
    assert send_learned(member, lease, told)[1] == "pending"
    moved = by_block(service)[0]
    assert (moved.up, moved.down_whole, moved.down_differences) == (size, 5, 6)


def test_another_coordinator_counts_what_this_one_was_offered(service: Service, tmp_path: Path):
    """What is not in its memory is looked up."""
    member = join(service)
    lease = member.lease(blocks=(0,))
    made = member.signer.update_of_bytes(lease, b"x" * 200, codec="sparse")
    service.updates.record_offer(member.caller, made.offer)
    other = Service(open_run(*open_stores(tmp_path), service.run.clock))
    upload = other.updates.find_upload(member.caller, lease.lease)
    assert isinstance(upload, Upload)
    other.updates.settle(member.caller, upload, Finding(""))
    other.run.ledger.close()
    assert by_block(service)[0] == Moved(up=200, up_raw=lease.base.size)


def test_a_refused_update_was_moved_all_the_same(service: Service):
    member = join(service)
    lease = member.lease(blocks=(0,))
    made = member.signer.update_of_bytes(lease, b"x" * 200, codec="sparse")
    assert member.send(made).state == "refused"
    assert by_worker(service)[member.id] == Moved(up=200, up_raw=lease.base.size)


def test_downloads_of_a_block_that_is_none_are_refused(service: Service):
    member = join(service)
    told = (Downloaded(block=2, whole=1, differences=0, raw=1),)
    with pytest.raises(RefusedError, match="no block 2"):
        send_learned(member, member.lease(blocks=(0,)), told)
    judge = join(service, "evaluate")
    bad = Score(block=0, versions=(0,), split="valid", windows="windows0", ce=1.0, downloads=told)
    with pytest.raises(RefusedError, match="no block 2"):
        service.reports.score(judge.caller, bad)


@pytest.mark.parametrize("in_time", [False, True])
def test_what_was_downloaded_for_a_lease_that_is_given_back_counts_once(
    service: Service, clock: SetClock, in_time: bool
):
    member = join(service)
    lease = member.lease(blocks=(0,))
    if not in_time:
        clock.forward(1000)
        service.leases.expire()
    for _ in range(2):
        give_back(member, lease)
    assert by_block(service)[0] == Moved(down_whole=7, down_raw=7)
    assert [event.kind for event in service.reports.events(0, 100)].count("returned") == in_time


@pytest.mark.parametrize("first", ["return", "update"])
@pytest.mark.parametrize("in_time", [False, True])
def test_what_an_update_and_a_return_both_tell_counts_once(
    service: Service, clock: SetClock, in_time: bool, first: str
):
    """As where a worker gives up a lease whose update arrives all the same."""
    member = join(service)
    lease = member.lease(blocks=(0,))
    if not in_time:
        clock.forward(1000)
        service.leases.expire()
    if first == "return":
        give_back(member, lease)
    assert send_learned(member, lease, TOLD)[1] == "pending"
    give_back(member, lease)
    moved = by_block(service)[0]
    assert (moved.down_whole, moved.down_raw) == (7, 7)


def test_what_an_evaluator_downloads_comes_with_its_score(service: Service):
    judge = join(service, "evaluate")
    told = (Downloaded(block=1, whole=10, differences=20, raw=300),)
    score = Score(block=0, versions=(0,), split="valid", windows="windows0", ce=1.0, downloads=told)
    service.reports.score(judge.caller, score)
    expected = Moved(down_whole=10, down_differences=20, down_raw=300)
    assert by_worker(service)[judge.id] == expected
    assert by_block(service) == [Moved(), expected]
