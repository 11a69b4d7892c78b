"""A worker that was started again asks a real coordinator what became of its last update."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.coordinator import INVITE_SECONDS, Made, Member, SetClock, Signer, served
from tests.support.frugal import NUMBERS, frugal, send_learned
from tests.support.worker_side import KEY, SHORT_TIMEOUT, Eager

from blocktrain.codec.frames import encode
from blocktrain.codec.sparse import Sparse
from blocktrain.coordinator.service import Service
from blocktrain.errors import UnreachableError
from blocktrain.protocol.invite import Invite
from blocktrain.protocol.messages import Lease
from blocktrain.worker.client import Client
from blocktrain.worker.local_block import ResidualFile, settle_leftover_residuals

OLD, NEW = np.full(5, 1.0, np.float32), np.full(5, 2.0, np.float32)
DROPPED = np.zeros(5, np.float32)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    (tmp_path / "run").mkdir()
    with frugal(tmp_path / "run", SetClock()) as service:
        yield service


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    secret = service.operator.invite("train", 1, INVITE_SECONDS)
    with served(service) as address:
        client = Client(
            Invite((address,), secret, None, service.run.id),
            KEY,
            timeout=SHORT_TIMEOUT,
            random=Eager(),
        )
        yield client
        client.close()


@pytest.fixture
def member(service: Service, client: Client) -> Member:
    """The same worker, before it was started again."""
    joined = client.join("tester", "cpu")
    return Member(service, Signer(service.run.id, joined.worker, KEY), joined)


def made(member: Member, lease: Lease) -> Made:
    data = b"".join(encode(np.ones(NUMBERS, np.float32), Sparse(32)))
    return member.signer.update_of_bytes(lease, data, codec="sparse")


def nothing_sent(member: Member, lease: Lease) -> None:
    pass


def offered(member: Member, lease: Lease) -> None:
    member.service.updates.record_offer(member.caller, made(member, lease).offer)


def sent(member: Member, lease: Lease) -> None:
    """All but the commit."""
    offered(member, lease)
    for name, data in made(member, lease).chunks.items():
        member.service.run.chunks.put(data, name)


def pending(member: Member, lease: Lease) -> None:
    assert send_learned(member, lease)[1] == "pending"


def merged(member: Member, lease: Lease) -> None:
    pending(member, lease)
    assert member.service.merger.merge_due() == 1


def refused(member: Member, lease: Lease) -> None:
    bad = member.signer.update_of_bytes(lease, b"x" * 200, codec="sparse")
    assert member.send(bad).state == "refused"


def banned(member: Member, lease: Lease) -> None:
    pending(member, lease)
    member.service.operator.ban(member.id)


@pytest.mark.parametrize(
    ("became", "owed"),
    [
        (nothing_sent, OLD), (offered, OLD), (refused, OLD),
        (sent, NEW), (pending, NEW), (merged, NEW),
        (banned, DROPPED),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_the_residual_follows_the_coordinators_answer(
    member: Member,
    client: Client,
    tmp_path: Path,
    became: Callable[[Member, Lease], None],
    owed: np.ndarray,
):
    lease = member.lease(blocks=(0,), steps_per_second=0.1)
    kept = with_an_update_on_its_way(tmp_path, lease)
    became(member, lease)
    settle_leftover_residuals(tmp_path, client.was_accepted)
    assert owed_now(kept).tolist() == owed.tolist()
    settle_leftover_residuals(tmp_path, client.was_accepted)
    assert owed_now(kept).tolist() == owed.tolist(), "asked once is enough"


def test_a_worker_that_is_stopped_without_an_answer_asks_again_the_next_time(
    member: Member, client: Client, tmp_path: Path
):
    lease = member.lease(blocks=(0,), steps_per_second=0.1)
    kept = with_an_update_on_its_way(tmp_path, lease)
    pending(member, lease)
    nobody = Client(
        Invite(("http://127.0.0.1:9",), "c2VjcmV0", None, client.invite.run), KEY, random=Eager()
    )
    stopped = nobody.deadline(wanted=lambda: False)
    with pytest.raises(UnreachableError):
        settle_leftover_residuals(tmp_path, lambda lease: nobody.was_accepted(lease, stopped))
    assert owed_now(kept).tolist() == OLD.tolist()
    settle_leftover_residuals(tmp_path, client.was_accepted)
    assert owed_now(kept).tolist() == NEW.tolist()


def with_an_update_on_its_way(folder: Path, lease: Lease) -> ResidualFile:
    kept = ResidualFile(folder, lease.block)
    for name, owed in (("lease000", OLD), (lease.lease, NEW)):
        with kept.proposal(name, owed.size) as owe:
            owe(owed)
        if owed is OLD:
            kept.settle(name, accepted=True)
    return kept


def owed_now(kept: ResidualFile) -> np.ndarray:
    zeros = np.zeros(5, np.float32)
    kept.add_to([zeros])
    return zeros
