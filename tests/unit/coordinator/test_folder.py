"""A coordinator's folder: a run is founded in it once, and found in it ever after."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.coordinator import swarm_config, tensors_of

from blocktrain.config import Config
from blocktrain.coordinator.folder import CoordinatorFolder
from blocktrain.errors import ConfigError, DataError, NotFoundError, RunError
from blocktrain.ledger.ledger import Ledger
from blocktrain.model.stack import initial_block
from blocktrain.storage.run_dir import RunDir


def config_for(folder: Path) -> Config:
    return swarm_config(data__source=f"text:{folder / 'text.txt'}")


@pytest.fixture(scope="module")
def founded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CoordinatorFolder, Config]]:
    """A run in a folder, its initial weights made by a child process."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "text.txt").write_text("some words to learn from\n" * 1000)
    config = config_for(folder)
    home = CoordinatorFolder(folder / "coordinator")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BLOCKTRAIN_CACHE", str(folder / "cache"))
        home.open_or_create(config).ledger.close()
        yield home, config


def test_a_founded_run_is_found_again(founded: tuple[CoordinatorFolder, Config]):
    home, config = founded
    first, second = home.open(), home.open_or_create(config)
    assert first.id == second.id
    assert first.config == second.config == config
    assert first.description.corpus["train"].size > 10_000
    first.ledger.close()
    second.ledger.close()


def test_its_first_versions_are_the_models_initialization(
    founded: tuple[CoordinatorFolder, Config],
):
    """The same on every machine: a function of the settings."""
    home, config = founded
    run = home.open()
    with run.ledger.read() as tx:
        versions = [tx.versions.get(block) for block in range(config.block_count)]
    assert len(versions) == 2
    for block, version in enumerate(versions):
        expected = dict(initial_block(config, block).named_parameters())
        found = tensors_of(run, version.weights)
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            np.testing.assert_array_equal(tensor, expected[name].detach().numpy())
    run.ledger.close()


@pytest.mark.skipif(os.name == "nt", reason="there are no such permissions")
@pytest.mark.parametrize("ledger", [None, "elsewhere/ledger.db"])
def test_its_folder_is_for_the_operator_alone(tmp_path: Path, ledger: str | None):
    home = CoordinatorFolder(tmp_path / "new", ledger and f"sqlite:///{tmp_path / ledger}")
    before = os.umask(0)
    try:
        with pytest.raises(DataError):
            home.open_or_create(swarm_config(data__source=f"text:{tmp_path / 'nothing.txt'}"))
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_other_settings_are_another_run(founded: tuple[CoordinatorFolder, Config]):
    home, config = founded
    with pytest.raises(ConfigError, match="other settings"):
        home.open_or_create(config.with_settings(train__steps=41))


def test_settings_are_compared_by_value_and_not_by_how_they_are_written(
    founded: tuple[CoordinatorFolder, Config], monkeypatch: pytest.MonkeyPatch
):
    home, config = founded
    with monkeypatch.context() as patch:
        patch.setattr(Config, "to_toml", lambda self: "[model]\nwritten_in = 'another way'\n")
        home.open_or_create(config).ledger.close()


def test_who_only_needs_the_ledger_makes_no_folder(
    founded: tuple[CoordinatorFolder, Config], tmp_path: Path
):
    """As with `invite list --db`, called anywhere."""
    operator = CoordinatorFolder(tmp_path / "here", founded[0].db).operator()
    assert operator.invites() == []
    operator.ledger.close()
    assert not (tmp_path / "here").exists()


def test_a_folder_without_a_run_is_told_so(tmp_path: Path):
    for opened in (
        CoordinatorFolder(tmp_path / "nothing").open,
        CoordinatorFolder(tmp_path / "nothing").operator,
    ):
        with pytest.raises(ConfigError, match="holds no run"):
            opened()
    with pytest.raises(NotFoundError, match="holds no run"):
        CoordinatorFolder(tmp_path / "nothing", f"sqlite:///{tmp_path / 'empty.db'}").operator()
    assert not (tmp_path / "nothing").exists()


def test_settings_whose_weights_cannot_be_made_found_nothing(
    founded: tuple[CoordinatorFolder, Config], tmp_path: Path
):
    _, config = founded
    home = CoordinatorFolder(tmp_path / "new")
    origin = RunDir.create(tmp_path / "origin", config.with_settings(model__blocks=1))
    broken = config.with_settings(train__warm_start=str(origin.path))
    with pytest.raises(RunError, match=r"cannot make the initial weights: .*has 1 blocks"):
        home.open_or_create(broken)
    ledger = Ledger(home.db)
    with ledger.read() as tx:
        assert tx.run() is None
    ledger.close()


def test_the_first_invite_is_made_once_and_kept_for_the_operator(tmp_path: Path):
    home = CoordinatorFolder(tmp_path / "new")
    made = iter(["first", "second"])
    assert [home.invite_secret(lambda: next(made)) for _ in range(2)] == ["first", "first"]
    if os.name != "nt":
        assert (tmp_path / "new" / "invite-secret").stat().st_mode & 0o777 == 0o600
