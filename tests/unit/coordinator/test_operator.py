"""Invites and bans, on a real run."""

import pytest
from tests.support.coordinator import SetClock, join

from blocktrain.coordinator.service import Service
from blocktrain.errors import RefusedError


def kinds(service: Service) -> list[str]:
    return [event.kind for event in service.reports.events(0, 100)]


def test_invites_are_listed_without_their_secrets(service: Service, clock: SetClock):
    secret = service.operator.invite("evaluate", 3, 60)
    clock.forward(20)
    (state,) = service.operator.invites()
    assert (state.role, state.uses_left, state.revoked) == ("evaluate", 3, False)
    assert state.seconds_left == pytest.approx(40)
    assert secret not in repr(state)
    with service.run.ledger.read() as tx:
        assert secret not in repr(tx.members.invites())


def test_what_a_banned_worker_held_is_handed_out_again(service: Service):
    bad, good = join(service), join(service)
    lost = bad.lease(blocks=(0,))
    service.operator.ban(bad.id)
    lease = good.lease(blocks=(0,))
    assert (lease.first_batch, lease.steps) == (lost.first_batch, lost.steps)
    assert lease.fence > lost.fence


def test_what_a_banned_worker_sent_is_dropped_and_its_text_handed_out_again(service: Service):
    bad, good = join(service), join(service)
    merged = bad.work(blocks=(0,))
    service.round()
    dropped = bad.work(blocks=(0,))
    service.operator.ban(bad.id)
    assert service.merger.merge_due() == 0
    with service.run.ledger.read() as tx:
        states = {lease.lease: tx.updates.get(lease.lease) for lease in (merged, dropped)}
    assert states[merged.lease].state == "merged"  # what is merged stays merged
    assert states[dropped.lease].state == "refused"
    assert states[dropped.lease].reason == "the worker was banned"
    lease = good.lease(blocks=(0,))
    assert (lease.first_batch, lease.steps) == (dropped.first_batch, dropped.steps)
    assert kinds(service)[-2:] == ["banned", "leased"]


def test_all_who_joined_with_an_invite_are_banned_with_it(service: Service):
    open_to_all, of_friends = (service.operator.invite("train", 10, 60) for _ in range(2))
    strangers = [join(service, invite=open_to_all) for _ in range(3)]
    friend = join(service, invite=of_friends)
    lost = strangers[0].lease(blocks=(0,))
    service.operator.ban(strangers[1].id)
    named = service.operator.invite_of(open_to_all)
    assert named
    banned = service.operator.revoke(named.invite, ban=True)
    assert [worker.id for worker in banned] == [strangers[0].id, strangers[2].id]
    states = {worker.worker: worker.state for worker in service.reports.status().workers}
    assert states == {**{worker.id: "banned" for worker in strangers}, friend.id: "waiting"}
    assert friend.lease(blocks=(0,)).first_batch == lost.first_batch
    with pytest.raises(RefusedError, match="revoked"):
        join(service, invite=open_to_all)


def test_a_ban_is_of_a_worker_there_is(service: Service):
    with pytest.raises(RefusedError) as refused:
        service.operator.ban("nobody00")
    assert refused.value.code == "not_found"
    assert kinds(service) == []


def test_a_ban_finds_its_worker_by_name_or_by_how_its_id_begins(service: Service):
    one, two, twin = (join(service, name=name) for name in ("one", "two", "two"))
    with pytest.raises(RefusedError, match=f"{two.id} .two., {twin.id} .two.") as several:
        service.operator.ban("two")
    assert several.value.code == "conflict"
    with pytest.raises(RefusedError, match="no worker"):
        service.operator.ban("")
    assert kinds(service) == ["joined"] * 3
    assert service.operator.ban("one").id == one.id
    assert service.operator.ban(two.id[:12]).id == two.id
    states = {worker.worker: worker.state for worker in service.reports.status().workers}
    assert states == {one.id: "banned", two.id: "banned", twin.id: "waiting"}
