"""Taking updates in: what is refused before a byte is sent, while sending, and at the end."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.coordinator import (
    Made,
    Member,
    SetClock,
    Weights,
    commit,
    first_weights,
    join,
    missing_chunks,
    put_chunk,
    running,
    tensors_of,
    weights_now,
)

from blocktrain.codec import Codec, frames
from blocktrain.codec.dense import Bf16, Int8
from blocktrain.codec.sparse import FINAL_UPDATE, Sparse
from blocktrain.coordinator.merger import COLLECT_SECONDS
from blocktrain.coordinator.service import Service
from blocktrain.coordinator.updates import Upload
from blocktrain.coordinator.verification import Finding
from blocktrain.errors import RefusedError
from blocktrain.protocol.identity import WorkerKey, update_text
from blocktrain.protocol.messages import (
    CHUNK_BYTES,
    Lease,
    LeaseReturn,
    Receipt,
    Recipe,
    UpdateOffer,
)
from blocktrain.storage.chunks import name_of
from blocktrain.storage.tensor_file import encode
from blocktrain.swarm.reputation import REFUSED


@pytest.fixture
def member(service: Service) -> Member:
    return join(service)


@pytest.fixture
def lease(member: Member) -> Lease:
    return member.lease(blocks=(0,))


def offer(member: Member, made: Made) -> tuple[str, ...]:
    return missing_chunks(member.service, member.caller, made.offer)


def put(member: Member, made: Made, name: str, data: bytes) -> None:
    put_chunk(member.service, member.caller, made.offer.claim.lease, name, data)


def committed(member: Member, lease: Lease) -> Receipt:
    return commit(member.service, member.caller, lease.lease)


def refusal(call: Callable[[], Any]) -> RefusedError:
    with pytest.raises(RefusedError) as refused:
        call()
    return refused.value


def update_row(service: Service, lease: Lease) -> Any:
    with service.run.ledger.read() as tx:
        return tx.updates.get(lease.lease)


def block_state(service: Service, block: int = 0) -> Any:
    with service.run.ledger.read() as tx:
        return tx.blocks.states()[block]


def last_event(service: Service) -> tuple[str, str]:
    event = service.reports.events(0, 1000)[-1]
    return event.kind, event.detail


def big_weights(block: int) -> dict[str, Any]:
    """Two chunks long."""
    return {"w": np.full(CHUNK_BYTES // 4 + 1000, block, np.float32)}


# Offers


def test_an_offer_is_answered_with_what_is_missing(service: Service, member: Member, lease: Lease):
    made = member.make(lease)
    assert offer(member, made) == tuple(made.chunks)
    row = update_row(service, lease)
    assert (row.state, row.worker, row.block, row.steps) == ("offered", member.id, 0, 10)
    assert row.loss == 1.5
    with service.run.ledger.read() as tx:
        assert tx.leases.get(lease.lease).state == "sending"


def test_an_offer_may_be_sent_again_to_learn_what_is_still_missing(tmp_path: Path, clock: SetClock):
    with running(tmp_path, clock, weights=[big_weights(0), big_weights(1)]) as service:
        member = join(service)
        lease = member.lease(blocks=(0,))
        made = member.make(lease, by=5.0)
        first, second = made.chunks
        assert offer(member, made) == (first, second)
        put(member, made, second, made.chunks[second])
        assert offer(member, made) == (first,)
        put(member, made, first, made.chunks[first])
        assert offer(member, made) == ()
        assert committed(member, lease).state == "pending"
        assert offer(member, made) == ()
        service.round()
        assert offer(member, made) == ()


def test_what_the_store_holds_already_is_not_asked_for(member: Member, lease: Lease):
    made = member.make(lease, by=0.0)
    assert offer(member, made) == ()
    assert committed(member, lease).state == "pending"


def test_a_chunk_that_stands_twice_in_a_recipe_is_asked_for_once(tmp_path: Path, clock: SetClock):
    size = 3 * CHUNK_BYTES // 4
    weights = {"w": np.zeros(size, np.float32)}
    with running(tmp_path, clock, weights=[weights, weights]) as service:
        member = join(service)
        lease = member.lease(blocks=(0,))
        made = member.signer.update(lease, {"w": np.full(size, 7, np.float32)})
        names = made.offer.claim.recipe.chunks
        assert len(names) > len(set(names))
        assert offer(member, made) == tuple(dict.fromkeys(names))
        assert member.send(made).state == "pending"


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"run": "another0"}, "forbidden", "another run"),
        ({"worker": "another0"}, "forbidden", "another worker"),
        ({"lease": "another0"}, "not_found", "no such lease"),
        ({"fence": 99}, "conflict", "fencing"),
        ({"block": 1}, "conflict", "its lease is for block 0 from version 0"),
        ({"base_version": 1}, "conflict", "its lease is for block 0 from version 0"),
    ],
)
def test_an_offer_that_is_not_the_leases_is_refused(
    service: Service, member: Member, lease: Lease, changes: dict[str, Any], code: str, words: str
):
    made = member.make(lease, **changes)
    refused = refusal(lambda: offer(member, made))
    assert refused.code == code
    assert words in str(refused)
    assert update_row(service, lease) is None


def test_an_offer_with_a_bad_signature_is_refused(service: Service, member: Member, lease: Lease):
    made = member.make(lease)
    claim = made.offer.claim
    forged = WorkerKey.create().sign(update_text(claim))
    changed = claim.model_copy(update={"loss": 0.1})
    for bad in (
        UpdateOffer(claim=claim, signature=forged),
        UpdateOffer(claim=claim, signature="AAAA"),
        UpdateOffer(claim=changed, signature=made.offer.signature),
    ):
        refused = refusal(lambda bad=bad: service.updates.record_offer(member.caller, bad))
        assert refused.code == "forbidden" and "signature" in str(refused)
    assert update_row(service, lease) is None


def test_an_offer_by_another_worker_is_refused(service: Service, member: Member, lease: Lease):
    other = join(service)
    stolen = member.make(lease).offer
    assert refusal(lambda: service.updates.record_offer(other.caller, stolen)).code == "forbidden"
    own = Made(other.make(lease).offer, {})
    assert refusal(lambda: offer(other, own)).code == "not_found"


@pytest.mark.parametrize(
    ("recipe", "code"),
    [
        (Recipe(size=10**9, chunks=("a" * 64,) * 120), "too_large"),
        (Recipe(size=8, chunks=("a" * 64,)), "malformed"),
        (Recipe(size=0, chunks=()), "malformed"),
    ],
)
def test_an_offer_of_another_size_is_refused_before_a_byte_is_sent(
    service: Service, member: Member, lease: Lease, recipe: Recipe, code: str
):
    assert refusal(lambda: offer(member, member.make(lease, recipe=recipe))).code == code
    assert update_row(service, lease) is None


@pytest.mark.parametrize("count", [0, 2])
def test_an_offer_with_another_number_of_chunks_is_refused(
    member: Member, lease: Lease, count: int
):
    recipe = Recipe(size=lease.base.size, chunks=("a" * 64,) * count)
    refused = refusal(lambda: offer(member, member.make(lease, recipe=recipe)))
    assert (refused.code, str(refused)) == (
        "malformed",
        f"the claim lists {count} chunks; for {lease.base.size} bytes it must list 1",
    )


def test_a_second_and_different_offer_is_refused(service: Service, member: Member, lease: Lease):
    first = member.make(lease, by=1.0)
    offer(member, first)
    refused = refusal(lambda: offer(member, member.make(lease, by=2.0)))
    assert refused.code == "conflict" and "another update" in str(refused)
    assert refusal(lambda: offer(member, member.make(lease, loss=0.1))).code == "conflict"
    assert member.send(first).state == "pending"
    assert refusal(lambda: offer(member, member.make(lease, by=2.0))).code == "conflict"


# Chunks


def test_only_what_was_offered_can_be_sent(service: Service, member: Member, lease: Lease):
    made = member.make(lease)
    ((name, data),) = made.chunks.items()
    assert refusal(lambda: put(member, made, name, data)).code == "not_found"
    offer(member, made)
    other = b"something else"
    refused = refusal(lambda: put(member, made, name_of(other), other))
    assert refused.code == "forbidden"
    assert service.run.chunks.has([name, name_of(other)]) == set()


def test_only_the_worker_that_offered_can_send(service: Service, member: Member, lease: Lease):
    made = member.make(lease)
    offer(member, made)
    ((name, data),) = made.chunks.items()
    other = join(service)
    assert refusal(lambda: put(other, made, name, data)).code == "not_found"
    assert refusal(lambda: committed(other, lease)).code == "not_found"


def test_bytes_must_have_their_hash(service: Service, member: Member, lease: Lease):
    made = member.make(lease)
    offer(member, made)
    ((name, data),) = made.chunks.items()
    for wrong in (b"", data[:-1], data + b"x", bytes(len(data)), bytes(CHUNK_BYTES)):
        assert refusal(lambda wrong=wrong: put(member, made, name, wrong)).code == "malformed"
    assert offer(member, made) == (name,)


def test_a_chunk_may_be_sent_again(member: Member, lease: Lease):
    made = member.make(lease)
    offer(member, made)
    ((name, data),) = made.chunks.items()
    put(member, made, name, data)
    put(member, made, name, data)
    assert committed(member, lease).state == "pending"


def test_nothing_is_sent_after_the_commit(service: Service, member: Member, lease: Lease):
    made = member.make(lease)
    member.send(made)
    ((name, data),) = made.chunks.items()
    refused = refusal(lambda: put(member, made, name, data))
    assert (refused.code, str(refused)) == ("conflict", "this update is pending already")
    service.round()
    assert "merged" in str(refusal(lambda: put(member, made, name, data)))


# Commits


def test_a_good_update_waits_to_be_merged(service: Service, member: Member, lease: Lease):
    receipt = member.send(member.make(lease))
    assert receipt == Receipt(state="pending", reason="", weight=1.0)
    assert last_event(service) == ("uploaded", f"10 steps (lease {lease.lease})")
    assert [update.lease for update in block_state(service).pending] == [lease.lease]


def test_a_commit_needs_an_offer_and_all_chunks(service: Service, member: Member, lease: Lease):
    assert refusal(lambda: committed(member, lease)).code == "not_found"
    made = member.make(lease)
    offer(member, made)
    refused = refusal(lambda: committed(member, lease))
    assert (refused.code, str(refused)) == (
        "conflict",
        "chunks of the update are missing (1); offer the update again",
    )
    assert update_row(service, lease).state == "offered"
    assert member.send(made).state == "pending"


def test_a_commit_may_be_sent_again(service: Service, member: Member, lease: Lease):
    first = member.send(member.make(lease))
    assert committed(member, lease) == first
    assert len(block_state(service).pending) == 1
    service.round()
    assert committed(member, lease) == Receipt(state="merged", weight=1.0)
    kinds = [event.kind for event in service.reports.events(0, 100)]
    assert kinds == ["joined", "leased", "uploaded", "merged"]


def not_finite(weights: dict[str, Any], value: float) -> dict[str, Any]:
    return {**weights, "scale": np.asarray(value, np.float32)}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda weights: not_finite(weights, np.nan), "NaN, infinite"),
        (lambda weights: not_finite(weights, -np.inf), "NaN, infinite"),
        (lambda weights: not_finite(weights, 3e38), "far too large"),
        (
            lambda weights: not_finite(weights, 1e5),
            "tensor 'scale' by 1e+05 (rms), but its steps can",
        ),
        (
            lambda weights: {**weights, "body.weight": weights["body.weight"].reshape(5, 4)},
            "F32[5, 4], not F32[4, 5]",
        ),
        (
            lambda weights: {**weights, "head.bias": np.zeros(3, np.int32)},
            "'head.bias' is I32; weights must be F32",
        ),
        (
            lambda weights: {
                ("tail.bias" if name == "head.bias" else name): tensor
                for name, tensor in weights.items()
            },
            "'head.bias' is missing",
        ),
    ],
    ids=["nan", "infinity", "overflow", "too far", "shape", "dtype", "name"],
)
def test_weights_of_another_form_or_not_finite_are_refused(
    service: Service, member: Member, lease: Lease, spoil: Any, words: str
):
    made = member.signer.update(lease, spoil(member.trained(lease)))
    receipt = member.send(made)
    assert (receipt.state, receipt.weight) == ("refused", 0.0)
    assert words in receipt.reason
    assert committed(member, lease) == receipt
    assert last_event(service) == ("refused", f"{receipt.reason} (lease {lease.lease})")
    state = block_state(service)
    assert (state.pending, state.to_hand_out) == ((), 40)
    assert service.merger.merge_due() == 0


@pytest.mark.parametrize(("is_possible", "suspicion"), [(True, 0.0), (False, REFUSED)])
def test_an_unusual_update_is_refused_but_held_against_nobody(
    service: Service, member: Member, lease: Lease, *, is_possible: bool, suspicion: float
):
    """Hostile workers may have made it unusual, by sending small ones."""
    service.updates.record_offer(member.caller, member.make(lease).offer)
    upload = service.updates.find_upload(member.caller, lease.lease)
    assert isinstance(upload, Upload)
    finding = Finding("it is larger than others", None, is_possible)
    assert service.updates.settle(member.caller, upload, finding).state == "refused"
    with service.run.ledger.read() as tx:
        row = tx.members.worker(member.id)
    assert row is not None
    assert (row.suspicion, row.refused) == (suspicion, 1)
    assert row.excluded_until is not None  # it pauses in any case


@pytest.mark.parametrize("data", [bytes, lambda size: b"\xff" * size, lambda size: b"{" * size])
def test_a_file_that_is_none_is_refused(
    service: Service, member: Member, lease: Lease, data: Callable[[int], bytes]
):
    receipt = member.send(member.signer.update_of_bytes(lease, data(lease.base.size)))
    assert receipt.state == "refused"
    assert block_state(service).to_hand_out == 40


def test_weights_that_are_not_canonical_are_refused(member: Member, lease: Lease):
    """Else equal weights could have two names."""
    data = b"".join(encode(member.trained(lease)))
    length = int.from_bytes(data[:8], "little")
    spaced = data[8 : 8 + length].rstrip(b" ")
    respelled = spaced.replace(b"[]", b"[ ]").ljust(length, b" ")
    assert len(respelled) == length
    receipt = member.send(
        member.signer.update_of_bytes(lease, data[:8] + respelled + data[8 + length :])
    )
    assert receipt.state == "refused"
    assert "sorted by name" in receipt.reason


def test_a_chunk_of_the_wrong_length_is_refused_at_the_end(member: Member, lease: Lease):
    """Its hash is right, its size is not what the recipe says."""
    short = b"short"
    recipe = Recipe(size=lease.base.size, chunks=(name_of(short),))
    made = Made(member.make(lease, recipe=recipe).offer, {name_of(short): short})
    assert member.send(made).state == "refused"


# Late ones


def advance(service: Service, by: Member, versions: int) -> None:
    """Merge so many updates of another worker into block 0."""
    for _ in range(versions):
        by.work(blocks=(0,), steps_per_second=0.05)
        service.merger.merge_due()


@pytest.fixture
def long_run(tmp_path: Path, clock: SetClock) -> Iterator[Service]:
    with running(tmp_path, clock, train__steps=400, swarm__most_stale=2) as service:
        yield service


@pytest.mark.parametrize(("behind", "weight"), [(1, 0.5), (2, 0.25)])
def test_a_late_update_counts_less(long_run: Service, behind: int, weight: float):
    late, quick = join(long_run), join(long_run)
    lease = late.lease(blocks=(0,))
    advance(long_run, quick, behind)
    assert late.send(late.make(lease)) == Receipt(state="pending", weight=weight)
    assert last_event(long_run) == ("late", f"10 steps (lease {lease.lease})")


def test_an_update_that_is_too_late_is_refused_and_says_why(long_run: Service):
    late, quick = join(long_run), join(long_run)
    lease = late.lease(blocks=(0,))
    advance(long_run, quick, 3)
    receipt = late.send(late.make(lease))
    assert receipt == Receipt(
        state="refused", reason="the update is 3 versions behind, more than 2; request a new lease"
    )
    again = late.lease(blocks=(0,))
    assert (again.first_batch, again.steps) == (lease.first_batch, lease.steps)
    assert again.base_version == 3


def test_an_update_after_the_deadline_counts_if_its_text_was_not_handed_out_again(
    service: Service, member: Member, lease: Lease, clock: SetClock
):
    made = member.make(lease)
    offer(member, made)
    clock.forward(121)
    service.leases.expire()
    assert block_state(service).to_hand_out == 40
    assert member.send(made) == Receipt(state="pending", weight=1.0)
    assert block_state(service).to_hand_out == 30
    service.round()
    assert block_state(service).merged_batches == 10


def test_an_update_after_the_deadline_is_refused_if_its_text_was_handed_out_again(
    service: Service, member: Member, lease: Lease, clock: SetClock
):
    clock.forward(121)
    service.leases.expire()
    taken = join(service).lease(blocks=(0,))
    assert taken.first_batch == lease.first_batch
    receipt = member.send(member.make(lease))
    assert receipt.state == "refused"
    assert receipt.reason.startswith("the lease is expired and its batches were handed out again;")
    state = block_state(service)
    assert (state.pending, state.leased_batches, state.to_hand_out) == ((), 10, 30)


def test_part_of_its_text_handed_out_again_is_enough_to_refuse(
    service: Service, member: Member, lease: Lease, clock: SetClock
):
    clock.forward(121)
    service.leases.expire()
    join(service).lease(blocks=(0,), steps_per_second=0.1)
    assert member.send(member.make(lease)).state == "refused"
    assert block_state(service).to_hand_out == 37


def test_a_lease_that_was_given_back_can_still_be_met(
    service: Service, member: Member, lease: Lease
):
    made = member.make(lease)
    returned = LeaseReturn(fence=lease.fence, reason="changed my mind")
    service.leases.give_back(member.caller, lease.lease, returned)
    assert member.send(made).state == "pending"
    assert block_state(service).to_hand_out == 30


def test_two_that_had_the_same_text_are_counted_once(
    service: Service, member: Member, lease: Lease, clock: SetClock
):
    """Both leases expired; the first to come counts."""
    clock.forward(121)
    service.leases.expire()
    other = join(service)
    second = other.lease(blocks=(0,))
    clock.forward(121)
    service.leases.expire()
    assert member.send(member.make(lease)).state == "pending"
    assert other.send(other.make(second)).state == "refused"
    state = block_state(service)
    assert state.under_way + state.to_hand_out == 40


def test_a_late_update_starts_from_the_version_it_was_trained_from(long_run: Service):
    late, quick = join(long_run), join(long_run)
    lease = late.lease(blocks=(0,))
    advance(long_run, quick, 1)
    late.send(late.make(lease, by=4.0))
    long_run.merger.merge_due()
    with long_run.run.ledger.read() as tx:
        merged = tensors_of(long_run.run, tx.versions.get(0).weights)
    for name, tensor in first_weights(0).items():
        np.testing.assert_allclose(merged[name], tensor + 1.0 + 0.5 * 4.0, rtol=1e-5)


# Encoded updates

FEW = Sparse(2)


@pytest.fixture
def frugal(tmp_path_factory: pytest.TempPathFactory, clock: SetClock) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("frugal")
    with running(folder, clock, swarm__codec="sparse", swarm__top_k_per_4096=2) as service:
        yield service


def encoded(member: Member, lease: Lease, delta: Any, by: Codec = FEW, **changes: Any) -> Made:
    data = b"".join(frames.encode(delta, by))
    return member.signer.update_of_bytes(lease, data, **{"codec": "sparse", **changes})


def test_an_encoded_update_is_verified_and_merged(frugal: Service):
    member = join(frugal)
    lease = member.lease(blocks=(0,))
    delta = np.zeros(24, np.float32)
    delta[[3, 20]] = (0.5, -0.25)
    assert member.send(encoded(member, lease, delta)).state == "pending"
    assert frugal.merger.merge_due() == 1
    before, after = first_weights(0), weights_now(frugal.run, 0)
    moved = np.concatenate([(after[n] - before[n]).reshape(-1) for n in sorted(before)])
    np.testing.assert_allclose(moved, delta, atol=1e-6)


def test_a_run_takes_updates_of_its_own_codec_alone(frugal: Service, service: Service):
    member = join(frugal)
    lease = member.lease()
    assert "codec sparse" in str(refusal(lambda: offer(member, member.make(lease))))
    other = join(service)
    bad = encoded(other, other.lease(), np.zeros(24, np.float32))
    assert "codec none" in str(refusal(lambda: offer(other, bad)))


def test_an_encoded_update_larger_than_any_is_refused_unread(frugal: Service):
    member = join(frugal)
    made = member.signer.update_of_bytes(member.lease(), bytes(5000), codec="sparse")
    assert refusal(lambda: offer(member, made)).code == "too_large"


@pytest.mark.parametrize("bad", ["of another length", "nonsense"])
def test_an_encoded_update_that_does_not_decode_is_refused(frugal: Service, bad: str):
    member = join(frugal)
    lease = member.lease(blocks=(0,))
    made = encoded(member, lease, np.zeros(23, np.float32))
    if bad == "nonsense":
        made = member.signer.update_of_bytes(lease, b"x" * 30, codec="sparse")
    assert member.send(made).state == "refused"
    assert block_state(frugal).to_hand_out == 40


@pytest.mark.parametrize(
    ("claimed", "by", "state"),
    [
        ("sparse", Sparse(FINAL_UPDATE * FEW.top_k), "pending"),
        ("sparse", Sparse(FINAL_UPDATE * FEW.top_k + 1), "refused"),
        ("sparse", Int8(), "refused"),
        ("bf16", Bf16(), "pending"),
        ("bf16", Int8(), "refused"),
        ("bf16", FEW, "refused"),
    ],
    ids=str,
)
def test_an_encoded_update_is_what_its_claim_says(
    tmp_path: Path, clock: SetClock, claimed: str, by: Codec, state: str
):
    """A worker's last words keep more than other updates do, and nothing keeps more than they."""
    with running(tmp_path, clock, swarm__codec=claimed, swarm__top_k_per_4096=FEW.top_k) as service:
        member = join(service)
        lease = member.lease(blocks=(0,))
        nothing = np.zeros(24, np.float32)
        receipt = member.send(encoded(member, lease, nothing, by, codec=claimed))
    assert receipt.state == state
    assert ("encoded by" in receipt.reason) == (state == "refused")


# How far training can have moved weights

SMALL_STEPS = {
    "train__lr": 4e-3,
    "train__lr_floor": 1.0,
    "train__warmup": 0,
    "train__weight_decay": 0.1,
}


def shuffled(weights: Weights) -> Weights:
    draws = np.random.default_rng(1)
    return {
        name: draws.normal(size=tensor.shape).astype(np.float32) * np.float32(np.std(tensor) or 1)
        for name, tensor in weights.items()
    }


UNTRAINED: dict[str, Callable[[Weights], Weights]] = {
    "random, as large as the base": shuffled,
    "negated": lambda weights: {name: -tensor for name, tensor in weights.items()},
    "zeros": lambda weights: {name: np.zeros_like(tensor) for name, tensor in weights.items()},
    "one tensor replaced": lambda weights: {**weights, "head.bias": -weights["head.bias"]},
    "one number replaced": lambda weights: {**weights, "scale": -weights["scale"]},
}


@pytest.mark.parametrize("spoil", UNTRAINED.values(), ids=[*UNTRAINED])
def test_weights_further_from_their_base_than_training_leads_are_refused(
    tmp_path: Path, clock: SetClock, spoil: Callable[[Weights], Weights]
):
    with running(tmp_path, clock, **SMALL_STEPS) as service:
        member = join(service)
        lease = member.lease(blocks=(0,))
        receipt = member.send(member.signer.update(lease, spoil(first_weights(0))))
        assert receipt.state == "refused"
        assert "the update moves tensor" in receipt.reason
        assert "its steps can move it by 0.0" in receipt.reason
        assert block_state(service).to_hand_out == 40


def test_weights_as_far_from_their_base_as_training_leads_are_taken(
    tmp_path: Path, clock: SetClock
):
    """Every step as long as it can be, and all in one direction, with the decay on top."""
    with running(tmp_path, clock, **SMALL_STEPS) as service:
        member = join(service)
        for _ in range(4):
            lease = member.lease(blocks=(0,))
            base = tensors_of(service.run, lease.base)
            trained = {
                name: np.asarray(tensor - 10 * 4e-3 * (np.sign(tensor) + 0.1 * tensor))
                for name, tensor in base.items()
            }
            receipt = member.send(member.signer.update(lease, trained))
            assert receipt.state == "pending", receipt
            service.round()


def test_an_update_that_changes_nothing_is_taken(tmp_path: Path, clock: SetClock):
    """At a learning rate of nothing, only what is rounded may differ."""
    with running(tmp_path, clock, train__lr=0.0) as service:
        for by, state in ((0.0, "pending"), (1e-5, "pending"), (1e-2, "refused")):
            member = join(service)
            lease = member.lease(blocks=(0,))
            assert member.send(member.make(lease, by=by)).state == state


def test_the_base_of_a_lease_is_there_to_compare_with_however_old_it_is(
    tmp_path: Path, clock: SetClock
):
    settings = {"train__steps": 400, "swarm__keep_versions": 1, "swarm__most_stale": 20}
    with running(tmp_path, clock, **settings) as service:
        late, other = join(service), join(service)
        lease, made = late.lease(blocks=(0,)), None
        for _ in range(6):
            other.work(blocks=(0,))
            service.round()
            made = made or late.make(lease)
            service.collector.collect()
        offer(late, made)
        clock.forward(0.9 * COLLECT_SECONDS)  # the lease is over, and what was offered still counts
        service.round()
        service.collector.collect()
        assert late.send(made).state == "pending"
