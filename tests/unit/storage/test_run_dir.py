import json
import tracemalloc
from pathlib import Path

import filelock
import numpy as np
import pytest

from blocktrain.config import Config
from blocktrain.errors import CorruptFileError, RunError
from blocktrain.storage.block_dir import BlockDir, Snapshot, load_tensors, store_tensors
from blocktrain.storage.run_dir import RunDir


def snapshot(step: int, **extra: object) -> Snapshot:
    weights = {"w": np.full((2, 3), step, np.float32)}
    state = {"w.exp_avg": np.full((2, 3), -step, np.float32)}
    values = {"bytes_seen": step * 10, "valid_ce": None, "counters": {"skipped": 1}, **extra}
    return Snapshot(step=step, weights=weights, state=state, **values)  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", Config().with_settings(model__blocks=2))


def test_a_snapshot_comes_back_as_it_was(run: RunDir):
    run.block(0).save(snapshot(5))
    loaded = run.block(0).load_snapshot()
    assert loaded is not None
    assert (loaded.step, loaded.bytes_seen, loaded.counters) == (5, 50, {"skipped": 1})
    assert (loaded.weights["w"] == 5).all()
    assert (loaded.state["w.exp_avg"] == -5).all()


def test_old_versions_go_but_the_chosen_one_stays(run: RunDir):
    block = run.block(0)
    for step in range(1, 7):
        block.save(snapshot(step, chosen=2 if step >= 2 else None))
    assert [v.step for v in block.versions()] == [2, 5, 6]
    assert block.current().step == 2
    assert (block.load_weights()["w"] == 2).all()
    files = {p.name for p in block.path.glob("*.safetensors")}
    assert files == {
        "v000002.safetensors", "v000005.safetensors", "v000006.safetensors",
        "state-000006.safetensors",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["v000005.safetensors", "state-000005.safetensors"])
@pytest.mark.parametrize("damage", ["truncate", "alter", "remove"])
def test_a_damaged_file_is_named(run: RunDir, name: str, damage: str):
    block = run.block(0)
    block.save(snapshot(5))
    path = block.path / name
    data = bytearray(path.read_bytes())
    if damage == "truncate":
        path.write_bytes(data[:-1])
    elif damage == "alter":
        data[-1] ^= 1
        path.write_bytes(data)
    else:
        path.unlink()
    expected = RunError if damage == "remove" else CorruptFileError
    with pytest.raises(expected, match=name):
        block.load_snapshot()


def test_a_cut_write_changes_nothing(run: RunDir):
    """What a kill leaves behind: partial files and files no manifest names."""
    block = run.block(0)
    block.save(snapshot(5))
    (block.path / "v000010.safetensors.partial").write_bytes(b"half")
    (block.path / "v000010.safetensors").write_bytes(b"whole but not committed")
    (block.path / "manifest.json.partial").write_bytes(b"{")
    assert block.current().step == 5
    block.save(snapshot(15))
    assert block.current().step == 15
    assert not (block.path / "v000010.safetensors").exists()


def test_a_cleared_block_starts_from_the_beginning(run: RunDir):
    block, other = run.block(0), run.block(1)
    block.clear()  # nothing there yet
    other.save(snapshot(3))
    block.save(snapshot(5))
    block.append_metrics({"step": 5})
    (block.path / "v000010.safetensors.partial").write_bytes(b"half")
    with block.lock():
        block.clear()
        assert [path.name for path in block.path.iterdir()] == [".lock"]  # still ours
        with pytest.raises(filelock.Timeout):
            run.block(0).lock().acquire()
    assert block.load_snapshot() is None
    assert block.versions() == []
    assert not block.finished()
    assert other.current().step == 3
    block.save(snapshot(2))
    assert [version.step for version in block.versions()] == [2]


def test_a_garbled_or_foreign_manifest_is_named(run: RunDir):
    block = run.block(0)
    block.save(snapshot(5))
    (block.path / "manifest.json").write_text("{")
    with pytest.raises(CorruptFileError, match=r"manifest\.json"):
        block.current()
    (block.path / "manifest.json").write_text(json.dumps({"format": 99, "config": ""}))
    with pytest.raises(RunError, match="format 99"):
        block.current()


def test_export_holds_every_block(run: RunDir, tmp_path: Path):
    for index in range(2):
        run.block(index).save(snapshot(index + 1))
    path = run.export(tmp_path / "out")
    assert path.stat().st_size > 0
    loaded = RunDir.open(tmp_path / "out").weights()
    assert [float(w["w"][0, 0]) for w in loaded] == [1.0, 2.0]
    read = [dict(RunDir.open(tmp_path / "out").read_block(index)) for index in range(2)]
    assert [float(w["w"][0, 0]) for w in read] == [1.0, 2.0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptFileError, match=r"model\.safetensors"):
        RunDir.open(tmp_path / "out").weights()
    with pytest.raises(CorruptFileError, match=r"model\.safetensors"):
        next(RunDir.open(tmp_path / "out").read_block(0))


def test_settings_may_change_until_something_was_trained(run: RunDir):
    other = run.config.with_settings(train__lr=0.5)
    at_work = run.block(1).lock()
    with at_work, pytest.raises(RunError, match=r"train\.lr"):
        RunDir.create(run.path, other)
    assert RunDir.create(run.path, other).config == other
    assert RunDir.open(run.path).config == other


def test_a_run_keeps_its_settings(run: RunDir):
    run.block(0).save(snapshot(5))
    assert RunDir.create(run.path, run.config).config == run.config
    other = run.config.with_settings(train__lr=0.5)
    with pytest.raises(RunError, match=r"train\.lr"):
        RunDir.create(run.path, other)
    elsewhere = run.config.with_settings(train__device="cuda:3")
    again = RunDir.create(run.path, elsewhere)
    assert again.config.train.device == "cuda:3"
    assert RunDir.open(run.path).config == run.config


def test_an_altered_config_is_named(run: RunDir):
    run.block(0).save(snapshot(5))
    path = run.path / "config.toml"
    path.write_text(path.read_text().replace("heads = 8", "heads = 4"))
    with pytest.raises(CorruptFileError, match=r"config\.toml"):
        RunDir.open(run.path).block(0).load_weights()


def test_what_a_killed_start_leaves_does_not_block_the_next(tmp_path: Path):
    (tmp_path / "config.toml.partial").write_bytes(b"[mod")
    with RunDir(tmp_path, Config()).lock():
        assert RunDir.create(tmp_path, Config()).config == Config()


def test_scalars_keep_their_shape(run: RunDir):
    scalar = {"log_scale": np.array(2.5, np.float32)}
    run.block(0).save(Snapshot(1, 10, None, scalar, {}, {}))
    assert run.block(0).load_weights()["log_scale"].shape == ()


def test_tensors_are_written_without_a_copy_of_them(tmp_path: Path):
    tensors = {f"w{number}": np.ones((512, 1024), np.float32) for number in range(8)}
    whole = sum(tensor.nbytes for tensor in tensors.values())
    tracemalloc.start()
    stored = store_tensors(tmp_path / "file.safetensors", tensors)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < whole / 4
    assert stored.size > whole
    assert set(load_tensors(tmp_path, stored)) == set(tensors)


def test_a_run_is_not_exported_into_itself(run: RunDir):
    for index in range(2):
        run.block(index).save(snapshot(1))
    with pytest.raises(RunError, match="use another folder"):
        run.export(run.path)


def test_what_is_not_a_run_is_refused(tmp_path: Path):
    with pytest.raises(RunError, match="does not exist"):
        RunDir.open(tmp_path / "absent")
    with pytest.raises(RunError, match=r"config\.toml"):
        RunDir.open(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="not empty"):
        RunDir.create(tmp_path, Config())


def test_a_block_without_a_version_says_so(run: RunDir):
    with pytest.raises(RunError, match="block 1 has no version"):
        run.block(1).current()
    assert run.block(1).load_snapshot() is None


def test_metrics_past_the_checkpoint_are_forgotten(tmp_path: Path):
    block = BlockDir(tmp_path / "block-0", 0, "", 10)
    for step in (10, 20, 30):
        block.append_metrics({"step": step})
    with block.metrics_path.open("a") as out:
        out.write('{"step": 4')  # a kill cut this line
    block.forget_metrics_after(20)
    lines = block.metrics_path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [10, 20]
