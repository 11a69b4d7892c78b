"""A worker follows differences, from a real coordinator, to the very bits of a version."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.coordinator import INVITE_SECONDS, Member, SetClock, join, served, tensors_of
from tests.support.frugal import frugal, make_version
from tests.support.worker_side import KEY, SHORT_TIMEOUT, Eager

from blocktrain.coordinator.service import Service
from blocktrain.errors import UnreachableError
from blocktrain.protocol.invite import Invite
from blocktrain.protocol.messages import MOST_DOWNLOADS, Blob, Differences, Downloaded
from blocktrain.storage import tensor_file
from blocktrain.worker.client import Client
from blocktrain.worker.downloads import LocalVersions
from blocktrain.worker.transfer import BlobCache, Transfer


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def service(tmp_path: Path, clock: SetClock) -> Iterator[Service]:
    (tmp_path / "run").mkdir()
    with frugal(tmp_path / "run", clock, swarm__keep_versions=1) as service:
        yield service


@pytest.fixture
def member(service: Service) -> Member:
    return join(service)


@pytest.fixture
def transfer(service: Service, tmp_path: Path) -> Iterator[Transfer]:
    secret = service.operator.invite("train", 1, INVITE_SECONDS)
    with served(service) as address:
        invite = Invite((address,), secret, None, service.run.id)
        client = Client(invite, KEY, timeout=SHORT_TIMEOUT, random=Eager())
        cache = BlobCache(tmp_path / "chunks")
        yield Transfer(client, cache)
        client.close()


@pytest.fixture
def astray() -> list[str]:
    """What was told of differences that led elsewhere."""
    return []


@pytest.fixture
def new_versions(
    transfer: Transfer, tmp_path: Path, astray: list[str]
) -> Callable[[], LocalVersions]:
    return lambda: LocalVersions(transfer, tmp_path / "worker", "sparse", astray.append)


@pytest.fixture
def versions(new_versions: Callable[[], LocalVersions]) -> LocalVersions:
    return new_versions()


def newest(service: Service) -> tuple[int, Blob]:
    with service.run.ledger.read() as tx:
        current = tx.versions.get(0)
    return current.version, current.weights


def had(service: Service, versions: LocalVersions, transfer: Transfer) -> Downloaded:
    """Have the newest version; what was moved for it."""
    version, weights = newest(service)
    data = versions.read(0, version, weights, transfer.client.deadline())
    assert (
        tensor_file.decode(data)["w"].tobytes() == tensors_of(service.run, weights)["w"].tobytes()
    )
    (moved,) = versions.take_downloads()
    assert versions.take_downloads() == ()
    return moved


def test_the_first_version_is_downloaded_whole_and_later_ones_by_deltas(
    service: Service, member: Member, versions: LocalVersions, transfer: Transfer
):
    size = newest(service)[1].size
    assert had(service, versions, transfer) == Downloaded(
        block=0, whole=size, differences=0, raw=size
    )
    for made in (1, 3, 9):
        for _ in range(made):
            make_version(service, member)
        moved = had(service, versions, transfer)
        assert (moved.whole, moved.raw) == (0, size)
        assert 0 < moved.differences < made * size / 100


def test_a_cached_version_costs_nothing(
    service: Service, versions: LocalVersions, transfer: Transfer
):
    had(service, versions, transfer)
    versions.fetch(0, *newest(service), transfer.client.deadline())
    assert versions.take_downloads() == ()


def test_a_version_downloaded_in_two_tries_counts_once(
    service: Service, versions: LocalVersions, transfer: Transfer, monkeypatch: pytest.MonkeyPatch
):
    def cut(*arguments: object) -> None:
        raise UnreachableError("the line is gone")

    with monkeypatch.context() as cut_short:
        cut_short.setattr(transfer, "read", cut)
        with pytest.raises(UnreachableError):
            had(service, versions, transfer)
    size = newest(service)[1].size
    assert had(service, versions, transfer) == Downloaded(
        block=0, whole=size, differences=0, raw=size
    )


def test_downloads_that_could_not_be_reported_are_reported_later(
    service: Service, member: Member, versions: LocalVersions, transfer: Transfer
):
    whole = had(service, versions, transfer)
    versions.put_back([whole])
    make_version(service, member)
    both = had(service, versions, transfer)
    assert (both.whole, both.raw) == (whole.whole, 2 * whole.raw)
    assert both.differences > 0


def test_downloads_that_exceed_a_message_are_reported_with_the_next(versions: LocalVersions):
    for block in reversed(range(MOST_DOWNLOADS + 3)):
        versions.put_back([Downloaded(block=block, whole=block, differences=0, raw=0)])
    told = [versions.take_downloads() for _ in range(3)]
    assert [len(each) for each in told] == [MOST_DOWNLOADS, 3, 0]
    assert all(each.whole == each.block for part in told for each in part)


def test_a_restarted_worker_continues_with_deltas(
    service: Service,
    member: Member,
    versions: LocalVersions,
    transfer: Transfer,
    new_versions: Callable[[], LocalVersions],
):
    had(service, versions, transfer)
    make_version(service, member)
    again = new_versions()
    assert again.cached({0, 1}) == versions.cached({0}) and not again.cached({1})
    assert had(service, again, transfer).whole == 0


@pytest.mark.parametrize("trouble", ["dropped", "damaged", "unread", "forgotten"])
def test_a_version_is_downloaded_whole_if_deltas_do_not_work(
    service: Service,
    member: Member,
    versions: LocalVersions,
    transfer: Transfer,
    new_versions: Callable[[], LocalVersions],
    astray: list[str],
    tmp_path: Path,
    trouble: str,
):
    had(service, versions, transfer)
    (base,) = versions.cached({0})
    make_version(service, member)
    if trouble == "dropped":
        transfer.cache.keep_only([])
    if trouble == "damaged":
        for name in transfer.cache.chunks_of(base.name) - {base.name}:
            (path,) = (tmp_path / "chunks").rglob(f"*{name[2:]}")
            path.write_bytes(b"\0" * path.stat().st_size)
    if trouble == "unread":
        (tmp_path / "worker" / "versions.json").write_text("{")
        versions = new_versions()
    if trouble == "forgotten":
        with service.run.ledger.write() as tx:
            tx.versions.forget_delta(0, 1)
    moved = had(service, versions, transfer)
    assert moved.whole == moved.raw == newest(service)[1].size
    assert not astray


@pytest.mark.parametrize("kind", ["twice", "short", "long", "other"])
def test_deltas_that_give_other_weights_or_are_larger_are_not_used(
    service: Service,
    member: Member,
    versions: LocalVersions,
    transfer: Transfer,
    monkeypatch: pytest.MonkeyPatch,
    astray: list[str],
    kind: str,
):
    had(service, versions, transfer)
    for _ in range(2):
        make_version(service, member)
    right = service.reports.differences(0, 0, 2).differences
    whole = newest(service)[1]
    wrong = {
        "twice": (right[0], right[0]),
        "short": right[:1],
        "long": (*right, whole),
        "other": (transfer.cache.write([b"no difference"]),),
    }[kind]
    told = Differences(differences=wrong)
    monkeypatch.setattr(service.reports, "differences", lambda *_: told)
    moved = had(service, versions, transfer)
    assert moved.whole == whole.size
    assert (moved.differences == 0) == (kind in ("long", "other"))
    led_elsewhere = "block 0: the deltas from version 0 to 2 gave wrong weights"
    assert [text.split(";")[0] for text in astray] == (
        [led_elsewhere] if kind in ("twice", "short") else []
    )
