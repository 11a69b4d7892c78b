"""A coordinator's folder in one file, and back."""

import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.coordinator import SetClock, join, make_run, open_stores, weights_now

from blocktrain.coordinator.folder import back_up, restore
from blocktrain.coordinator.run import open_run
from blocktrain.coordinator.service import Service
from blocktrain.errors import CorruptFileError, RunError
from blocktrain.storage.blobs import Blobs
from blocktrain.storage.chunks import LocalChunks, place_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder, with its ledger still open."""
    folder = tmp_path / "home"
    folder.mkdir()
    run = make_run(folder)
    (folder / "invite-secret").write_text("secret")
    (folder / "chunks" / "partial" / "half").write_bytes(b"half a chunk")
    yield folder
    run.ledger.close()


def of_a_version(folder: Path, version: int = 0, *, recipe: bool = False) -> Path:
    """The chunk of block 0's weights, or what says that they are made of it."""
    ledger, chunks = open_stores(folder)
    with ledger.read() as tx:
        name = tx.versions.get(0, version).weights.name
    ledger.close()
    (chunk,) = Blobs(chunks).recipe(name).chunks
    return folder / "chunks" / place_of(name if recipe else chunk)


def test_a_restored_folder_holds_the_same_run(folder: Path, tmp_path: Path):
    assert back_up(folder, tmp_path / "saved.tar") > 0
    assert restore(tmp_path / "saved.tar", tmp_path / "new") > 0
    here, there = (open_run(*open_stores(f), SetClock()) for f in (folder, tmp_path / "new"))
    try:
        assert there.id == here.id
        assert there.authority.fingerprint == here.authority.fingerprint
        assert all(
            (tensor == weights_now(here, 0)[name]).all()
            for name, tensor in weights_now(there, 0).items()
        )
        assert (tmp_path / "new" / "invite-secret").read_text() == "secret"
        assert not (tmp_path / "new" / "chunks" / "partial" / "half").exists()
    finally:
        here.ledger.close()
        there.ledger.close()


@pytest.mark.skipif(os.name == "nt", reason="there are no such permissions")
def test_a_backup_and_what_is_made_of_it_are_for_the_operator_alone(folder: Path, tmp_path: Path):
    (folder / "ledger.db").chmod(0o644)
    before = os.umask(0)
    try:
        back_up(folder, tmp_path / "saved.tar")
        restore(tmp_path / "saved.tar", tmp_path / "new")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert modes["saved.tar"] == 0o600
    assert modes["new"] == 0o700
    assert (tmp_path / "new" / "ledger.db").stat().st_mode & 0o777 == 0o600


def test_an_altered_chunk_is_noticed(folder: Path, tmp_path: Path):
    chunk = of_a_version(folder)
    chunk.write_bytes(b"other")
    back_up(folder, tmp_path / "saved.tar")
    with pytest.raises(CorruptFileError, match=chunk.name[:8]):
        restore(tmp_path / "saved.tar", tmp_path / "new")


def test_a_cut_off_backup_is_refused_and_leaves_nothing_in_the_way(folder: Path, tmp_path: Path):
    back_up(folder, tmp_path / "saved.tar")
    data = (tmp_path / "saved.tar").read_bytes()
    with tarfile.open(tmp_path / "saved.tar") as archive:
        ends = [member.offset for member in archive][1:]  # where one ends and the next begins
    for end in (len(data) // 3, *ends):
        (tmp_path / "cut.tar").write_bytes(data[:end])
        with pytest.raises(CorruptFileError):
            restore(tmp_path / "cut.tar", tmp_path / "new")
    assert restore(tmp_path / "saved.tar", tmp_path / "new") > 0


def test_what_is_no_backup_is_refused_with_what_to_do(tmp_path: Path):
    other = tmp_path / "other"
    other.write_bytes(b"not an archive")
    with pytest.raises(
        CorruptFileError, match="is not a backup; give a file made by `blocktrain backup`"
    ):
        restore(other, tmp_path / "new")
    with tarfile.open(tmp_path / "other.tar", "w") as archive:
        archive.add(other, "other")
    with pytest.raises(CorruptFileError, match="contains no ledger; give a file"):
        restore(tmp_path / "other.tar", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_what_is_collected_meanwhile_makes_it_start_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A version was replaced after the ledger was copied, and its chunks are gone."""
    clock = SetClock()
    service = Service(open_run(*open_stores(folder), clock))

    def replace_first(store: LocalChunks) -> Iterator[tuple[str, float]]:
        lists.append(store)
        if len(lists) == 1:
            join(service).work(by=2.0, blocks=(0,))
            assert service.merger.merge_due() == 1
            old = of_a_version(folder, 0)
            with service.run.ledger.write() as tx:
                tx.versions.forget(0, 0)
            old.unlink()
        return listed(store)

    lists: list[LocalChunks] = []
    listed = LocalChunks.stored
    monkeypatch.setattr(LocalChunks, "stored", replace_first)
    back_up(folder, tmp_path / "saved.tar")
    assert len(lists) == 2  # and so it was begun anew
    monkeypatch.undo()
    restore(tmp_path / "saved.tar", tmp_path / "new")
    there = open_run(*open_stores(tmp_path / "new"), clock)
    for name, tensor in weights_now(service.run, 0).items():
        assert (weights_now(there, 0)[name] == tensor).all()
    there.ledger.close()
    service.run.ledger.close()


def test_a_chunk_that_nobody_needs_may_vanish(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    chunks = LocalChunks(folder / "chunks")
    stray = chunks.put(b"of an update that was merged a moment ago")

    def vanish(store: LocalChunks) -> list[tuple[str, float]]:
        found = list(listed(store))
        store.delete(stray)
        return found

    listed = LocalChunks.stored
    monkeypatch.setattr(LocalChunks, "stored", vanish)
    back_up(folder, tmp_path / "saved.tar")
    monkeypatch.undo()
    assert stray not in [name for name, _ in chunks.stored()]
    assert restore(tmp_path / "saved.tar", tmp_path / "new") == len(list(chunks.stored()))


@pytest.mark.parametrize("lost", ["recipe", "chunk"])
def test_a_run_that_lacks_something_is_not_backed_up(folder: Path, tmp_path: Path, lost: str):
    chunk = of_a_version(folder, recipe=lost == "recipe")
    chunk.unlink()
    with pytest.raises(RunError, match=f"1 chunks that the run needs.*{chunk.name}"):
        back_up(folder, tmp_path / "saved.tar")
    assert not list(tmp_path.glob("saved.tar*"))


def test_chunks_elsewhere_are_not_looked_for(folder: Path, tmp_path: Path):
    shutil.rmtree(folder / "chunks")
    back_up(folder, tmp_path / "saved.tar")
    assert restore(tmp_path / "saved.tar", tmp_path / "new") == 0
    assert (tmp_path / "new" / "ledger.db").exists()


def test_nothing_is_overwritten(folder: Path, tmp_path: Path):
    back_up(folder, tmp_path / "saved.tar")
    with pytest.raises(RunError, match="exists already"):
        back_up(folder, tmp_path / "saved.tar")
    with pytest.raises(RunError, match="not empty"):
        restore(tmp_path / "saved.tar", folder)
    with pytest.raises(RunError, match="not a folder"):
        back_up(folder, tmp_path / "nowhere" / "saved.tar")
    with pytest.raises(RunError, match="--data-dir"):
        back_up(tmp_path, tmp_path / "other.tar")
