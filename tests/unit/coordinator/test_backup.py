"""A coordinator's folder in one file, and back."""

import os
from pathlib import Path

import pytest
from tests.support.coordinator import SetClock, make_run, open_stores, weights_now

from blocktrain.coordinator.backup import back_up, restore
from blocktrain.coordinator.run import open_run
from blocktrain.errors import CorruptFileError, RunError


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
    chunk = next((folder / "chunks").glob("[0-9a-f][0-9a-f]/*"))
    chunk.write_bytes(b"other")
    back_up(folder, tmp_path / "saved.tar")
    with pytest.raises(CorruptFileError, match=chunk.name[:8]):
        restore(tmp_path / "saved.tar", tmp_path / "new")


def test_a_cut_off_backup_is_refused(folder: Path, tmp_path: Path):
    back_up(folder, tmp_path / "saved.tar")
    data = (tmp_path / "saved.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(data[: len(data) // 3])
    with pytest.raises(CorruptFileError):
        restore(tmp_path / "cut.tar", tmp_path / "new")


def test_nothing_is_overwritten(folder: Path, tmp_path: Path):
    back_up(folder, tmp_path / "saved.tar")
    with pytest.raises(RunError, match="there already"):
        back_up(folder, tmp_path / "saved.tar")
    with pytest.raises(RunError, match="not empty"):
        restore(tmp_path / "saved.tar", folder)
    with pytest.raises(RunError, match="no folder"):
        back_up(folder, tmp_path / "nowhere" / "saved.tar")
    with pytest.raises(RunError, match="--data-dir"):
        back_up(tmp_path, tmp_path / "other.tar")
