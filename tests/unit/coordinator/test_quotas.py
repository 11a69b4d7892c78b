"""How much of the coordinator's disk hostile workers can take, and how it comes back."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy.exc import DBAPIError
from tests.support.coordinator import (
    INVITE_SECONDS,
    Made,
    Member,
    SetClock,
    join,
    missing_chunks,
    put_chunk,
    running,
    swarm_config,
)

from blocktrain.coordinator.folder import RESERVED_BYTES, CoordinatorFolder
from blocktrain.coordinator.merger import (
    COLLECT_SECONDS,
    REFUSED_SECONDS,
    UNFINISHED_SECONDS,
)
from blocktrain.coordinator.service import Service
from blocktrain.errors import RefusedError, RunError
from blocktrain.protocol.messages import LeaseReturn
from blocktrain.storage import chunks
from blocktrain.storage.chunks import place_of


def offer_and_send(member: Member, by: float) -> Made:
    """An update that arrives whole and is never committed; its lease is given back."""
    lease = member.lease(blocks=(0,))
    made = member.make(lease, by)
    for name in missing_chunks(member.service, member.caller, made.offer):
        put_chunk(member.service, member.caller, lease.lease, name, made.chunks[name])
    returned = LeaseReturn(fence=lease.fence, reason="no")
    member.service.leases.give_back(member.caller, lease.lease, returned)
    return made


def states(service: Service, member: Member) -> list[str]:
    with service.run.ledger.read() as tx:
        rows = tx.updates.of_worker(member.id, ("offered", "pending", "merged", "refused"))
    return sorted(row.state for row in rows)


def make_older(service: Service, seconds: float) -> None:
    for name, at in list(service.run.chunks.stored()):
        os.utime(service.run.chunks.folder / place_of(name), (at - seconds, at - seconds))


def test_a_worker_has_one_unfinished_upload_besides_those_of_its_leases(service: Service):
    hoarder = join(service)
    for by in range(1, 6):
        offer_and_send(hoarder, by)
    assert states(service, hoarder) == ["offered"] + ["refused"] * 4


def test_chunks_of_refused_updates_go_after_a_minute(service: Service, clock: SetClock):
    """Also if another coordinator refused them, or this one before it was started again."""
    hoarder, honest = join(service), join(service)
    before = {name for name, _ in service.run.chunks.stored()}
    made = [offer_and_send(hoarder, by) for by in range(1, 6)]
    kept = honest.make(honest.lease(blocks=(1,)), 1.0)
    honest.send(kept)
    clock.forward(1)
    Service(service.run).collector.collect()
    assert len({name for name, _ in service.run.chunks.stored()} - before) == 6
    make_older(service, REFUSED_SECONDS + 10)
    Service(service.run).collector.collect()
    left = {name for name, _ in service.run.chunks.stored()}
    assert left - before == {*made[-1].chunks, *kept.chunks}


def test_an_offer_is_forgotten_by_age_although_its_block_stands_still(
    service: Service, clock: SetClock
):
    hoarder = join(service)
    offer_and_send(hoarder, 1.0)
    clock.forward(0.9 * COLLECT_SECONDS)
    service.collector.collect()
    assert states(service, hoarder) == ["offered"]
    clock.forward(0.2 * COLLECT_SECONDS)
    service.collector.collect()
    assert states(service, hoarder) == ["refused"]


def test_one_invite_does_not_fill_the_disk_with_unfinished_uploads(
    service: Service, monkeypatch: pytest.MonkeyPatch
):
    secret = service.operator.invite("train", 10, INVITE_SECONDS)
    hoarders, honest = [join(service, invite=secret) for _ in range(4)], join(service)
    size = offer_and_send(hoarders[0], 1.0).offer.claim.recipe.size
    monkeypatch.setattr(service.run.chunks, "free_bytes", lambda: 6 * size)
    offer_and_send(hoarders[1], 2.0)
    offer_and_send(hoarders[2], 3.0)
    with pytest.raises(RefusedError, match="fill the coordinator's disk") as refused:
        offer_and_send(hoarders[3], 4.0)
    assert refused.value.code == "unavailable"
    assert honest.send(honest.make(honest.lease(blocks=(1,)))).state == "pending"


def test_the_store_leaves_what_is_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = chunks.LocalChunks(tmp_path, reserved=RESERVED_BYTES)
    room = SimpleNamespace(free=RESERVED_BYTES + 1000)
    monkeypatch.setattr(chunks.shutil, "disk_usage", lambda folder: room)
    store.put(bytes(1000))
    assert store.free_bytes() == 1000
    with pytest.raises(RunError, match="reserved for other files"):
        store.put(bytes(1001))
    assert not list((tmp_path / "partial").iterdir())


def test_a_coordinator_collects_before_anything_else(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Although it is restarted every minute, and although its rounds fail."""
    monkeypatch.setattr(service.leases, "expire", lambda: 1 / 0)
    half = tmp_path / "chunks" / "partial" / "half a chunk"
    half.write_bytes(b"half")
    old = service.run.clock() - UNFINISHED_SECONDS - 10
    os.utime(half, (old, old))
    service.start()
    try:
        service.wake()
        for _ in range(200):
            if not half.exists():
                break
            time.sleep(0.02)
    finally:
        service.stop()
    assert not half.exists()


def fill(service: Service, disk: Path) -> None:
    """Until not even one more event fits into the ledger."""
    with suppress(OSError), (disk / "fill").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    for events in (100, 10, 1):
        with suppress(DBAPIError):
            while True:
                with service.run.ledger.write() as tx:
                    for _ in range(events):
                        tx.events.add(service.run.clock(), "joined", detail=400 * "x")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, which needs root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    if os.getuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_its_own_chunks_have_filled_recovers(small_disk: Path, clock: SetClock):
    """Nothing was reserved here: not a page of the ledger can be written."""
    with running(small_disk, clock, swarm__keep_versions=1) as service:
        member, store = join(service), service.run.chunks
        member.work(blocks=(0,))
        assert service.merger.merge_due() == 1  # so that there is a version to forget
        clock.forward(1)
        member.work(blocks=(0,))
        while shutil.disk_usage(small_disk).free > 1 << 20:
            store.put(os.urandom(1 << 20))  # of updates that nobody needs any more
        fill(service, small_disk)
        make_older(service, COLLECT_SECONDS + 10)
        with pytest.raises(DBAPIError, match="full"):
            service.collector.collect()
        assert shutil.disk_usage(small_disk).free > 4 << 20
        assert service.merger.merge_due() == 1
        member.work(blocks=(0,))


def test_only_the_coordinators_own_store_reserves_space(tmp_path: Path):
    home = CoordinatorFolder(tmp_path / "run")
    run = home.open_or_create(swarm_config())
    try:
        assert run.chunks.free_bytes() <= shutil.disk_usage(tmp_path).free - RESERVED_BYTES
    finally:
        run.ledger.close()
