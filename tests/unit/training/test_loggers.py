"""Numbers of a training in TensorBoard, read back; and a word about packages that are missing."""

import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import blocktrain as bt
from blocktrain.config import Config, from_toml
from blocktrain.errors import ConfigError
from blocktrain.storage.run_dir import RunDir


@pytest.fixture
def logged(tmp_path: Path, config: Config) -> Config:
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 200)
    return config.with_settings(data__source=f"text:{text}", train__eval_every=6)


def test_tensorboard_gets_the_numbers_of_every_block(tmp_path: Path, logged: Config):
    run = bt.train(logged, tmp_path / "run", {"train.log_to": "tensorboard"}, progress=False)
    for block in range(2):
        events = EventAccumulator(str(run / "tensorboard" / f"block-{block}"))
        events.Reload()
        assert [event.step for event in events.Scalars("loss")][-1] == logged.train.steps
        valid = RunDir.open(run).block(block).current().valid_ce
        assert events.Scalars("valid_ce")[-1].value == pytest.approx(valid, rel=1e-6)


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_missing_package_is_named(
    tmp_path: Path, logged: Config, name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, name, None)  # so that it cannot be imported
    with pytest.raises(ConfigError, match=f"pip install {name}"):
        bt.train(logged, tmp_path / "run", {"train.log_to": name}, progress=False)


def test_the_former_setting_still_counts(config: Config):
    former = config.to_toml().replace("[train]", "[train]\ntensorboard = true")
    assert from_toml(former) == config.with_settings(train__log_to="tensorboard")
    assert from_toml(former.replace("= true", "= false", 1)) == config
