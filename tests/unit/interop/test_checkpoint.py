"""Models of the hub, downloaded from a real server."""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from tests.support.checkpoints import random_model, saved
from tests.support.hub_server import HubServer
from tests.support.web import serving, unused_address

from blocktrain.errors import DataError
from blocktrain.interop.checkpoint import open_checkpoint
from blocktrain.interop.importing import Import

NAME, COMMIT = "owner/model", "c0ffee" * 6 + "c0ff"


class ModelHub(HubServer):
    """Serves one repository."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(COMMIT)
        self.files = files
        self.broken = ""  # the name of a file that is listed but cannot be had

    @property
    def downloaded(self) -> list[str]:
        """The files that were downloaded."""
        got = [path for path in self.asked if path.startswith("GET ") and "/resolve/" in path]
        return [path.rpartition("/")[2] for path in got if not path.endswith(f"/{self.broken}")]

    def answer(self, path: str) -> bytes | None:
        api, tree = f"/api/models/{NAME}", f"/api/models/{NAME}/tree/{COMMIT}"
        if path == tree:
            entries = [
                {"type": "file", "path": k, "size": len(v), "oid": hashlib.sha1(v).hexdigest()}
                for k, v in self.files.items()
            ]
            return json.dumps(entries).encode()
        if path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
            siblings = [{"rfilename": name} for name in self.files]
            return json.dumps({"id": NAME, "sha": COMMIT, "siblings": siblings}).encode()
        name = path.removeprefix(f"/{NAME}/resolve/{COMMIT}/")
        return None if name == self.broken else self.files.get(name)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = saved(random_model("qwen2"), tmp_path_factory.mktemp("m"), max_shard_size="200KB")
    others = {"pytorch_model.bin": b"pickled", "consolidated.safetensors": b"the same again"}
    return {path.name: path.read_bytes() for path in folder.iterdir()} | others


@pytest.fixture
def hub(checkpoint: dict[str, bytes]) -> Iterator[ModelHub]:
    server = ModelHub(dict(checkpoint))
    with serving(server):
        yield server


@pytest.fixture
def nobody() -> str:
    return unused_address()


def test_only_what_is_needed_is_downloaded(hub: ModelHub, tmp_path: Path):
    opened = open_checkpoint(NAME, hub.endpoint)
    run = Import(opened, blocks=2).write(tmp_path / "run")
    assert sorted(hub.downloaded) == sorted(
        name for name in hub.files if name not in ("pytorch_model.bin", "consolidated.safetensors")
    )
    assert len([name for name in hub.downloaded if name.startswith("model-")]) > 1
    assert run.origin is not None
    assert (run.origin["source"], run.origin["revision"]) == (NAME, COMMIT)
    assert run.config.data.tokenizer == f"hf:{NAME}"


def test_a_download_that_failed_continues(hub: ModelHub):
    shard = next(name for name in hub.files if name.startswith("model-00002"))
    hub.broken = shard
    with pytest.raises(DataError, match="cannot download it"):
        open_checkpoint(NAME, hub.endpoint)
    before = set(hub.downloaded)
    hub.broken = ""
    hub.asked.clear()
    opened = open_checkpoint(NAME, hub.endpoint)
    assert opened.tensors
    assert shard in hub.downloaded
    assert not before & set(hub.downloaded)


def test_without_a_network_a_model_that_was_downloaded_before_is_used(hub: ModelHub, nobody: str):
    first = open_checkpoint(NAME, hub.endpoint)
    again = open_checkpoint(NAME, nobody)
    assert (again.folder, again.revision) == (first.folder, COMMIT)


def test_without_a_network_the_files_to_place_are_named(nobody: str):
    with pytest.raises(DataError) as caught:
        open_checkpoint(NAME, nobody)
    message = str(caught.value)
    assert "put config.json, tokenizer.json and model.safetensors" in message
    assert f"https://huggingface.co/{NAME} into a folder and import that" in message
    assert "\n" not in message


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match=r"pip install 'blocktrain\[hub\]'"):
        open_checkpoint(NAME)
