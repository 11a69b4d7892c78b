"""Every rule of the ledger, on SQLite and on PostgreSQL."""

import dataclasses
import itertools
import math
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sql
from tests.support.postgres import fresh_database

from blocktrain.errors import ConfigError, UnreachableError
from blocktrain.ledger.lease_tables import LeaseTable
from blocktrain.ledger.ledger import Ledger, Transaction
from blocktrain.ledger.schema import (
    ACTIVE,
    InviteRow,
    LeaseRow,
    RunRow,
    UpdateRow,
    WorkerRow,
    metadata,
)
from blocktrain.protocol.messages import Blob
from blocktrain.protocol.status_messages import Moved, Score
from blocktrain.swarm.state import PendingUpdate

ROOT = Path(__file__).resolve().parents[3]
NOW = 1_700_000_000.0
WEIGHTS = Blob(name="a" * 64, size=10)
OTHERS = Blob(name="b" * 64, size=20)
INVITE = InviteRow(id="i", secret_hash="h", role="train", uses_left=3, expires=NOW)

_names = (f"lease{os.getpid()}x{number:05}" for number in itertools.count(1))


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    """Two blocks of 600 batches, and workers w0 to w7."""
    ledger = Ledger(url)
    with ledger.write() as tx:
        tx.create_run(
            RunRow(
                id="run00001", config="", corpus="{}", token_secret=b"secret",
                authority_certificate="", authority_key="", created=NOW,
            )
        )  # fmt: skip
        for block in range(2):
            tx.create_block(block, 600, WEIGHTS, NOW)
        for number in range(8):
            tx.members.add_worker(
                WorkerRow(
                    id=f"w{number}", public_key=f"key {number}", name=f"worker {number}",
                    device="cpu", role="train", joined=NOW + number, seen=NOW,
                )
            )  # fmt: skip
    yield ledger
    ledger.close()


def claim(
    tx: Transaction, most: int, block: int = 0, worker: str = "w0", base: int = 0
) -> LeaseRow:
    """A lease of up to `most` batches, as a coordinator hands it out."""
    tx.blocks.lock()
    first, steps, fence = tx.blocks.take_range(block, most)
    lease = LeaseRow(
        id=next(_names), worker=worker, block=block, base_version=base, first_batch=first,
        steps=steps, schedule_start=0, schedule_stride=1, fence=fence, deadline=NOW + 60,
        created=NOW,
    )  # fmt: skip
    tx.leases.add(lease)
    return lease


def taken(tx: Transaction, most: int) -> tuple[int, int]:
    """(first batch, steps) of a range of block 0."""
    return tx.blocks.take_range(0, most)[:2]


def submit(tx: Transaction, lease: LeaseRow, now: float = NOW) -> PendingUpdate:
    """A lease's update, verified and waiting."""
    update = UpdateRow(
        lease=lease.id, worker=lease.worker, block=lease.block, base_version=lease.base_version,
        steps=lease.steps, offer="{}", signature="", loss=1.0, continues=lease.continues,
    )  # fmt: skip
    tx.updates.add(update)
    assert tx.leases.move(lease.id, "submitted")
    tx.updates.accept(lease.id, lease.base_version, 1.0, now)
    return PendingUpdate(lease.id, lease.worker, lease.base_version, lease.steps, now)


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """Results of functions that all begin at the same moment, in threads."""
    gate = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        gate.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def contents(ledger: Ledger) -> dict[str, list[Any]]:
    """Every row of every table."""
    with ledger.engine.connect() as connection:
        return {
            table.name: sorted(map(repr, connection.execute(sql.select(table))))
            for table in metadata.sorted_tables
        }


# Ranges of text


def test_a_lease_has_a_block_a_base_a_range_a_deadline_and_a_fence(ledger: Ledger):
    with ledger.write() as tx:
        given = claim(tx, 10, block=1, worker="w3")
    with ledger.read() as tx:
        lease, block = tx.leases.get(given.id), tx.blocks.get(1)
    assert (lease.worker, lease.block, lease.base_version) == ("w3", 1, 0)
    assert (lease.first_batch, lease.steps) == (0, 10)
    assert (lease.deadline, lease.fence, lease.state) == (NOW + 60, 1, "open")
    assert block.next_batch == 10


def test_a_range_is_handed_out_once(ledger: Ledger):
    with ledger.write() as tx:
        given = [claim(tx, 250) for _ in range(3)]
    assert [(lease.first_batch, lease.steps) for lease in given] == [
        (0, 250),
        (250, 250),
        (500, 100),
    ]
    with ledger.read() as tx:
        assert [state.to_hand_out for state in tx.blocks.states()] == [0, 600]


def test_a_range_that_was_given_back_is_handed_out_again_before_anything_new(ledger: Ledger):
    with ledger.write() as tx:
        first, second = claim(tx, 10), claim(tx, 10)
        for lease in (second, first):
            assert tx.leases.move(lease.id, "returned")
            tx.blocks.give_back_range(0, lease.first_batch, lease.steps)
    with ledger.write() as tx:
        assert [taken(tx, 10) for _ in range(3)] == [(0, 10), (10, 10), (20, 10)]


def test_a_range_that_was_given_back_may_be_handed_out_in_parts(ledger: Ledger):
    with ledger.write() as tx:
        tx.blocks.take_range(0, 10)
        tx.blocks.give_back_range(0, 0, 10)
        assert [taken(tx, 4) for _ in range(4)] == [(0, 4), (4, 4), (8, 2), (10, 4)]


def test_only_a_whole_untouched_range_can_be_reclaimed(ledger: Ledger):
    with ledger.write() as tx:
        tx.blocks.take_range(0, 30)
        tx.blocks.give_back_range(0, 0, 10)
        tx.blocks.give_back_range(0, 20, 10)
        assert not tx.blocks.reclaim_range(0, 0, 9)
        assert not tx.blocks.reclaim_range(1, 0, 10)
        assert tx.blocks.reclaim_range(0, 0, 10)
        assert not tx.blocks.reclaim_range(0, 0, 10)
        assert taken(tx, 4) == (20, 4)
        assert not tx.blocks.reclaim_range(0, 20, 10)
        assert tx.blocks.reclaim_range(0, 24, 6)
        assert taken(tx, 1) == (30, 1)


def test_threads_that_claim_at_once_get_disjoint_ranges_and_all_of_them(ledger: Ledger):
    def claims(worker: str) -> list[Any]:
        made = []
        for _ in range(25):
            with ledger.write() as tx:
                made.append(claim(tx, 3, worker=worker))
        return made

    workers = [f"w{number}" for number in range(8)]
    given = [*itertools.chain(*at_once([lambda w=w: claims(w) for w in workers]))]
    batches = [lease.first_batch + step for lease in given for step in range(lease.steps)]
    assert sorted(batches) == list(range(600))
    assert sorted(lease.fence for lease in given) == list(range(1, 201))


def test_ranges_given_back_while_others_claim_are_never_out_twice_at_a_time(ledger: Ledger):
    held: set[int] = set()
    done: list[int] = []
    lock = threading.Lock()

    def work(number: int) -> None:
        draws = random.Random(number)
        while True:
            with ledger.write() as tx:
                tx.blocks.lock()
                first, steps = taken(tx, draws.randint(1, 40))
            if not steps:
                return
            batches = set(range(first, first + steps))
            with lock:
                assert not held & batches
                held.update(batches)
            with lock:
                held.difference_update(batches)
                if keep := draws.random() < 0.6:
                    done.extend(batches)
            if not keep:
                with ledger.write() as tx:
                    tx.blocks.give_back_range(0, first, steps)

    at_once([lambda n=n: work(n) for n in range(4)])
    with ledger.read() as tx:
        left = tx.blocks.states()[0].to_hand_out
    assert len(done) == len(set(done)) == 600 - left


def test_blocks_hand_out_independently(ledger: Ledger):
    with ledger.write() as tx:
        assert claim(tx, 10, block=0).first_batch == 0
        assert claim(tx, 10, block=1).first_batch == 0
        assert claim(tx, 10, block=1).first_batch == 10


def test_fencing_tokens_rise(ledger: Ledger):
    fences = []
    for turn in range(4):
        with ledger.write() as tx:
            lease = claim(tx, 10)
            fences.append(lease.fence)
            if turn % 2:
                tx.leases.move(lease.id, "returned")
                tx.blocks.give_back_range(0, lease.first_batch, lease.steps)
    assert fences == [1, 2, 3, 4]


def test_a_lease_gets_another_state_only_while_it_is_held(ledger: Ledger):
    with ledger.write() as tx:
        lease = claim(tx, 10)
        assert tx.leases.move(lease.id, "sending")
        assert tx.leases.move(lease.id, "expired")
        assert not tx.leases.move(lease.id, "submitted")
        assert tx.leases.get(lease.id).state == "expired"


def test_of_many_that_end_a_lease_one_does(ledger: Ledger):
    with ledger.write() as tx:
        lease = claim(tx, 10)

    def end(state: str) -> bool:
        with ledger.write() as tx:
            return tx.leases.move(lease.id, state)

    states = ["submitted", "expired", "returned", "expired"]
    assert sum(at_once([lambda s=s: end(s) for s in states])) == 1


def test_leases_are_overdue_after_their_deadline(ledger: Ledger):
    with ledger.write() as tx:
        sending, submitted, open_ = (claim(tx, 10, worker=w) for w in ("w0", "w1", "w2"))
        tx.leases.move(sending.id, "sending")
        tx.leases.move(submitted.id, "submitted")
    with ledger.read() as tx:
        assert not tx.leases.overdue(NOW + 60)
        assert {lease.id for lease in tx.leases.overdue(NOW + 60.1)} == {sending.id, open_.id}
        assert {lease.id for lease in tx.leases.active()} == {sending.id, open_.id}
        assert [lease.id for lease in tx.leases.of_worker("w0", ACTIVE)] == [sending.id]
        assert not tx.leases.of_worker("w1", ACTIVE)


def test_an_open_lease_that_was_trained_is_sending(ledger: Ledger):
    with ledger.write() as tx:
        lease, other = claim(tx, 10), claim(tx, 10, worker="w1")
        assert tx.leases.open_of("w0") == lease
        tx.leases.mark_trained(lease.id, "w1")  # is not its worker
        assert tx.leases.get(lease.id).state == "open"
        tx.leases.mark_trained(lease.id, "w0")
        assert tx.leases.get(lease.id).state == "sending"
        assert tx.leases.open_of("w0") is None and tx.leases.open_of("w1") == other


def test_a_restarted_worker_gets_its_leases_without_an_update_again(ledger: Ledger):
    with ledger.write() as tx:
        unsent, offered, of_another = claim(tx, 1), claim(tx, 1), claim(tx, 1, worker="w1")
        submit(tx, offered)
        for lease in (unsent, of_another):
            tx.leases.move(lease.id, "sending")
        tx.leases.reopen_unsent("w0")
        states = [tx.leases.get(lease.id).state for lease in (unsent, offered, of_another)]
    assert states == ["open", "submitted", "sending"]


def test_an_expired_lease_is_returned_once(ledger: Ledger):
    with ledger.write() as tx:
        lease = claim(tx, 10)
        assert not tx.leases.return_expired(lease.id)
        tx.leases.move(lease.id, "expired")
        assert tx.leases.return_expired(lease.id) and not tx.leases.return_expired(lease.id)


# Versions and updates


def test_an_update_that_continues_a_merged_one_counts_as_trained_from_its_version(ledger: Ledger):
    with ledger.write() as tx:
        first, second, other = claim(tx, 10), claim(tx, 10), claim(tx, 10, worker="w1")
        merged = submit(tx, first)
        for lease, continues in ((second, first.id), (other, None)):
            submit(tx, dataclasses.replace(lease, continues=continues))
        assert tx.publish(0, 0, OTHERS, None, [merged], NOW)
        pending = {update.lease: update for update in tx.blocks.states()[0].pending}
    assert (pending[second.id].continues, pending[second.id].base_version) == (first.id, 1)
    assert pending[other.id].base_version == 0


def test_a_lost_residual_is_forgotten(ledger: Ledger):
    with ledger.write() as tx:
        tx.publish(0, 0, OTHERS, None, [submit(tx, claim(tx, 1))], NOW, residual=WEIGHTS)
        tx.versions.forget_residual(0, 1)
        assert tx.versions.get(0).residual is None and tx.versions.get(0).weights == OTHERS


def test_a_delta_and_a_residual_come_with_their_version_or_not_at_all(ledger: Ledger):
    with ledger.write() as tx:
        update = submit(tx, claim(tx, 10))
        assert tx.publish(0, 0, OTHERS, None, [update], NOW, delta=WEIGHTS, residual=OTHERS)
        assert not tx.publish(0, 0, OTHERS, None, [update], NOW, delta=OTHERS, residual=WEIGHTS)
    with ledger.read() as tx:
        assert tx.versions.deltas(0) == {1: WEIGHTS} and tx.versions.deltas(1) == {}
        assert (tx.versions.get(0).residual, tx.versions.get(0, 0).residual) == (OTHERS, None)
    with ledger.write() as tx:
        tx.versions.forget_delta(0, 1)
        assert tx.versions.deltas(0) == {}


def test_bytes_moved_add_up_by_worker_and_block(ledger: Ledger):
    with ledger.write() as tx:
        for worker, block in (("w0", 0), ("w0", 0), ("w0", 1), ("w1", 0)):
            tx.events.count_traffic(worker, block, Moved(up=2, down_raw=2**40))
    with ledger.read() as tx:
        once, twice = Moved(up=2, down_raw=2**40), Moved(up=4, down_raw=2**41)
        assert tx.events.traffic() == {("w0", 0): twice, ("w0", 1): once, ("w1", 0): once}


def test_a_version_is_published_on_top_of_the_one_it_was_made_from(ledger: Ledger):
    with ledger.write() as tx:
        update = submit(tx, claim(tx, 10))
        assert tx.publish(0, 0, OTHERS, WEIGHTS, [update], NOW)
    with ledger.read() as tx:
        version, old = tx.versions.get(0), tx.versions.get(0, 0)
        block, worker, merged = (
            tx.blocks.get(0),
            tx.members.worker("w0"),
            tx.updates.get(update.lease),
        )
    assert (version.version, version.weights, version.velocity) == (1, OTHERS, WEIGHTS)
    assert (old.weights, old.velocity, old.merged_batches) == (WEIGHTS, None, 0)
    assert version.merged_batches == block.merged_batches == worker.batches_merged == 10
    assert (block.version, worker.updates_merged) == (1, 1)
    assert (merged.state, merged.merged_into) == ("merged", 1)


def test_of_several_mergers_racing_on_one_version_exactly_one_wins(ledger: Ledger):
    with ledger.write() as tx:
        update = submit(tx, claim(tx, 10))

    def publish(weights: Blob) -> bool:
        with ledger.write() as tx:
            return tx.publish(0, 0, weights, None, [update], NOW)

    blobs = [Blob(name=f"{number:064x}", size=1) for number in range(4)]
    won = at_once([lambda b=b: publish(b) for b in blobs])
    assert sum(won) == 1
    with ledger.read() as tx:
        assert [v.version for v in tx.versions.all() if v.block == 0] == [0, 1]
        assert tx.versions.get(0).weights == blobs[won.index(True)]
        assert tx.blocks.get(0).merged_batches == tx.members.worker("w0").batches_merged == 10


def test_the_merger_that_loses_changes_nothing(ledger: Ledger):
    with ledger.write() as tx:
        first, second = submit(tx, claim(tx, 10)), submit(tx, claim(tx, 10, worker="w1"))
        assert tx.publish(0, 0, OTHERS, None, [first], NOW)
    before = contents(ledger)
    with ledger.write() as tx:
        assert not tx.publish(0, 0, WEIGHTS, None, [second], NOW)
    assert contents(ledger) == before
    with ledger.write() as tx:
        assert tx.publish(0, 1, WEIGHTS, None, [second], NOW)


def test_an_update_is_accepted_once(ledger: Ledger):
    with ledger.write() as tx:
        lease = claim(tx, 10)
        submit(tx, lease)
        tx.updates.accept(lease.id, lease.base_version, 0.5, NOW + 1)
        update = tx.updates.get(lease.id)
    assert (update.weight, update.committed) == (1.0, NOW)


def test_an_update_is_merged_once(ledger: Ledger):
    with ledger.write() as tx:
        update = submit(tx, claim(tx, 10))
        assert tx.publish(0, 0, OTHERS, None, [update], NOW)
    before = contents(ledger)
    with suppress(RuntimeError), ledger.write() as tx:
        assert not tx.publish(0, 1, WEIGHTS, None, [update], NOW)
    assert contents(ledger) == before


def test_a_refused_update_is_not_merged(ledger: Ledger):
    with ledger.write() as tx:
        lease = claim(tx, 10)
        update = submit(tx, lease)
        assert tx.updates.refuse(lease.id, "x" * 600)
        assert not tx.updates.refuse(lease.id, "again")
        refused = tx.updates.get(lease.id)
    assert (refused.state, refused.reason, refused.weight) == ("refused", "x" * 500, 0.0)
    before = contents(ledger)
    with suppress(RuntimeError), ledger.write() as tx:
        assert not tx.publish(0, 0, OTHERS, None, [update], NOW)
    assert contents(ledger) == before


def test_a_merged_update_is_not_refused_any_more(ledger: Ledger):
    with ledger.write() as tx:
        update = submit(tx, claim(tx, 10))
        tx.publish(0, 0, OTHERS, None, [update], NOW)
        assert not tx.updates.refuse(update.lease, "too late")
        assert not tx.updates.live()


def test_a_lease_has_one_update(ledger: Ledger):
    with ledger.write() as tx:
        lease = claim(tx, 10)
        submit(tx, lease)
    with pytest.raises(sql.exc.IntegrityError), ledger.write() as tx:
        submit(tx, lease)


def test_a_merge_is_announced_by_one_until_its_time_is_over(ledger: Ledger):
    def announce(now: float) -> bool:
        with ledger.write() as tx:
            return tx.blocks.claim_merge(0, 0, now, 100.0)

    assert sum(at_once([lambda: announce(NOW)] * 4)) == 1
    assert not announce(NOW + 100)
    assert announce(NOW + 100.1)
    with ledger.write() as tx:
        assert tx.blocks.claim_merge(1, 0, NOW, 100.0)
        assert not tx.blocks.claim_merge(1, 1, NOW + 1000, 100.0)


def test_a_published_version_leaves_the_block_free_to_merge(ledger: Ledger):
    with ledger.write() as tx:
        update = submit(tx, claim(tx, 10))
        assert tx.blocks.claim_merge(0, 0, NOW, 100.0)
        assert tx.publish(0, 0, OTHERS, None, [update], NOW)
        assert tx.blocks.claim_merge(0, 1, NOW + 1, 100.0)


def test_versions_are_forgotten_one_by_one(ledger: Ledger):
    with ledger.write() as tx:
        tx.publish(0, 0, OTHERS, None, [submit(tx, claim(tx, 10))], NOW)
        tx.versions.forget(0, 0)
        assert sorted((v.block, v.version) for v in tx.versions.all()) == [(0, 1), (1, 0)]
        assert tx.versions.get(0).version == 1
        assert tx.versions.get(1).weights == WEIGHTS


# The state of the blocks


def test_block_states_tell_who_does_what(ledger: Ledger):
    with ledger.write() as tx:
        trains, sends = claim(tx, 10, worker="w0"), claim(tx, 20, worker="w1")
        waits, gave_up = claim(tx, 30, worker="w2"), claim(tx, 40, worker="w3")
        tx.leases.move(sends.id, "sending")
        pending = submit(tx, waits, NOW + 5)
        tx.leases.move(gave_up.id, "returned")
        tx.blocks.give_back_range(0, gave_up.first_batch, gave_up.steps)
        state, other = tx.blocks.states()
    assert (state.index, state.version, state.merged_batches) == (0, 0, 0)
    assert (state.next_batch, state.total_batches) == (100, 600)
    assert (state.returned_batches, state.leased_batches, state.open_leases) == (40, 30, 2)
    assert state.workers == {trains.worker, "w1", "w2"}
    assert state.finishing == {"w1", "w2"}
    assert state.pending == (pending,)
    assert (other.index, other.to_hand_out, other.workers) == (1, 600, frozenset())


def test_a_block_is_busy_until_the_last_of_those_who_train_it_is_expected(ledger: Ledger):
    with ledger.write() as tx:
        unknown, first, last, sends = (claim(tx, 10, worker=f"w{n}") for n in range(4))
        assert tx.blocks.states()[0].busy_until == -math.inf
        for lease, at in ((first, NOW + 10), (last, NOW + 20), (sends, NOW + 30)):
            tx.leases.set_expected(lease.id, at)
        tx.leases.move(sends.id, "sending")
        assert tx.blocks.states()[0].busy_until == NOW + 20
        tx.leases.set_expected(unknown.id, NOW + 25)
        state, other = tx.blocks.states()
    assert (state.busy_until, other.busy_until) == (NOW + 25, -math.inf)


def test_an_update_of_an_older_version_is_not_finishing(ledger: Ledger):
    with ledger.write() as tx:
        first, late = claim(tx, 10, worker="w0"), claim(tx, 10, worker="w1")
        tx.publish(0, 0, OTHERS, None, [submit(tx, first)], NOW)
        submit(tx, late)
        state = tx.blocks.states()[0]
    assert state.workers == {"w1"}
    assert state.finishing == frozenset()


def test_block_states_add_up_whatever_happens(ledger: Ledger):
    draws = random.Random(1)
    held: list[Any] = []
    waiting: list[PendingUpdate] = []
    version = 0
    for _ in range(120):
        with ledger.write() as tx:
            act = draws.choice(["claim", "claim", "claim", "return", "submit", "merge", "refuse"])
            if act == "claim" and tx.blocks.states()[0].to_hand_out:
                held.append(claim(tx, draws.randint(1, 60), base=version))
            elif act == "return" and held:
                lease = held.pop(draws.randrange(len(held)))
                tx.leases.move(lease.id, "expired")
                tx.blocks.give_back_range(0, lease.first_batch, lease.steps)
            elif act == "submit" and held:
                waiting.append(submit(tx, held.pop(draws.randrange(len(held)))))
            elif act == "merge" and waiting:
                assert tx.publish(0, version, WEIGHTS, None, waiting, NOW)
                version, waiting = version + 1, []
            elif act == "refuse" and waiting:
                lease = tx.leases.get(waiting.pop().lease)
                tx.updates.refuse(lease.id, "")
                tx.blocks.give_back_range(0, lease.first_batch, lease.steps)
            state = tx.blocks.states()[0]
        assert state.under_way + state.to_hand_out == state.total_batches
        assert state.leased_batches == sum(lease.steps for lease in held)
        assert (state.version, state.open_leases) == (version, len(held))
        assert {update.lease for update in state.pending} == {update.lease for update in waiting}
        assert state.finished == (not state.to_hand_out and not held and not waiting)
    assert version > 5


# Members, events, scores


def test_an_invite_has_its_number_of_uses_however_many_ask_at_once(ledger: Ledger):
    with ledger.write() as tx:
        tx.members.add_invite(INVITE)

    def use() -> bool:
        with ledger.write() as tx:
            return tx.members.use_invite("i")

    assert sum(at_once([use] * 6)) == 3
    with ledger.read() as tx:
        assert tx.members.invite("h").uses_left == 0
        assert tx.members.invite("another") is None


def test_a_worker_is_lost_while_nothing_is_heard_after_its_lease_expired(ledger: Ledger):
    with ledger.write() as tx:
        lease = claim(tx, 10)
        assert tx.members.lost_workers() == set()
        tx.leases.move(lease.id, "expired")
        assert tx.members.lost_workers() == {"w0"}
        tx.members.touch_worker("w0", lease.deadline + 1)
        assert tx.members.lost_workers() == set()


def test_workers_of_an_invite_are_those_that_are_not_banned(ledger: Ledger):
    with ledger.write() as tx:
        for number in range(2):
            worker = tx.members.worker(f"w{number}")
            joined = dataclasses.replace(
                worker, id=f"v{number}", public_key=f"v{number}", invite="i"
            )
            tx.members.add_worker(joined)
        tx.members.ban_worker("v0")
        tx.members.rename_worker("v1", "another name", "cuda")
        (worker,) = tx.members.workers_of_invite("i")
    assert (worker.id, worker.name, worker.device) == ("v1", "another name", "cuda")


def test_leases_met_and_missed_are_counted(ledger: Ledger):
    with ledger.write() as tx:
        for met in (True, True, False):
            tx.blocks.count_lease(1, met=met)
        row = tx.blocks.get(1)
    assert (row.leases_met, row.leases_missed) == (2, 1)


def test_events_come_in_order_after_a_number(ledger: Ledger):
    with ledger.read() as tx:
        assert tx.events.last_number() == 0
    for number in range(5):
        with ledger.write() as tx:
            tx.events.add(NOW + number, "leased", "worker00", 1, f"event {number}" + "x" * 600)
    with ledger.read() as tx:
        found = tx.events.after(0, 100)
        assert [event.time for event in found] == [NOW + number for number in range(5)]
        assert {len(event.detail) for event in found} == {500}
        assert [event.number for event in found] == sorted({event.number for event in found})
        assert tx.events.after(found[1].number, 2) == found[2:4]
        assert tx.events.last_number() == found[-1].number
        assert tx.events.after(tx.events.last_number(), 100) == []


def test_the_newest_score_of_a_block_or_of_the_model(ledger: Ledger):
    def score(tx: Transaction, block: int | None, ce: float) -> None:
        result = Score(block=block, versions=(1, 2), split="valid", windows="windows0", ce=ce)
        tx.events.add_score(result, "w0", NOW)

    with ledger.write() as tx:
        assert tx.events.newest_score(None) is None
        for block, ce in [(0, 3.0), (None, 2.0), (0, 2.5), (None, 1.5)]:
            score(tx, block, ce)
        assert tx.events.newest_score(0).ce == 2.5
        assert tx.events.newest_score(1) is None
        assert (tx.events.newest_score(None).ce, tx.events.newest_score(None).versions) == (
            1.5,
            "[1, 2]",
        )


def test_a_run_finishes_once(ledger: Ledger):
    with ledger.write() as tx:
        assert tx.finish_run(NOW + 1)
        assert not tx.finish_run(NOW + 2)
        assert tx.run().finished == NOW + 1


def test_ban_and_revoke_tell_whether_there_was_one(ledger: Ledger):
    with ledger.write() as tx:
        assert tx.members.ban_worker("w0") and not tx.members.ban_worker("w9")
        tx.members.add_invite(INVITE)
        assert tx.members.revoke_invite("i") and not tx.members.revoke_invite("j")
        assert tx.members.worker("w0").banned and tx.members.invite("h").revoked
        assert [worker.id for worker in tx.members.workers()] == [
            f"w{number}" for number in range(8)
        ]
        assert tx.members.worker_of_key("key 3").id == "w3"


def test_blobs_that_are_forgotten_stay_until_their_time_is_over(ledger: Ledger):
    first, second = WEIGHTS.name, OTHERS.name
    with ledger.write() as tx:
        tx.versions.retire_blobs([first, second], NOW, NOW + 60)
        tx.versions.retire_blobs([second], NOW + 10, NOW + 70)  # it was used and forgotten again
        tx.versions.retire_blobs([], NOW, NOW)
        assert tx.versions.end_retired(NOW + 59) == {}
        assert tx.versions.end_retired(NOW + 60) == {first: NOW}
        assert tx.versions.retired_blobs() == {second}
    with ledger.write() as tx:
        assert tx.versions.end_retired(NOW + 70) == {second: NOW + 10}
        assert tx.versions.retired_blobs() == set()


# The database


def test_a_change_happens_whole_or_not_at_all(ledger: Ledger):
    def interrupted() -> None:
        with ledger.write() as tx:
            claim(tx, 10)
            tx.events.add(NOW, "leased")
            raise KeyboardInterrupt

    before = contents(ledger)
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert contents(ledger) == before


def test_opening_at_the_same_time_is_fine(url: str):
    for opened in at_once([lambda: Ledger(url)] * 6):
        with opened.read() as tx:
            assert tx.run() is None
        opened.close()


OPEN = "import sys; from blocktrain.ledger.ledger import Ledger; Ledger(sys.argv[1]).close()"


def test_several_processes_may_open_a_new_ledger(url: str):
    started = [subprocess.Popen([sys.executable, "-c", OPEN, url]) for _ in range(3)]
    assert [process.wait(60) for process in started] == [0, 0, 0]


def test_a_second_opening_finds_what_the_first_wrote(ledger: Ledger, url: str):
    with ledger.write() as tx:
        claim(tx, 10)
    again = Ledger(url)
    assert contents(again) == contents(ledger)
    again.close()


def test_sqlite_writes_ahead_and_syncs_every_transaction(tmp_path: Path):
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    pragmas = {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 30_000}
    with ledger.read(), ledger.engine.connect().execution_options(read=True) as second:
        for name, value in pragmas.items():
            assert second.exec_driver_sql(f"PRAGMA {name}").scalar() == value, name
    ledger.close()


@pytest.mark.skipif(os.name == "nt", reason="there are no such permissions")
def test_a_new_sqlite_ledger_is_for_its_owner_alone(tmp_path: Path):
    """The run's authority and what its tokens are made with are in it."""
    folder, before = tmp_path / "new", os.umask(0)
    try:
        ledger = Ledger(f"sqlite:///{folder / 'ledger.db'}")
    finally:
        os.umask(before)
    with ledger.write() as tx:
        tx.events.add(NOW, "leased")
        modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    ledger.close()
    assert modes == dict.fromkeys(("ledger.db", "ledger.db-wal", "ledger.db-shm"), 0o600)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_postgresql_looks_things_up_while_tables_are_small():
    """Its plans are kept, and would read all of them when they are large."""
    ledger = Ledger(fresh_database())
    with ledger.engine.connect() as connection:
        connection.exec_driver_sql("ANALYZE")  # it knows that they are empty
        plan = connection.execute(
            sql.text(f"EXPLAIN {LeaseTable.ALL_ACTIVE.compile(ledger.engine)}")
        )
        steps = " ".join(plan.scalars())
    ledger.close()
    assert "leases_by_" in steps and "Seq Scan" not in steps


def test_readers_do_not_wait_for_a_writer(ledger: Ledger):
    with ledger.write() as tx:
        claim(tx, 10)
        with ledger.read() as other:
            assert other.blocks.states()[0].next_batch == 0


def test_an_url_of_no_database_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError):
        Ledger("no url")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UnreachableError, match="folder"):
        Ledger(f"sqlite:///{tmp_path / 'folder'}")


def test_a_password_stays_out_of_messages():
    with pytest.raises(UnreachableError) as raised:
        Ledger("postgresql://me:hidden@127.0.0.1:1/run?connect_timeout=2")
    assert "127.0.0.1:1" in str(raised.value)
    assert "hidden" not in str(raised.value)


# Killed at any instant

MANY_TRANSACTIONS = """
import sys
from tests.unit.ledger.test_ledger import NOW, claim, submit
from blocktrain.protocol.messages import Blob
from blocktrain.protocol.status_messages import Moved
from blocktrain.ledger.ledger import Ledger

ledger = Ledger(sys.argv[1])
for number in range(100_000):
    with ledger.write() as tx:
        lease = claim(tx, 1, block=number % 2)
        tx.events.add(NOW, "leased", None, lease.block, lease.id)
        update = submit(tx, lease)
        version = tx.blocks.get(lease.block).version
        assert tx.publish(lease.block, version, Blob(name="c" * 64, size=1), None, [update], NOW)
        if sys.argv[2] == "half" and number == 5:
            print("half", flush=True)
            sys.stdin.read()
    print(lease.id, flush=True)
"""


def killed(url: str, manner: str, lines: int) -> list[str]:
    """Start the above and kill it -9 after so many lines; those that came out."""
    child = subprocess.Popen(
        [sys.executable, "-c", MANY_TRANSACTIONS, url, manner],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    with child:
        assert child.stdout is not None
        told = [next(child.stdout).strip() for _ in range(lines)]
        child.kill()
        told += [line.strip() for line in child.stdout if line.endswith("\n")]
    assert child.returncode == -9
    return told


def check_consistent(ledger: Ledger, committed: list[str]) -> int:
    """Nothing half done; what was told to be done is; how many transactions there were."""
    with ledger.read() as tx:
        states = tx.blocks.states()
        made = [event.detail for event in tx.events.after(0, 10_000)]
        worker = tx.members.worker("w0")
        for state in states:
            block, version = tx.blocks.get(state.index), tx.versions.get(state.index)
            assert block.fence == block.version == version.version == state.merged_batches
            assert block.next_batch == version.merged_batches
            assert not (state.pending or state.open_leases or state.returned_batches)
        assert all(tx.updates.get(lease).state == "merged" for lease in made)
    assert len(made) == sum(state.version for state in states) == worker.updates_merged
    assert committed == made[: len(committed)]
    assert len(made) <= len(committed) + 1
    return len(made)


@pytest.mark.skipif(sys.platform == "win32", reason="kill -9 is a POSIX thing")
def test_kill_9_among_many_transactions_leaves_a_consistent_ledger(ledger: Ledger, url: str):
    told = killed(url, "many", 20)
    assert check_consistent(ledger, told) >= 20
    if url.startswith("sqlite"):
        with ledger.engine.connect() as connection:
            assert connection.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"
            assert not connection.exec_driver_sql("PRAGMA foreign_key_check").all()


@pytest.mark.skipif(sys.platform == "win32", reason="kill -9 is a POSIX thing")
def test_kill_9_inside_a_transaction_leaves_nothing_of_it(ledger: Ledger, url: str):
    told = killed(url, "half", 6)
    assert told[5:] == ["half"]
    assert check_consistent(ledger, told[:5]) == 5
    with ledger.write() as tx:
        assert claim(tx, 1).fence == tx.blocks.get(0).version + 1


def test_a_driver_that_is_not_installed_is_named_by_its_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)  # as where it was never installed
    with pytest.raises(ConfigError, match=r"pip install 'blocktrain\[postgres\]'"):
        Ledger("postgresql://me:hidden@127.0.0.1:1/run")
