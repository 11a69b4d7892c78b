import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.fault_server import Fault, FaultServer
from tests.support.turned_clock import TurnedClock
from tests.support.worker_side import KEY, RUN, WORKER, described, joined

from blocktrain.errors import ProtocolError, RefusedError, UnreachableError
from blocktrain.protocol.identity import update_text
from blocktrain.protocol.messages import (
    CHUNK_BYTES,
    Blob,
    Hello,
    Message,
    Receipt,
    Recipe,
    UpdateClaim,
    UpdateOffer,
    UploadState,
    split_whole_update,
)
from blocktrain.worker.client import Client
from blocktrain.worker.machine import Bandwidth, Deadline
from blocktrain.worker.transfer import BlobCache, Transfer

LARGE = np.random.default_rng(0).bytes(2 * CHUNK_BYTES + 1000)  # three chunks
SMALL = LARGE[:1000]
PENDING = Receipt(state="pending", weight=1.0)


@pytest.fixture
def transfer(client: Client, tmp_path: Path) -> Transfer:
    client.join("name", "cpu")
    return new_transfer(client, tmp_path)


def new_transfer(
    client: Client, folder: Path, rate: float | None = None, **options: Any
) -> Transfer:
    cache = BlobCache(folder / "chunks")
    return Transfer(client, cache, Bandwidth(rate, client.clock), **options)


def deadline(transfer: Transfer, seconds: float = 20.0) -> Deadline:
    return transfer.client.deadline(seconds)


def chunk_requests(server: FaultServer) -> list[str]:
    return server.lines("GET /v1/chunks/")


# Down


def test_a_blob_arrives_and_stays(server: FaultServer, transfer: Transfer):
    blob = server.hold(LARGE)
    assert transfer.read(blob, deadline(transfer)) == LARGE
    assert transfer.cache.has(blob)
    assert len(chunk_requests(server)) == 3
    assert transfer.bandwidth.bytes_down == len(LARGE)
    assert transfer.read(blob, deadline(transfer)) == LARGE
    assert len(server.lines("GET /v1/blobs")) == 1


def test_a_cut_chunk_goes_on_where_it_was_cut(server: FaultServer, transfer: Transfer):
    blob = server.hold(LARGE[:CHUNK_BYTES])
    server.faults = [Fault("GET /v1/chunks", cut_after=5_000_000)]
    assert transfer.read(blob, deadline(transfer)) == LARGE[:CHUNK_BYTES]
    spans = [s.headers.get("Range") for s in server.seen if s.line.startswith("GET /v1/chunks")]
    assert spans[0] is None
    start = int(str(spans[1]).removeprefix("bytes=").removesuffix("-"))
    assert 4_000_000 < start <= 5_000_000
    assert transfer.bandwidth.bytes_down == CHUNK_BYTES


def test_every_connection_is_cut_and_still_it_arrives(server: FaultServer, transfer: Transfer):
    blob = server.hold(LARGE)
    server.faults = [Fault("GET /v1/chunks", cut_after=3_000_000, times=6)]
    assert transfer.read(blob, deadline(transfer)) == LARGE
    assert transfer.bandwidth.bytes_down == len(LARGE)


def test_a_download_starts_over_if_the_server_ignores_ranges(
    server: FaultServer, transfer: Transfer
):
    blob = server.hold(SMALL)
    server.faults = [
        Fault("GET /v1/chunks", cut_after=500),
        Fault("GET /v1/chunks", status=200, body=SMALL),
    ]
    assert transfer.read(blob, deadline(transfer)) == SMALL
    assert transfer.bandwidth.bytes_down == 1500


def test_a_damaged_chunk_is_fetched_again(server: FaultServer, transfer: Transfer):
    blob = server.hold(SMALL)
    server.faults = [Fault("GET /v1/chunks", damaged=True)]
    assert transfer.read(blob, deadline(transfer)) == SMALL
    server.faults = [Fault("GET /v1/chunks", damaged=True, times=99)]
    other = server.hold(SMALL[1:])
    with pytest.raises(UnreachableError, match="arrived damaged"):
        transfer.read(other, deadline(transfer, 0.1))
    assert not transfer.cache.has(other)


def test_another_recipe_than_the_named_one_is_refused(server: FaultServer, transfer: Transfer):
    blob, other = server.hold(SMALL), server.hold(LARGE)
    server.chunks[blob.name] = server.chunks[other.name]
    with pytest.raises(ProtocolError, match="does not match"):
        transfer.fetch(blob, deadline(transfer))
    with pytest.raises(ProtocolError, match="does not match"):
        transfer.fetch(Blob(name=other.name, size=7), deadline(transfer))
    assert not chunk_requests(server)


def test_more_bytes_than_a_chunk_has_are_refused(server: FaultServer, transfer: Transfer):
    blob = server.hold(SMALL)
    server.faults = [Fault("GET /v1/chunks", status=200, body=LARGE[:CHUNK_BYTES])]
    with pytest.raises(ProtocolError, match="limit of 1000 bytes"):
        transfer.fetch(blob, deadline(transfer))
    assert transfer.bandwidth.bytes_down < CHUNK_BYTES


def test_a_missing_blob_is_refused_at_once(server: FaultServer, transfer: Transfer):
    with pytest.raises(RefusedError) as caught:
        transfer.fetch(Blob(name="ab" * 32, size=1), deadline(transfer))
    assert caught.value.code == "not_found"


def test_a_chunk_that_went_bad_on_disk_is_fetched_again(
    server: FaultServer, transfer: Transfer, tmp_path: Path
):
    blob = server.hold(SMALL)
    transfer.fetch(blob, deadline(transfer))
    for path in (tmp_path / "chunks").glob("??/*"):
        path.write_bytes(b"bad")
    assert transfer.read(blob, deadline(transfer)) == SMALL
    data = next(iter(transfer.cache.recipe(blob.name).chunks))
    (tmp_path / "chunks" / data[:2] / data[2:]).write_bytes(b"bad")
    assert transfer.read(blob, deadline(transfer)) == SMALL


def test_a_file_goes_on_with_the_chunks_it_lacks(
    server: FaultServer, client: Client, tmp_path: Path
):
    transfer = new_transfer(client, tmp_path, threads=1)
    blob, path = server.hold(LARGE), tmp_path / "folder" / "text.bin"
    path.parent.mkdir()
    first, second, last = Recipe.model_validate_json(server.chunks[blob.name]).chunks
    server.faults = [Fault(f"GET /v1/chunks/{second}", status=404, times=9)]
    with pytest.raises(RefusedError):
        transfer.fetch_file(blob, path, deadline(transfer))
    assert not path.exists()
    server.faults = []
    transfer.fetch_file(blob, path, deadline(transfer))
    assert path.read_bytes() == LARGE
    asked = [line.rpartition("/")[2] for line in chunk_requests(server)]
    assert asked == [first, second, second, last]
    assert [entry.name for entry in path.parent.iterdir()] == ["text.bin"]


def test_an_empty_blob_needs_no_chunks(server: FaultServer, transfer: Transfer, tmp_path: Path):
    blob = server.hold(b"")
    assert transfer.read(blob, deadline(transfer)) == b""
    transfer.fetch_file(blob, tmp_path / "empty", deadline(transfer))
    assert (tmp_path / "empty").read_bytes() == b""


def test_memory_does_not_grow_with_the_blob(server: FaultServer, client: Client, tmp_path: Path):
    transfer = new_transfer(client, tmp_path, threads=1)
    blob = server.hold(LARGE + LARGE[::-1] + LARGE[1000:])  # seven chunks
    tracemalloc.start()
    try:
        transfer.fetch_file(blob, tmp_path / "file", deadline(transfer))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "file").stat().st_size == blob.size > 6 * CHUNK_BYTES
    assert peak < 4 * CHUNK_BYTES


def test_a_download_that_is_no_longer_wanted_ends_within_a_chunk(
    server: FaultServer, client: Client, tmp_path: Path
):
    client.join("name", "cpu")
    transfer = new_transfer(client, tmp_path, rate=500_000.0)
    blob = server.hold(LARGE)
    began = time.monotonic()
    patience = client.deadline(60.0, lambda: time.monotonic() < began + 0.3)
    with pytest.raises(UnreachableError, match="no longer wanted"):
        transfer.fetch(blob, patience)
    assert time.monotonic() - began < 3.0


def test_the_bandwidth_limit_holds(server: FaultServer, client: Client, tmp_path: Path):
    client.join("name", "cpu")
    transfer = new_transfer(client, tmp_path, rate=40e6)
    blob = server.hold(LARGE)
    began = time.monotonic()
    transfer.fetch(blob, deadline(transfer))
    assert time.monotonic() - began >= len(LARGE) / 40e6 - 0.25  # the burst


def test_the_cache_forgets_what_is_not_needed(server: FaultServer, transfer: Transfer):
    kept, dropped = server.hold(SMALL), server.hold(SMALL[1:])
    for blob in (kept, dropped):
        transfer.fetch(blob, deadline(transfer))
    transfer.cache.keep_only([kept, Blob(name="ab" * 32, size=1)])
    assert transfer.cache.has(kept) and not transfer.cache.has(dropped)
    assert len(list(transfer.cache.chunks.stored())) == 2


# Links


@pytest.fixture
def store() -> Iterator[FaultServer]:
    store = FaultServer()
    yield store
    store.close()


def test_presigned_urls_are_used_without_credentials(
    server: FaultServer, store: FaultServer, transfer: Transfer
):
    blob = store.hold(LARGE)
    server.chunks[blob.name] = store.chunks[blob.name]  # the recipe alone
    server.urls = {name: f"{store.address}/bucket/{name}" for name in store.chunks}
    store.faults = [Fault("GET /bucket", cut_after=5_000_000)]
    assert transfer.read(blob, deadline(transfer)) == LARGE
    assert not chunk_requests(server)
    assert transfer.bandwidth.bytes_down == len(LARGE)
    assert all("Authorization" not in seen.headers for seen in store.seen)


def test_after_a_refused_url_the_coordinator_is_used(
    server: FaultServer, store: FaultServer, transfer: Transfer
):
    blob = server.hold(SMALL)
    server.urls = {name: f"{store.address}/bucket/{name}?signature" for name in server.chunks}
    store.faults = [Fault("GET /bucket", status=403, body=b"<Error>expired</Error>")]
    assert transfer.read(blob, deadline(transfer)) == SMALL
    assert len(store.seen) == 1
    assert len(chunk_requests(server)) == 1


def test_an_old_url_that_is_refused_is_renewed(
    server: FaultServer, store: FaultServer, new_client: Callable[..., Client], tmp_path: Path
):
    turned = TurnedClock()
    client = new_client(clock=turned.clock)
    transfer = new_transfer(client, tmp_path)
    blob = server.hold(SMALL)
    store.chunks = dict(server.chunks)
    server.urls = {name: f"{store.address}/old/{name}" for name in server.chunks}

    def expired(body: bytes) -> Message:
        turned.now += 3600.0
        server.urls = {name: f"{store.address}/new/{name}" for name in server.chunks}
        raise RefusedError("forbidden", "expired")

    store.on("GET /old/.*", expired)
    assert transfer.read(blob, client.deadline(1e5)) == SMALL
    assert [line.split("/")[1] for line in store.lines()] == ["old", "new"]
    assert not chunk_requests(server)


def test_an_unreachable_store_is_left_alone(
    server: FaultServer, transfer: Transfer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("blocktrain.worker.transfer.URL_SECONDS", 0.3)
    gone = FaultServer()
    gone.close()
    blob = server.hold(LARGE)
    server.urls = {name: f"{gone.address}/{name}" for name in server.chunks}
    assert transfer.read(blob, deadline(transfer)) == LARGE
    assert len(chunk_requests(server)) == 3
    began = time.monotonic()
    assert transfer.read(server.hold(SMALL), deadline(transfer)) == SMALL
    assert time.monotonic() - began < 0.3


# Up


def offered(transfer: Transfer, data: bytes) -> UpdateOffer:
    blob = transfer.cache.write([data])
    claim = UpdateClaim(
        run=RUN, worker=WORKER, lease="lease000", fence=1, block=0, base_version=0,
        codec="none", recipe=transfer.cache.recipe(blob.name), loss=1.5,
    )  # fmt: skip
    return UpdateOffer(claim=claim, signature=KEY.sign(update_text(claim)))


def takes_updates(server: FaultServer) -> None:
    wanted: list[str] = []

    def missing() -> tuple[str, ...]:
        return tuple(name for name in wanted if name not in server.chunks)

    def offered(body: bytes) -> UploadState:
        wanted[:] = UpdateOffer.model_validate_json(body).claim.recipe.chunks
        return UploadState(missing=missing(), urls=server.urls)

    def commit(body: bytes) -> Message:
        if missing():
            raise RefusedError("conflict", f"{len(missing())} chunks are missing")
        return PENDING

    server.on("POST /v1/updates", offered)
    server.on("POST /v1/updates/lease000/commit", commit)


def test_an_update_goes_up_and_only_what_is_missing(server: FaultServer, transfer: Transfer):
    takes_updates(server)
    offer = offered(transfer, LARGE)
    held = offer.claim.recipe.chunks[0]
    server.chunks[held] = LARGE[:CHUNK_BYTES]
    stages: list[str] = []
    assert transfer.send(offer, deadline(transfer), stages.append) == PENDING
    assert stages == ["offered", "committing"]
    assert set(offer.claim.recipe.chunks) <= set(server.chunks)
    puts = server.lines("PUT ")
    assert len(puts) == 2
    assert all(line.endswith("?lease=lease000") for line in puts)
    assert transfer.bandwidth.bytes_up == len(LARGE) - CHUNK_BYTES
    assert server.lines("POST /v1/updates") == [
        "POST /v1/updates", "POST /v1/updates/lease000/commit"
    ]  # fmt: skip


def test_an_upload_survives_failures(server: FaultServer, transfer: Transfer):
    takes_updates(server)
    offer = offered(transfer, LARGE)
    server.faults = [
        Fault("POST /v1/updates", status=503),
        Fault("PUT ", status=503, times=2),
        Fault("POST /v1/updates/lease000/commit", cut_after=3),
    ]
    assert transfer.send(offer, deadline(transfer)) == PENDING
    assert set(offer.claim.recipe.chunks) <= set(server.chunks)


def test_lost_chunks_are_sent_again(server: FaultServer, transfer: Transfer):
    takes_updates(server)
    offer = offered(transfer, SMALL)
    server.faults = [Fault("PUT ", status=204)]  # taken and forgotten
    assert transfer.send(offer, deadline(transfer)) == PENDING
    assert len(server.lines("PUT ")) == 2


def test_a_commit_that_finds_chunks_missing_leads_to_another_round(
    server: FaultServer, transfer: Transfer
):
    takes_updates(server)
    offer = offered(transfer, SMALL)

    def lose(body: bytes) -> Message:
        server.chunks.clear()
        server.on("POST /v1/updates/lease000/commit", lambda body: PENDING)
        raise RefusedError("conflict", "1 chunks are missing")

    server.on("POST /v1/updates/lease000/commit", lose)
    assert transfer.send(offer, deadline(transfer)) == PENDING
    assert len(server.lines("PUT ")) == 2


def test_a_store_that_keeps_losing_chunks_is_an_error(server: FaultServer, transfer: Transfer):
    takes_updates(server)
    server.faults = [Fault("PUT ", status=204, times=99)]
    with pytest.raises(ProtocolError, match="still lacks"):
        transfer.send(offered(transfer, SMALL), deadline(transfer))


def test_a_refused_update_is_sent_no_further(server: FaultServer, transfer: Transfer):
    takes_updates(server)

    def refuse(body: bytes) -> Message:
        raise RefusedError("conflict", "another update was offered for this lease")

    server.on("POST /v1/updates", refuse)
    with pytest.raises(RefusedError, match="another update"):
        transfer.send(offered(transfer, SMALL), deadline(transfer))
    takes_updates(server)
    server.faults = [Fault("PUT ", status=403, times=99)]
    with pytest.raises(RefusedError):
        transfer.send(offered(transfer, LARGE), deadline(transfer))
    assert len(server.lines("PUT ")) <= 3


def test_only_chunks_of_the_update_are_sent(server: FaultServer, transfer: Transfer):
    foreign = transfer.cache.chunks.put(b"secret")
    server.on("POST /v1/updates", lambda body: UploadState(missing=(foreign,)))
    with pytest.raises(ProtocolError, match="does not have"):
        transfer.send(offered(transfer, SMALL), deadline(transfer))
    assert not server.lines("PUT ")


def test_chunks_are_sent_to_presigned_urls(
    server: FaultServer, store: FaultServer, transfer: Transfer
):
    takes_updates(server)
    offer = offered(transfer, SMALL)
    server.chunks = store.chunks
    server.urls = {name: f"{store.address}/q/{name}" for name in offer.claim.recipe.chunks}
    assert transfer.send(offer, deadline(transfer)) == PENDING
    assert not server.lines("PUT ")
    sent = store.seen[0].headers
    assert sent["Content-Length"] == "1000"
    assert "Authorization" not in sent and "Transfer-Encoding" not in sent


# Small updates, in one request


def takes_whole(server: FaultServer, transfer: Transfer) -> list[bytes]:
    """A run that takes updates of up to 1,000 bytes so; what it got."""
    server.on("GET /v1/hello", lambda body: Hello(run=RUN, protocols=(1,)))
    description = described(whole_bytes=1000)
    server.on("POST /v1/join", lambda body: joined(description=description))
    got: list[bytes] = []

    def take(body: bytes) -> Message:
        got.append(bytes(split_whole_update(body)[1]))
        return PENDING

    server.on("POST /v1/updates/whole", take)
    transfer.client.join("tester", "cpu")
    return got


def test_a_small_update_goes_up_with_its_offer(server: FaultServer, transfer: Transfer):
    got = takes_whole(server, transfer)
    stages: list[str] = []
    assert transfer.send(offered(transfer, SMALL), deadline(transfer), stages.append) == PENDING
    assert stages == ["committing", "offered"]
    assert got == [SMALL]
    assert server.lines("POST /v1/updates") == ["POST /v1/updates/whole"]
    assert transfer.bandwidth.bytes_up == len(SMALL)
    sent = server.seen[-1].headers
    assert sent["Authorization"] == "Bearer token1"
    assert "Transfer-Encoding" not in sent


def test_a_larger_one_goes_up_in_chunks(server: FaultServer, transfer: Transfer):
    got = takes_whole(server, transfer)
    takes_updates(server)
    assert transfer.send(offered(transfer, SMALL + b"x"), deadline(transfer)) == PENDING
    assert not got
    assert len(server.lines("PUT ")) == 1


def test_a_small_update_survives_failures(server: FaultServer, transfer: Transfer):
    got = takes_whole(server, transfer)
    server.faults = [
        Fault("POST /v1/updates/whole", status=503),
        Fault("POST /v1/updates/whole", cut_after=3),
    ]
    assert transfer.send(offered(transfer, SMALL), deadline(transfer)) == PENDING
    assert got == [SMALL] * 2  # once its answer was cut
    assert len(server.lines("POST /v1/updates/whole")) == 3


def test_a_refused_small_update_is_not_sent_again(server: FaultServer, transfer: Transfer):
    takes_whole(server, transfer)

    def refuse(body: bytes) -> Message:
        raise RefusedError("conflict", "another update was offered for this lease")

    server.on("POST /v1/updates/whole", refuse)
    with pytest.raises(RefusedError, match="another update"):
        transfer.send(offered(transfer, SMALL), deadline(transfer))
    assert len(server.lines("POST /v1/updates/whole")) == 1
