"""Joining, tokens, and who is not welcome, on a real run."""

import pytest
from tests.support.coordinator import (
    Member,
    SetClock,
    join,
    join_message,
    put_chunk,
)

from blocktrain.coordinator.members import CLOCK_SKEW, TOKEN_SECONDS, Caller
from blocktrain.coordinator.service import Service
from blocktrain.errors import RefusedError
from blocktrain.protocol import identity
from blocktrain.protocol.identity import WorkerKey, join_text, token_request_text
from blocktrain.protocol.messages import LeaseProgress, LeaseRequest, TokenRequest


def kinds(service: Service) -> list[str]:
    return [event.kind for event in service.reports.events(0, 100)]


def token_request(member: Member, time: float, signed_by: WorkerKey | None = None) -> TokenRequest:
    key = signed_by or member.signer.key
    return TokenRequest(
        worker=member.id,
        time=int(time),
        signature=key.sign(token_request_text(member.signer.run, member.id, int(time))),
    )


# Joining


def test_joining_gives_an_id_a_token_and_the_run(service: Service):
    member = join(service, name="Ann's box")
    assert member.joined.role == "train"
    assert member.joined.token_seconds == TOKEN_SECONDS
    assert member.joined.description == service.run.description
    assert service.members.caller(member.joined.token) == Caller(member.id, "train")
    event = service.reports.events(0, 100)[0]
    assert (event.kind, event.worker, event.detail) == ("joined", member.id, "Ann's box, cpu")


def test_the_invite_says_the_role(service: Service):
    assert join(service, "evaluate").joined.role == "evaluate"


def test_an_invite_is_used_up(service: Service):
    secret = service.operator.invite("train", 2, 60)
    for _ in range(2):
        service.members.join(join_message(service.run.id, secret, WorkerKey.create()))
    with pytest.raises(RefusedError, match="no uses left") as refused:
        service.members.join(join_message(service.run.id, secret, WorkerKey.create()))
    assert refused.value.code == "gone"
    assert kinds(service) == ["joined", "joined"]


def test_an_invite_expires(service: Service, clock: SetClock):
    secret = service.operator.invite("train", 5, 60)
    clock.forward(60)
    service.members.join(join_message(service.run.id, secret, WorkerKey.create()))
    clock.forward(0.1)
    for call in (
        lambda: service.members.join(join_message(service.run.id, secret, WorkerKey.create())),
        lambda: service.members.check_reader(secret),
    ):
        with pytest.raises(RefusedError, match="expired") as refused:
            call()
        assert refused.value.code == "gone"


def test_an_invite_is_revoked(service: Service):
    secret = service.operator.invite("train", 5, 60)
    service.members.check_reader(secret)
    (invite,) = service.operator.invites()
    service.operator.revoke(invite.invite)
    with pytest.raises(RefusedError, match="revoked") as refused:
        service.members.join(join_message(service.run.id, secret, WorkerKey.create()))
    assert refused.value.code == "gone"
    with pytest.raises(RefusedError, match="revoked"):
        service.members.check_reader(secret)
    assert service.operator.invites()[0].revoked
    with pytest.raises(RefusedError) as unknown:
        service.operator.revoke("no invite")
    assert unknown.value.code == "not_found"
    assert "`blocktrain invite list`" in str(unknown.value)


def test_an_unknown_invite_is_refused(service: Service):
    with pytest.raises(RefusedError, match="for another run") as refused:
        service.members.join(join_message(service.run.id, "c2VjcmV0", WorkerKey.create()))
    assert refused.value.code == "unauthorized"


def test_a_worker_that_comes_back_keeps_its_id_and_costs_no_use(service: Service, clock: SetClock):
    key, secret = WorkerKey.create(), service.operator.invite("train", 1, 60)
    first = service.members.join(join_message(service.run.id, secret, key))
    clock.forward(30)
    again = service.members.join(join_message(service.run.id, secret, key, "new name"))
    assert (again.worker, again.role) == (first.worker, first.role)
    assert service.members.caller(again.token).worker == first.worker
    assert service.operator.invites()[0].uses_left == 0
    assert kinds(service) == ["joined"]
    (known,) = service.reports.status().workers
    assert (known.seconds_since_seen, known.name) == (0, "new name")


def test_a_worker_that_comes_back_keeps_its_role(service: Service):
    member = join(service, "train")
    secret = service.operator.invite("evaluate", 1, 60)
    assert (
        service.members.join(join_message(service.run.id, secret, member.signer.key)).role
        == "train"
    )


def test_a_worker_of_another_protocol_is_told(service: Service):
    secret = service.operator.invite("train", 1, 60)
    message = join_message(service.run.id, secret, WorkerKey.create()).model_copy(
        update={"protocols": (2, 3)}
    )
    with pytest.raises(RefusedError, match="protocol 1") as refused:
        service.members.join(message)
    assert refused.value.code == "conflict"
    assert service.operator.invites()[0].uses_left == 1


# Tokens


def test_a_token_ends_and_is_renewed_by_the_key(service: Service, clock: SetClock):
    member = join(service)
    clock.forward(TOKEN_SECONDS - 1)
    service.members.caller(member.joined.token)
    clock.forward(1)
    with pytest.raises(RefusedError, match="expired") as refused:
        service.members.caller(member.joined.token)
    assert refused.value.code == "unauthorized"
    token = service.members.renew(token_request(member, clock.now))
    assert token.token_seconds == TOKEN_SECONDS
    assert service.members.caller(token.token) == member.caller


def test_a_token_of_another_run_is_refused(service: Service, clock: SetClock):
    foreign = identity.issue(b"another secret", join(service).id, "train", clock.now, 60)
    for token in (foreign, "", "x", "a.b"):
        with pytest.raises(RefusedError) as refused:
            service.members.caller(token)
        assert refused.value.code == "unauthorized"


def test_a_token_request_is_of_now(service: Service, clock: SetClock):
    """One that somebody wrote down is worth nothing five minutes later."""
    member = join(service)
    written_down = token_request(member, clock.now)
    service.members.renew(written_down)
    clock.forward(CLOCK_SKEW + 1)
    with pytest.raises(RefusedError, match="clock is more than") as refused:
        service.members.renew(written_down)
    assert refused.value.code == "unauthorized"
    with pytest.raises(RefusedError, match="clock is more than"):
        service.members.renew(token_request(member, clock.now + CLOCK_SKEW + 2))


def test_a_token_request_is_signed_by_the_workers_own_key(service: Service, clock: SetClock):
    member, other = join(service), join(service)
    good = token_request(member, clock.now)
    for bad in (
        token_request(member, clock.now, signed_by=other.signer.key),
        good.model_copy(update={"time": good.time + 1}),
        good.model_copy(update={"worker": other.id}),
        good.model_copy(update={"worker": "nobody00"}),
    ):
        with pytest.raises(RefusedError, match="signature is wrong") as refused:
            service.members.renew(bad)
        assert refused.value.code == "unauthorized"


# Bans


def test_a_banned_worker_gets_no_further(service: Service, clock: SetClock):
    member = join(service)
    lease = member.lease()
    made = member.make(lease)
    service.updates.record_offer(member.caller, made.offer)
    ((name, data),) = made.chunks.items()
    service.operator.ban(member.id)
    progress = LeaseProgress(fence=lease.fence, steps_done=1)
    for call in (
        member.ask,
        lambda: service.leases.progress(member.caller, lease.lease, progress),
        lambda: service.updates.record_offer(member.caller, made.offer),
        lambda: put_chunk(service, member.caller, lease.lease, name, data),
        lambda: service.members.renew(token_request(member, clock.now)),
        lambda: service.members.join(
            join_message(service.run.id, service.operator.invite("train", 1, 60), member.signer.key)
        ),
    ):
        with pytest.raises(RefusedError, match="banned") as refused:
            call()
        assert refused.value.code == "forbidden"


def test_a_good_token_of_an_unknown_worker_opens_nothing(service: Service, clock: SetClock):
    """Say, of a ledger that was restored from before the worker joined."""
    token = identity.issue(service.run.token_secret, "nobody00", "train", clock.now, 60)
    with pytest.raises(RefusedError) as refused:
        service.leases.claim(service.members.caller(token), LeaseRequest())
    assert refused.value.code == "unauthorized"


def test_whoever_joins_must_hold_the_key(service: Service):
    secret = service.operator.invite("train", 5, 60)
    theirs, mine = WorkerKey.create(), WorkerKey.create()
    message = join_message(service.run.id, secret, theirs)
    stolen = message.model_copy(update={"signature": mine.sign(join_text(service.run.id, secret))})
    with pytest.raises(RefusedError, match="signature"):
        service.members.join(stolen)


# The operator


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
    assert "`blocktrain status INVITE`" in str(refused.value)
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
