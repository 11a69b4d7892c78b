"""What nobody needs any more goes, and nothing else: on a real run."""

import os
from pathlib import Path

import numpy as np
import pytest
from tests.support.coordinator import (
    SetClock,
    commit,
    first_weights,
    join,
    put_chunk,
    running,
    tensors_of,
    weights_now,
)

from blocktrain.coordinator.merger import COLLECT_SECONDS, FETCH_SECONDS, Collector
from blocktrain.coordinator.service import Service
from blocktrain.ledger.ledger import Ledger
from blocktrain.storage.chunks import place_of


def stored(service: Service) -> set[str]:
    return {name for name, _ in service.run.chunks.stored()}


def version_numbers(ledger: Ledger, block: int) -> list[int]:
    with ledger.read() as tx:
        return sorted(v.version for v in tx.versions.all() if v.block == block)


def test_the_newest_versions_and_the_corpus_are_kept_and_the_rest_goes(
    tmp_path: Path, clock: SetClock
):
    with running(tmp_path, clock, swarm__keep_versions=2) as service:
        member = join(service)
        for _ in range(4):
            member.work(blocks=(0,))
            clock.forward(1)
            service.round()
        with service.run.ledger.read() as tx:
            names = {v.version: v.weights.name for v in tx.versions.all() if v.block == 0}
        assert service.collector.collect() == 0
        assert version_numbers(service.run.ledger, 0) == [3, 4]
        assert version_numbers(service.run.ledger, 1) == [0]
        assert set(names.values()) <= stored(service)  # somebody may just be fetching them
        clock.forward(FETCH_SECONDS + 10)
        assert service.collector.collect() == 6  # of three versions, a recipe and a chunk each
        left = stored(service)
        assert all(names[version] in left for version in (3, 4))
        assert not any(names[version] in left for version in (0, 1, 2))
        for blob in service.run.description.corpus.values():
            assert service.run.blobs.chunks_of(blob.name) <= left
        assert service.collector.collect() == 0
        assert weights_now(service.run, 0) and weights_now(service.run, 1)


@pytest.mark.parametrize("collectors", ["the same", "others"])
def test_versions_of_hours_ago_stay_for_those_who_fetch_them(
    tmp_path: Path, clock: SetClock, collectors: str
):
    """Also where another coordinator forgot them, or this one before it was started again."""
    with running(tmp_path, clock, swarm__keep_versions=1) as service:
        member = join(service)
        member.work(blocks=(0,))
        service.round()
        with service.run.ledger.read() as tx:
            old = service.run.blobs.chunks_of(tx.versions.get(0, 0).weights.name)

        def collect() -> int:
            the_same = collectors == "the same"
            return (service.collector if the_same else Collector(service.run)).collect()

        clock.forward(COLLECT_SECONDS + 10)
        collect()
        assert version_numbers(service.run.ledger, 0) == [1]
        assert old <= stored(service)
        clock.forward(FETCH_SECONDS - 1)
        assert collect() == 0
        assert old <= stored(service)
        clock.forward(10)
        assert collect() == len(old)
        assert not old & stored(service)


def test_a_version_that_comes_again_is_kept(tmp_path: Path, clock: SetClock):
    with running(tmp_path, clock, swarm__keep_versions=1, train__steps=1000) as service:
        member = join(service)
        member.work(by=1.0, blocks=(0,))
        service.round()
        clock.forward(COLLECT_SECONDS + 10)
        service.collector.collect()
        member.send(member.signer.update(member.lease(blocks=(0,)), first_weights(0)))
        service.round()
        clock.forward(COLLECT_SECONDS + 10)
        service.collector.collect()
        for name, tensor in weights_now(service.run, 0).items():
            np.testing.assert_array_equal(tensor, first_weights(0)[name])


def test_a_forgotten_version_that_is_gone_already_does_no_harm(tmp_path: Path, clock: SetClock):
    """As in a restored backup that was taken while it was collected."""
    with running(tmp_path, clock, swarm__keep_versions=1) as service:
        with service.run.ledger.read() as tx:
            old = service.run.blobs.chunks_of(tx.versions.get(0, 0).weights.name)
        join(service).work(blocks=(0,))
        service.round()
        clock.forward(1)
        service.collector.collect()
        for name in old:
            service.run.chunks.delete(name)
        service.collector.collect()
        clock.forward(FETCH_SECONDS + 10)
        assert service.collector.collect() == 0


def test_updates_go_once_they_are_merged(tmp_path: Path, clock: SetClock):
    with running(tmp_path, clock, swarm__quorum=2) as service:
        first, second, third = join(service), join(service), join(service)
        made = [
            member.make(member.lease(blocks=(0,)), by=by)
            for member, by in ((first, 1.0), (second, 2.0), (third, 4.0))
        ]
        merged = {name for each in made[:2] for name in each.chunks}
        first.send(made[0])
        second.send(made[1])
        clock.forward(5)
        assert service.collector.collect() == 0
        assert service.merger.merge_due() == 1
        third.send(made[2])
        assert service.collector.collect() == len(merged) > 0
        assert not merged & stored(service)
        assert set(made[2].chunks) <= stored(service)
        assert weights_now(service.run, 0)


def test_what_is_put_again_is_relied_on(service: Service, clock: SetClock):
    put_again = service.run.chunks.put(b"of an update, and of the next one too")
    service.collector.retire([put_again, service.run.chunks.put(b"of an update")])
    clock.forward(5)
    past = clock.now - 10
    for name, _ in service.run.chunks.stored():
        os.utime(service.run.chunks.folder / place_of(name), (past, past))
    assert service.run.chunks.put(b"of an update, and of the next one too") == put_again
    assert service.collector.collect() == 1
    assert put_again in stored(service)


def test_what_an_earlier_coordinator_retired_goes_later(service: Service, clock: SetClock):
    """It was not told."""
    name = service.run.chunks.put(b"of an update")
    clock.forward(5)
    service.collector.retire([name])
    started_again = Collector(service.run)
    assert started_again.collect() == 0
    clock.forward(COLLECT_SECONDS)
    assert started_again.collect() == 1


def test_what_somebody_builds_on_is_kept(tmp_path: Path, clock: SetClock):
    settings = {"swarm__keep_versions": 1, "swarm__quorum": 1, "train__steps": 200}
    with running(tmp_path, clock, **settings) as service:
        trains, sends, waits, quick = (join(service) for _ in range(4))
        slow = {"blocks": (0,), "steps_per_second": 1e-3}
        lease = trains.lease(**slow)
        quick.work(blocks=(0,))
        service.merger.merge_due()
        sending = sends.lease(**slow)
        offered = sends.make(sending, by=7.0)
        service.updates.record_offer(sends.caller, offered.offer)
        for name, data in offered.chunks.items():
            put_chunk(service, sends.caller, sending.lease, name, data)
        quick.work(blocks=(0,))
        service.merger.merge_due()
        waiting = waits.lease(**slow)
        quick.work(blocks=(0,))
        service.merger.merge_due()
        waits.send(waits.make(waiting, by=9.0))
        clock.forward(COLLECT_SECONDS + 10)
        service.collector.collect()
        assert version_numbers(service.run.ledger, 0) == [0, 1, 2, 3]
        assert trains.send(trains.make(lease)).state == "pending"
        assert commit(service, sends.caller, sending.lease).state == "pending"
        assert service.merger.merge_due() == 1
        clock.forward(COLLECT_SECONDS + 10)
        assert service.collector.collect() > 0
        assert version_numbers(service.run.ledger, 0) == [4]


def test_the_blocks_before_a_lease_of_a_cascade_are_kept_while_it_is_held(
    tmp_path: Path, clock: SetClock
):
    cascade = {"objective__kind": "cascade", "objective__tail": 1, "objective__lead": 0.0}
    with running(tmp_path, clock, **cascade, swarm__keep_versions=1) as service:
        slow, quick = join(service), join(service)
        lease = slow.lease(blocks=(1,), steps_per_second=1e-3)
        for _ in range(3):
            clock.forward(1)
            quick.work(blocks=(0,))
            service.merger.merge_due()
        clock.forward(COLLECT_SECONDS + 10)
        service.collector.collect()
        (before,) = lease.predecessors
        assert before.version == 0
        assert tensors_of(service.run, before.weights)
        slow.send(slow.make(lease))
        service.merger.merge_due()
        clock.forward(COLLECT_SECONDS + 10)
        service.collector.collect()
        assert version_numbers(service.run.ledger, 0) == [3]


def test_velocity_is_kept_with_its_version(tmp_path: Path, clock: SetClock):
    with running(tmp_path, clock, swarm__keep_versions=1, swarm__outer_momentum=0.5) as service:
        member = join(service)
        for _ in range(2):
            member.work(blocks=(0,))
            service.round()
        clock.forward(COLLECT_SECONDS + 10)
        service.collector.collect()
        with service.run.ledger.read() as tx:
            velocity = tx.versions.get(0).velocity
        assert velocity is not None and tensors_of(service.run, velocity)
        member.work(blocks=(0,))
        assert service.merger.merge_due() == 1


def test_a_chunk_that_nobody_names_stays_for_an_hour(service: Service, clock: SetClock):
    name = service.run.chunks.put(b"of an upload that has just begun")
    clock.forward(COLLECT_SECONDS - 10)
    assert service.collector.collect() == 0
    clock.forward(20)
    assert service.collector.collect() == 1
    assert not service.run.chunks.has([name])


def test_what_a_killed_process_was_writing_goes_too(
    service: Service, tmp_path: Path, clock: SetClock
):
    partial = tmp_path / "chunks" / "partial" / "half a chunk"
    partial.write_bytes(b"half")
    service.collector.collect()
    assert partial.exists()
    clock.forward(COLLECT_SECONDS + 10)
    service.collector.collect()
    assert not partial.exists()
