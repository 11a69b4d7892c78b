"""What a hostile coordinator can do to a worker: waste its time, and nothing else."""

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from pydantic import ValidationError
from tests.support.fault_server import Fault, FaultServer
from tests.support.worker_side import described, joined

from blocktrain.codec.dense import Int8
from blocktrain.codec.frames import UpdateDecoder, encode
from blocktrain.config import Config, from_toml
from blocktrain.errors import BlocktrainError, ConfigError, ProtocolError, RunError
from blocktrain.protocol.messages import Blob, Lease, Recipe, RunDescription, Token, Wait
from blocktrain.storage.tensor_file import decode
from blocktrain.worker import address_book, http
from blocktrain.worker import transfer as transfers
from blocktrain.worker.address_book import is_private
from blocktrain.worker.client import MOST_ANSWER_BYTES, Client
from blocktrain.worker.downloads import most_bytes, open_tokenizer
from blocktrain.worker.transfer import BlobCache, Transfer

LARGE = 1 << 52


@pytest.fixture
def transfer(client: Client, tmp_path: Path) -> Transfer:
    return Transfer(client, BlobCache(tmp_path / "chunks"))


def resolved(*addresses: str) -> Callable[..., list[tuple[object, ...]]]:
    return lambda *arguments, **more: [(0, 0, 0, "", (each, 0)) for each in addresses]


# Sizes


def test_no_answer_is_longer_than_it_can_be(client: Client, server: FaultServer):
    text = json.dumps({"pad": "x" * MOST_ANSWER_BYTES}).encode()
    server.faults = [Fault("GET /v1/run", 200, body=text)]
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        client.run()


def test_no_answer_is_unpacked(client: Client, server: FaultServer):
    """A worker asks for no compression: a gigabyte of zeros stays the megabyte that was sent."""
    packed = gzip.compress(bytes(1 << 26))
    headers = {"Content-Encoding": "gzip"}
    server.faults = [Fault("GET /v1/run", 200, headers=headers, body=packed)]
    with pytest.raises(ProtocolError, match="is invalid"):
        client.run()
    assert server.seen[-1].headers["Accept-Encoding"] == "identity"


def test_a_blob_that_no_file_of_the_run_can_be_is_not_asked_for(
    transfer: Transfer, server: FaultServer, config: Config
):
    transfer.most_bytes = most_bytes(config)
    for get in (transfer.fetch, transfer.read):
        with pytest.raises(ProtocolError, match="no file of this run has more"):
            get(Blob(name="a" * 64, size=LARGE), transfer.client.deadline())
    assert not server.lines("GET")


def test_a_recipe_of_another_size_than_announced_is_refused_before_memory_is_taken(
    transfer: Transfer, server: FaultServer
):
    blob = server.hold(b"some weights")
    with pytest.raises(ProtocolError, match="does not match"):
        transfer.read(blob.model_copy(update={"size": LARGE}), transfer.client.deadline())


def test_a_worker_keeps_part_of_its_disk_for_others(
    transfer: Transfer, server: FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    blob, total = server.hold(bytes(10_000)), 100 << 30
    usage = SimpleNamespace(total=total, free=transfers.RESERVED_BYTES + 9_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    limited = Transfer(transfer.client, BlobCache(tmp_path / "other"))
    deadline = transfer.client.deadline()
    with pytest.raises(RunError, match="reserved for other files"):
        limited.fetch(blob, deadline)
    with pytest.raises(RunError, match="has room for 9,000 bytes, but the run's text has 10,000"):
        limited.fetch_file(blob, tmp_path / "text", deadline)
    usage.free += 100_000
    limited.fetch(blob, deadline)
    limited.fetch_file(blob, tmp_path / "text", deadline)


@pytest.mark.parametrize("count", [1 << 40, 3, 0])
def test_an_encoding_that_announces_other_counts_is_refused(count: int):
    """The count of numbers comes from the block, never from the bytes."""
    data = b"".join(encode(np.ones(5, np.float32), Int8()))
    data = data[:-8] + count.to_bytes(8, "little")
    with pytest.raises(ProtocolError):
        list(UpdateDecoder(lambda at, n: data[at : at + n], len(data), 5).frames())


def test_a_weights_file_that_announces_more_than_it_has_is_refused():
    header = b'{"a":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}'
    with pytest.raises(BlocktrainError):
        decode(memoryview(len(header).to_bytes(8, "little") + header + bytes(16)))
    with pytest.raises(BlocktrainError):
        decode(memoryview((1 << 60).to_bytes(8, "little") + header))


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"version":"1.0","model":{"type":"BPE","vocab":{"a":4294967295},"merges":[]}}',
        b'{"version":"1.0","model":{"type":"BPE","vocab":{"a":0},"merges":["a b"]}}',
        b'{"version":"1.0","added_tokens":[{"id":4294967295,"content":"x"}],"model":{}}',
    ],
)
def test_a_tokenizer_that_is_none_is_refused(
    transfer: Transfer, server: FaultServer, config: Config, text: bytes
):
    named = config.with_settings(vocab__sha256="0" * 64, vocab__size=512)
    run = described(tokenizer={"tokenizer.json": server.hold(text)})
    with pytest.raises(ProtocolError, match="tokenizer"):
        open_tokenizer(run, named, transfer, transfer.client.deadline())


# Paths


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a" * 63, "A" * 64, "a" * 65])
def test_names_are_hashes_and_never_paths(name: str):
    with pytest.raises(ValidationError):
        Blob(name=name, size=1)
    with pytest.raises(ValidationError):
        Recipe(size=1, chunks=(name,))


@pytest.mark.parametrize("name", ["../x", "/x", ".", "..", ".hidden", "a/b", "a\\b", ""])
def test_files_of_a_tokenizer_have_plain_names(name: str):
    fields = described().model_dump()
    fields["tokenizer"] = {name: Blob(name="a" * 64, size=1).model_dump()}
    with pytest.raises(ValidationError):
        RunDescription.model_validate(fields)


@pytest.mark.parametrize("run", ["../../home", "a" * 7, "a" * 65, "run.0001", "RUN00001"])
def test_a_runs_folder_has_a_plain_name(run: str):
    with pytest.raises(ValidationError):
        RunDescription.model_validate({**described().model_dump(), "run": run})


def test_a_token_cannot_add_a_header():
    for text in ("a\r\nx: y", "a b", "", "ä", "a" * 2000):
        with pytest.raises(ValidationError):
            Token(token=text, token_seconds=1)
    assert Token(token=joined().token, token_seconds=1)


# Addresses


@pytest.mark.parametrize(
    ("address", "private"),
    [("127.0.0.1", True), ("10.0.0.1", True), ("169.254.169.254", True), ("::1", True),
     ("::ffff:192.168.1.1", True), ("fe80::1%eth0", True), ("100.64.0.1", True), ("0.0.0.0", True),
     ("93.184.216.34", False), ("2606:2800:220:1:248:1893:25c8:1946", False)],
)  # fmt: skip
def test_private_addresses_are_told_from_public_ones(address: str, private: bool):
    assert is_private("http://name/x", resolved(address)) == private
    both = resolved("93.184.216.34", address)
    assert is_private("http://name/x", both) == private
    host = f"[{address}]" if ":" in address and "%" not in address else address
    if "%" not in address:
        assert is_private(f"http://{host}/x") == private


def test_a_public_coordinator_sends_a_worker_to_no_private_address(
    transfer: Transfer, server: FaultServer, monkeypatch: pytest.MonkeyPatch
):
    """Nothing is requested from a presigned URL inside of the worker's network."""
    blob = server.hold(b"some weights")
    name = next(name for name in server.chunks if name != blob.name)
    server.urls = {name: f"{server.address}/admin/reboot"}
    for module in (http, address_book):
        monkeypatch.setattr(module, "is_private", lambda url: "admin" in url)
    assert bytes(transfer.read(blob, transfer.client.deadline())) == b"some weights"
    assert not server.lines("GET /admin")
    assert server.lines(f"GET /v1/chunks/{name}")


# Waits and settings


def test_settings_that_are_nested_without_end_are_refused():
    with pytest.raises(ConfigError, match="nested"):
        from_toml("a = " + "[" * 100_000)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf")])
def test_a_wait_has_an_end(seconds: float):
    with pytest.raises(ValidationError):
        Wait(seconds=seconds, reason="wait")


@pytest.mark.parametrize("field", ["steps", "fence", "first_batch", "schedule_start"])
def test_numbers_of_a_lease_are_bounded(field: str, lease_fields: dict[str, object]):
    with pytest.raises(ValidationError):
        Lease.model_validate({**lease_fields, field: 2**60})


@pytest.fixture
def lease_fields() -> dict[str, object]:
    return {
        "lease": "lease001", "fence": 1, "block": 0, "base_version": 0,
        "base": Blob(name="a" * 64, size=1), "first_batch": 0, "steps": 1, "schedule_start": 0,
        "schedule_stride": 1, "seconds_left": 1.0,
    }  # fmt: skip
