"""Attacks on runs with several coordinators, PostgreSQL and a bucket."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from tests.support.coordinator import (
    Member,
    SetClock,
    commit,
    join,
    missing_chunks,
    running,
)
from tests.support.postgres import fresh_database
from tests.support.s3_server import s3_server

from blocktrain.coordinator.run import open_run
from blocktrain.coordinator.service import Service
from blocktrain.coordinator.updates import upload_state
from blocktrain.errors import RefusedError
from blocktrain.ledger.ledger import Ledger
from blocktrain.protocol.messages import CHUNK_BYTES, Lease, LeaseReturn, UploadState
from blocktrain.storage.blobs import open_chunks

SECONDS = 20.0


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def pair(tmp_path: Path, clock: SetClock) -> Iterator[tuple[Service, Service]]:
    """Two coordinators of one run in PostgreSQL."""
    url = fresh_database()
    with running(tmp_path, clock, url=url) as service:
        ledger = Ledger(url)
        try:
            yield service, Service(open_run(ledger, service.run.chunks, clock))
        finally:
            ledger.close()


def test_two_coordinators_together_give_a_worker_one_lease(pair: tuple[Service, Service]):
    member = join(pair[0])
    doubles = [replace(member, service=service) for service in pair * 4]
    with ThreadPoolExecutor(8) as pool:
        answers = [each.answer for each in pool.map(Member.ask, doubles)]
    assert {answer.lease for answer in answers if isinstance(answer, Lease)} == {answers[0].lease}


def test_two_coordinators_share_the_quota_of_unfinished_uploads(pair: tuple[Service, Service]):
    member = join(pair[0])
    for number in range(6):
        here = replace(member, service=pair[number % 2])
        lease = here.lease(blocks=(0,))
        assert missing_chunks(here.service, here.caller, here.make(lease, number + 1.0).offer)
        returned = LeaseReturn(fence=lease.fence, reason="no")
        here.service.leases.give_back(here.caller, lease.lease, returned)
    with pair[1].run.ledger.read() as tx:
        assert len(tx.updates.of_worker(member.id, ("offered",))) == 1


@pytest.fixture
def bucket(tmp_path: Path, clock: SetClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """A coordinator whose chunks are in S3."""
    (tmp_path / "s3").mkdir()
    with s3_server(tmp_path / "s3") as server, running(tmp_path, clock) as local:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        chunks = open_chunks(server.url("run"))
        for name, _ in local.run.chunks.stored():
            chunks.put(local.run.chunks.get(name))
        yield Service(open_run(local.run.ledger, chunks, clock))


def test_presigned_urls_take_nothing_but_what_was_offered(bucket: Service):
    """Larger, smaller and other objects are removed unread, and so is one that comes after the
    commit; nobody can write to another worker's upload."""
    member, other = join(bucket), join(bucket)
    lease = member.lease(blocks=(0,))
    made = member.make(lease)
    (name,) = made.chunks
    bucket.updates.record_offer(member.caller, made.offer)

    def state() -> UploadState:
        claim = made.offer.claim
        return upload_state(bucket.run, claim.lease, [claim.recipe])

    def put(data: bytes) -> None:
        now = state()
        assert now.urls and now.missing == (name,)
        httpx.put(now.urls[name], content=data, timeout=SECONDS).raise_for_status()

    good = made.chunks[name]
    for bad in (bytes(CHUNK_BYTES + 1), good + b"x", good[:-1], bytes(len(good)), b""):
        put(bad)
        with pytest.raises(RefusedError, match="missing"):
            commit(bucket, member.caller, lease.lease)
        assert not list(bucket.run.chunks.objects("quarantine"))
    url = (state().urls or {})[name]
    forged = url.replace(lease.lease, "x" * len(lease.lease))
    assert not httpx.put(forged, content=good, timeout=SECONDS).is_success
    assert not httpx.get(url, timeout=SECONDS).is_success  # it is for writing only
    put(good)
    assert commit(bucket, member.caller, lease.lease).state == "pending"
    httpx.put(url, content=bytes(1000), timeout=SECONDS).raise_for_status()
    assert bucket.run.chunks.get(name) == good
    bucket.run.chunks.clear_leftovers(bucket.run.clock() + 1e6)
    assert not list(bucket.run.chunks.objects("quarantine"))
    assert bucket.merger.merge_due() == 1
    assert other.lease(blocks=(0,)).base_version == 1
