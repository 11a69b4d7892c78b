"""Updates become versions: on a real run, with exact numbers."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.support.coordinator import (
    Member,
    SetClock,
    Weights,
    first_weights,
    join,
    make_run,
    moved,
    open_stores,
    running,
    tensors_of,
    weights_now,
)

from blocktrain.coordinator.merger import CLAIM_SECONDS, Collector, Merger
from blocktrain.coordinator.run import open_run
from blocktrain.coordinator.service import Service
from blocktrain.coordinator.verification import last_moves
from blocktrain.protocol.messages import Lease
from blocktrain.storage.chunks import place_of
from blocktrain.swarm.bounds import LEAST_HISTORY


def version_of(service: Service, block: int = 0) -> int:
    with service.run.ledger.read() as tx:
        return tx.blocks.states()[block].version


def assert_weights(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], np.asarray(tensor, np.float32), err_msg=name)


def lease_both(first: Member, second: Member) -> tuple[Lease, Lease]:
    """Ten steps of block 0 for one, three for the other."""
    return first.lease(blocks=(0,)), second.lease(blocks=(0,), steps_per_second=0.1)


# What a merge gives


def test_one_update_is_the_next_version_bit_for_bit(service: Service):
    member = join(service)
    lease = member.lease(blocks=(0,))
    weights = member.trained(lease, 0.1)
    weights["scale"] = np.asarray(-0.0, np.float32)
    made = member.signer.update(lease, weights)
    member.send(made)
    assert service.merger.merge_due() == 1
    with service.run.ledger.read() as tx:
        version = tx.versions.get(0)
    assert version.version == 1
    assert service.run.blobs.recipe(version.weights.name) == made.offer.claim.recipe
    assert version.velocity is None
    assert np.signbit(weights_now(service.run, 0)["scale"])


def test_two_updates_become_their_mean_weighted_by_the_text_they_cover(
    tmp_path: Path, clock: SetClock
):
    with running(tmp_path, clock, swarm__quorum=2) as service:
        first, second = join(service), join(service)
        ten, three = lease_both(first, second)
        first.send(first.make(ten, by=1.0))
        second.send(second.make(three, by=-2.0))
        assert service.merger.merge_due() == 1
        ends = [moved(first_weights(0), by) for by in (1.0, -2.0)]
        sizes = [steps * service.run.config.bytes_per_step for steps in (10, 3)]
        assert sizes == [160, 48]
        ordered = sorted(zip((ten.lease, three.lease), ends, sizes, strict=True))
        expected = {
            name: sum(size * end[name].astype(np.float64) for _, end, size in ordered) / sum(sizes)
            for name in ends[0]
        }
        assert_weights(weights_now(service.run, 0), expected)


def test_velocity_is_kept_with_the_version_and_used_for_the_next(tmp_path: Path, clock: SetClock):
    rate, momentum = 0.7, 0.9
    settings = {"swarm__outer_rate": rate, "swarm__outer_momentum": momentum}
    with running(tmp_path, clock, **settings) as service:
        member = join(service)
        now = {name: tensor.astype(np.float64) for name, tensor in first_weights(0).items()}
        speed = 0.0
        for version, by in enumerate((0.5, -0.25, 1.0), 1):
            member.work(by, blocks=(0,))
            assert service.merger.merge_due() == 1
            speed = momentum * speed - by
            now = {name: tensor - rate * (momentum * speed - by) for name, tensor in now.items()}
            with service.run.ledger.read() as tx:
                held = tx.versions.get(0)
            assert held.version == version and held.velocity is not None
            for name, tensor in tensors_of(service.run, held.weights).items():
                np.testing.assert_allclose(tensor, now[name], rtol=1e-5, atol=1e-5)
            for tensor in tensors_of(service.run, held.velocity).values():
                np.testing.assert_allclose(tensor, speed, rtol=1e-4, atol=1e-5)


def test_a_late_update_counts_with_its_discount(tmp_path: Path, clock: SetClock):
    """Half of a fresh one, and what it learned since its base, not where it ended."""
    with running(tmp_path, clock, swarm__quorum=1) as service:
        late, quick = join(service), join(service)
        slow_lease = late.lease(blocks=(0,))
        quick.work(1.0, blocks=(0,))
        service.merger.merge_due()
        quick.send(quick.make(quick.lease(blocks=(0,)), by=3.0))
        late.send(late.make(slow_lease, by=30.0))
        assert service.merger.merge_due() == 1
        expected = moved(first_weights(0), 1.0 + (3.0 + 0.5 * 30.0) / 2)
        for name, tensor in weights_now(service.run, 0).items():
            np.testing.assert_allclose(tensor, expected[name], rtol=1e-5)


def test_an_update_that_waited_while_a_version_was_made_is_late(tmp_path: Path, clock: SetClock):
    with running(tmp_path, clock) as service:
        first, second = join(service), join(service)
        ten, three = lease_both(first, second)
        first.send(first.make(ten, by=1.0))
        with service.run.ledger.read() as tx:
            seen = tx.blocks.states()[0]
        second.send(second.make(three, by=2.0))
        assert service.merger.merge(seen, seen.pending)
        assert service.merger.merge_due() == 1
        for name, tensor in weights_now(service.run, 0).items():
            np.testing.assert_allclose(tensor, first_weights(0)[name] + 1.0 + 0.5 * 2.0, rtol=1e-5)
        with service.run.ledger.read() as tx:
            assert tx.blocks.states()[0].merged_batches == 13


def test_a_merge_is_told(service: Service):
    join(service).work(blocks=(1,))
    service.merger.merge_due()
    event = service.reports.events(0, 100)[-1]
    assert (event.kind, event.worker, event.block) == ("merged", None, 1)
    assert event.detail == "version 1: 1 update, 10 steps"


# When


def test_quorum_and_grace(tmp_path: Path, clock: SetClock):
    with running(tmp_path, clock, swarm__quorum=2, swarm__grace_seconds=5.0) as service:
        members = [join(service) for _ in range(3)]
        leases = [member.lease(blocks=(0,)) for member in members]
        members[0].send(members[0].make(leases[0]))
        clock.forward(50)
        assert service.merger.merge_due() == 0  # one of three, and two are at it
        members[1].send(members[1].make(leases[1]))
        clock.forward(4.9)
        assert service.merger.merge_due() == 0
        clock.forward(0.1)
        assert service.merger.merge_due() == 1
        members[2].send(members[2].make(leases[2]))
        assert service.merger.merge_due() == 1  # nobody else is at it
        with service.run.ledger.read() as tx:
            assert [tx.updates.get(lease.lease).merged_into for lease in leases] == [1, 1, 2]


def test_a_lost_worker_is_waited_for_two_leases_long(tmp_path: Path, clock: SetClock):
    with running(tmp_path, clock, swarm__quorum=2) as service:
        alive, lost = join(service), join(service)
        lost.lease(blocks=(0,))
        alive.work(blocks=(0,))
        clock.forward(59)
        service.round()
        assert version_of(service) == 0
        clock.forward(2)
        service.round()
        assert version_of(service) == 1


def test_blocks_do_not_wait_for_each_other(tmp_path: Path, clock: SetClock):
    with running(tmp_path, clock, swarm__quorum=2) as service:
        first, second, alone = (join(service) for _ in range(3))
        second.lease(blocks=(0,))
        first.work(blocks=(0,))
        for version in range(1, 5):
            alone.work(blocks=(1,))
            assert service.merger.merge_due() == 1
            assert (version_of(service, 0), version_of(service, 1)) == (0, version)


def test_nothing_waits_nothing_happens(service: Service):
    join(service).lease()
    assert service.merger.merge_due() == 0
    assert version_of(service) == 0


def test_two_coordinators_make_one_version(tmp_path: Path, clock: SetClock):
    with running(tmp_path, clock) as service:
        stores = [open_stores(tmp_path) for _ in range(3)]
        runs = [open_run(*each, clock) for each in stores]
        mergers = [Merger(run, Collector(run)) for run in runs]
        member = join(service)
        for turn in range(1, 4):
            member.work(blocks=(0,))
            gate = threading.Barrier(len(mergers))

            def merge(merger: Merger, gate: threading.Barrier = gate) -> int:
                gate.wait()
                return merger.merge_due()

            with ThreadPoolExecutor(len(mergers)) as pool:
                assert sum(pool.map(merge, mergers)) == 1
            assert version_of(service) == turn
        with service.run.ledger.read() as tx:
            assert tx.members.worker(member.id).updates_merged == 3
        for ledger, _ in stores:
            ledger.close()


def test_what_a_coordinator_that_died_was_merging_is_merged_by_another(
    service: Service, clock: SetClock
):
    join(service).work(blocks=(0,))
    with service.run.ledger.write() as tx:
        assert tx.blocks.claim_merge(0, 0, clock.now, CLAIM_SECONDS)
    clock.forward(CLAIM_SECONDS)
    assert service.merger.merge_due() == 0
    clock.forward(0.1)
    assert service.merger.merge_due() == 1


# The end


def test_the_end_is_noticed_once(tmp_path: Path, clock: SetClock):
    with running(tmp_path, clock, train__steps=10) as service:
        other = Merger(service.run, Collector(service.run))
        member = join(service)
        for block in (0, 1):
            service.round()
            member.work(blocks=(block,))
        assert service.merger.merge_due() == 1
        assert service.reports.status().state == "running"
        for _ in range(3):
            service.round()
            other.merge_due()
            clock.forward(1)
        assert service.reports.status().state == "finished"
        kinds = [event.kind for event in service.reports.events(0, 100)]
        assert kinds.count("finished") == 1
        assert kinds[-1] == "finished"


def test_a_run_does_not_end_while_something_is_out(tmp_path: Path, clock: SetClock):
    with running(tmp_path, clock, train__steps=10) as service:
        member = join(service)
        member.work(blocks=(1,))
        lease = member.lease(blocks=(0,))
        for _ in range(2):
            service.round()
        assert service.reports.status().state == "running"
        clock.forward(121)
        service.round()  # it expires, so it has to be done again
        service.round()
        assert service.reports.status().state == "running"
        member.send(member.make(lease))
        service.round()
        service.round()
        assert service.reports.status().state == "finished"


def test_a_run_goes_on_after_a_restart(tmp_path: Path, clock: SetClock):
    """A second coordinator process finds every promise the first one made."""
    first = Service(make_run(tmp_path, clock=clock))
    member = join(first)
    lease = member.lease(blocks=(0,))
    made = member.make(lease)
    first.updates.record_offer(member.caller, made.offer)
    first.run.ledger.close()

    second = Service(open_run(*open_stores(tmp_path), clock))
    again = Member(second, member.signer, member.joined)
    assert second.members.caller(member.joined.token) == member.caller
    assert again.send(made).state == "pending"
    assert second.merger.merge_due() == 1
    assert_weights(weights_now(second.run, 0), moved(first_weights(0), 1.0))
    second.run.ledger.close()


LONG = 100.0  # seconds: nobody waits for a quorum that long


def alter(service: Service, chunk: str, damage: str) -> None:
    path = service.run.chunks.folder / place_of(chunk)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data[:-5] if damage == "cut" else data)


@pytest.mark.parametrize("damage", ["flipped", "cut"])
@pytest.mark.parametrize("altered", ["its bytes", "its base"])
def test_an_update_that_was_altered_in_the_store_does_not_hold_up_the_others(
    tmp_path: Path, clock: SetClock, altered: str, damage: str
):
    with running(tmp_path, clock, train__steps=1000, swarm__quorum=2) as service:
        late, second, third = (join(service) for _ in range(3))
        first = late.lease(blocks=(0,))
        second.work(blocks=(0,))
        clock.forward(LONG)
        assert service.merger.merge_due() == 1
        made = late.make(first, by=5.0)
        second.lease(blocks=(0,))
        third.work(2.0, blocks=(0,))
        assert late.send(made).state == "pending"
        of_base = service.run.blobs.recipe(first.base.name).chunks
        (chunk,) = made.chunks if altered == "its bytes" else of_base
        alter(service, chunk, damage)
        clock.forward(LONG)
        assert service.merger.merge_due() == 0
        with service.run.ledger.read() as tx:
            refused = tx.updates.get(first.lease)
        assert refused is not None and refused.state == "refused"
        assert "damaged" in refused.reason
        assert not service.run.chunks.has([chunk])  # so that it is asked for when it comes again
        assert service.reports.events(0, 100)[-1].kind == "refused"
        assert service.merger.merge_due() == 1  # of the other one
        for name, tensor in weights_now(service.run, 0).items():
            np.testing.assert_allclose(tensor, first_weights(0)[name] + 1.0 + 2.0, rtol=1e-5)


def test_a_version_that_was_altered_is_no_updates_fault(service: Service, clock: SetClock):
    late, quick = join(service), join(service)
    lease = late.lease(blocks=(0,))
    quick.work(blocks=(0,))
    clock.forward(LONG)
    assert service.merger.merge_due() == 1
    late.send(late.make(lease, by=3.0))
    with service.run.ledger.read() as tx:
        current = tx.versions.get(0).weights
    (chunk,) = service.run.blobs.recipe(current.name).chunks
    alter(service, chunk, "flipped")
    clock.forward(LONG)
    assert service.merger.merge_due() == 0
    with service.run.ledger.read() as tx:
        assert tx.updates.get(lease.lease).state == "pending"


@pytest.mark.parametrize("lost", ["its bytes", "its base"])
def test_an_update_that_can_never_be_merged_does_not_hold_up_the_others(
    tmp_path: Path, clock: SetClock, lost: str
):
    with running(tmp_path, clock, train__steps=1000) as service:
        members = [join(service) for _ in range(3)]
        first, second = (member.lease(blocks=(0,)) for member in members[:2])
        members[2].work(blocks=(0,))
        clock.forward(LONG)
        assert service.merger.merge_due() == 1  # so that the others are late
        made = members[0].make(first, by=5.0)
        assert members[0].send(made).state == "pending"
        if lost == "its bytes":
            assert members[1].send(members[1].make(second, by=2.0)).state == "pending"
            for name in made.chunks:
                service.run.chunks.delete(name)
        else:
            with service.run.ledger.write() as tx:
                tx.versions.forget(0, 0)
        clock.forward(LONG)
        assert service.merger.merge_due() == 0
        with service.run.ledger.read() as tx:
            refused = tx.updates.get(first.lease)
            assert refused is not None and refused.state == "refused"
            assert "missing or damaged" in refused.reason
        if lost == "its base":
            members[2].work(blocks=(0,))
            clock.forward(LONG)
        assert service.merger.merge_due() == 1  # of the other one


# Clipping


def sizes_sent(service: Service, members: list[Member], *sizes: float) -> None:
    leases = [member.lease(blocks=(0,)) for member in members]
    for member, lease, size in zip(members, leases, sizes, strict=True):
        assert member.send(member.make(lease, by=size)).state == "pending"
    assert service.merger.merge_due() == 1


def clipped(service: Service) -> list[float]:
    """The factors of all clipped updates."""
    with service.run.ledger.read() as tx:
        return [row.clip for row in tx.updates.merged_after(0, 0) if row.clip is not None]


SAME_STEPS = {
    "swarm__first_steps": 10,
    "swarm__most_steps": 10,
    "train__steps": 2000,
    "train__warmup": 0,
}


def test_an_update_that_is_much_larger_than_the_others_is_clipped(tmp_path: Path, clock: SetClock):
    """Tensor by tensor: a small one varies more, so that more of its change is usual."""
    with running(tmp_path, clock, **SAME_STEPS) as service:
        members = [join(service) for _ in range(3)]
        sizes_sent(service, members, 200.0, 200.0, 900.0)
        now, room = weights_now(service.run, 0), 1 + 3 / np.sqrt(20)
        change = now["body.weight"] - first_weights(0)["body.weight"]
        np.testing.assert_allclose(change, (200 + 200 + 1.5 * room * 200) / 3, rtol=1e-3)
        change = now["scale"] - first_weights(0)["scale"]
        np.testing.assert_allclose(change, (200 + 200 + 900) / 3, rtol=1e-3)
        assert clipped(service) == pytest.approx([1.5 * room * 200 / 900], rel=1e-3)
        event = next(each for each in service.reports.events(0, 100) if each.kind == "clipped")
        assert event.worker == members[2].id and "factor 0.56" in event.detail
        assert last_moves_of(service)[0] == pytest.approx(1.5 * room * 200, rel=1e-3)


def last_moves_of(service: Service) -> list[float]:
    """How far the merged updates moved the largest tensor, largest first."""
    with service.run.ledger.read() as tx:
        return sorted((float(move.sizes.rms[0]) for move in last_moves(tx, 0)), reverse=True)


def test_an_update_that_is_merged_alone_is_not_clipped(tmp_path: Path, clock: SetClock):
    with running(tmp_path, clock, **SAME_STEPS) as service:
        members = [join(service) for _ in range(2)]
        for _ in range(LEAST_HISTORY):
            sizes_sent(service, members[:1], 200.0)
        sizes_sent(service, members[:1], 700.0)
        assert clipped(service) == []
        sizes_sent(service, members, 200.0, 700.0)  # of two, the last ones tell
        assert len(clipped(service)) == 1
