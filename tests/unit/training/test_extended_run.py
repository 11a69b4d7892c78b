"""A run on one machine that is extended gives the same bits however often it was interrupted."""

from pathlib import Path

import pytest
from tests.support.training import CPU, assert_equal, quiet, stop_after

from blocktrain.config import Config, load_config
from blocktrain.data.corpus import Corpus
from blocktrain.errors import ConfigError, CorruptFileError, RunError
from blocktrain.storage.block_dir import BlockDir
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.run_session import LocalRun

KINDS = {
    "denoise": {"train__eval_every": 6, "train__keep": "best"},
    "cascade": {
        "objective__kind": "cascade", "objective__tail": 1, "objective__refresh_every": 5,
        "objective__feature_cache": "ram",
    },
    "relay": {"objective__kind": "cascade", "objective__tail": 1, "objective__order": "relay"},
    "turns": {"objective__kind": "turns", "objective__turn_steps": 3},
}  # fmt: skip


def session(run: RunDir, corpus: Corpus) -> LocalRun:
    return LocalRun(RunDir.open(run.path), corpus, CPU)


def scores(block: BlockDir) -> list[tuple[int, float]]:
    return [(each["step"], each["valid_ce"]) for each in block.metrics() if each["valid_ce"]]


def train(run: RunDir, corpus: Corpus) -> None:
    assert session(run, corpus).train_in_turn([0, 1], quiet, lambda: False)


@pytest.mark.parametrize("kind", KINDS)
def test_an_extended_run_has_the_same_bits_however_it_was_made(
    config: Config, corpus: Corpus, tmp_path: Path, kind: str
):
    short = config.with_settings(train__steps=8, **KINDS[kind])
    at_once = RunDir.create(tmp_path / "once", short.extended_to(14))
    train(at_once, corpus)

    finished = RunDir.create(tmp_path / "finished", short)
    train(finished, corpus)
    moments = finished.block(1).load_snapshot()
    assert moments and moments.state, "a finished block keeps the optimizer's state"
    finished.extend(14)
    assert not RunDir.open(finished.path).block(0).finished()
    train(finished, corpus)

    stopped = RunDir.create(tmp_path / "stopped", short)
    session(stopped, corpus).train_in_turn([0, 1], quiet, stop_after(5))
    stopped.extend(14)
    for steps in (6, 7):  # in the first phase, and in the second
        session(stopped, corpus).train_in_turn([0, 1], quiet, stop_after(steps))
    train(stopped, corpus)

    for block in range(2):
        whole = RunDir.open(at_once.path).block(block)
        expected = whole.load_snapshot()
        for run in (finished, stopped):
            store = RunDir.open(run.path).block(block)
            parts = store.load_snapshot()
            assert expected and parts and store.finished()
            assert_equal(expected.weights, parts.weights)
            assert_equal(expected.state, parts.state)
            assert expected.counters == parts.counters
            assert scores(whole) == scores(store)
            assert_equal(whole.load_weights(), store.load_weights())


def test_a_run_extended_twice_is_trained_on(config: Config, corpus: Corpus, tmp_path: Path):
    run = RunDir.create(tmp_path / "run", config.with_settings(train__steps=4))
    train(run, corpus)
    run.extend(6)
    run.extend(9)
    assert RunDir.open(run.path).config.train.ends == (4, 6, 9)
    train(run, corpus)
    assert [block.reached() for block in RunDir.open(run.path).blocks()] == [9, 9]


def test_the_first_command_continues_an_extended_run(config: Config, tmp_path: Path):
    run = RunDir.create(tmp_path / "run", config)
    with RunDir.open(run.path).block(0).lock():  # it is being trained
        with pytest.raises(RunError, match=r"`blocktrain extend .* --steps 20` extends the run"):
            RunDir.create(run.path, config.with_settings(train__steps=20))
        run.extend(20)
        extended = config.extended_to(20)
        assert RunDir.create(run.path, config).config == extended
        assert RunDir.create(run.path, extended).config == extended
        assert load_config(run.path / "config.toml") == extended
        with pytest.raises(RunError, match="to resume"):
            RunDir.create(run.path, config.with_settings(train__steps=11))
        with pytest.raises(RunError, match=r"other settings \(train\.lr\)"):
            RunDir.create(run.path, config.with_settings(train__lr=0.5))


def test_what_cannot_be_extended_says_why(config: Config, tmp_path: Path):
    run = RunDir.create(tmp_path / "run", config)
    with pytest.raises(ConfigError, match="12 steps per block already"):
        run.extend(12)
    (run.path / "extensions.json").write_text('{"steps": ["many"]}')
    with pytest.raises(CorruptFileError, match=r"extensions\.json is not a list"):
        RunDir.open(run.path)
    exported = RunDir.create_exported(tmp_path / "exported", config)
    exported.write_exported([{}, {}])
    with pytest.raises(RunError, match=r"train\.warm_start"):
        exported.extend(20)


def test_an_extended_relay_is_not_trained_side_by_side(
    config: Config, corpus: Corpus, tmp_path: Path
):
    relay = config.with_settings(**KINDS["relay"]).extended_to(14)
    run = LocalRun(RunDir.create(tmp_path / "run", relay), corpus, CPU)
    with pytest.raises(ConfigError, match="leave out --parallel"):
        run.train_side_by_side([0, 1], 2, quiet, lambda: False, ["unused"])
