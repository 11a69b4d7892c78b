from pathlib import Path

import pytest

from blocktrain.config import Config, describe, from_dict, load_config
from blocktrain.errors import ConfigError

PRESETS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_presets_load_and_survive_a_round_trip(path: Path, tmp_path: Path):
    config = load_config(path)
    copy = tmp_path / "copy.toml"
    copy.write_text(config.to_toml())
    assert load_config(copy) == config


def test_the_five_presets_are_there():
    assert {p.stem for p in PRESETS} == {
        "tiny", "demo", "wikitext2-small", "wikitext2-38m", "wikipedia-38m",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.depth=3", "model.depth"),
        ("modle.layers=3", "modle"),
        ("model.layers=three", "model.layers"),
        ("model.layers=2.5", "model.layers"),
        ("model.layers=true", "model.layers"),
        ("model.layers=0", "model.layers"),
        ("model.layers=13", "model.blocks"),
        ("model.heads=7", "model.heads"),
        ("model.activation=tanh", "model.activation"),
        ("model.dropout=1.5", "model.dropout"),
        ("objective.kind=cascades", "objective.kind"),
        ("objective.sigma_min=20", "sigma_min"),
        ("objective.bounds=[1.0,10.0]", "objective.bounds"),
        ("objective.bounds=[1.0,3.0,2.0,4.0,10.0]", "objective.bounds"),
        ("objective.bounds=[0.5,2.0,3.0,4.0,10.0]", "objective.bounds"),
        ("objective.bounds=5", "objective.bounds"),
        ("objective.p_mean=-12", "objective.p_mean"),
        ("objective.p_std=0.1", "objective.p_std"),
        ("train.seed=99999999999999999999", "train.seed"),
        ("train.lr=nan", "train.lr"),
        ("train.accumulate=7", "train.accumulate"),
        ("train.keep=best", "train.eval_every"),
        ("train.steps", "--set"),
        ("steps=3", "--set"),
    ],
)
def test_a_bad_setting_is_an_error_that_names_it(override: str, named: str, tmp_path: Path):
    base = tmp_path / "base.toml"
    base.write_text("[model]\nlayers = 12\nblocks = 4\nwidth = 64\nheads = 4\n")
    with pytest.raises(ConfigError) as caught:
        load_config(base, [override])
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_overrides_take_toml_values_and_bare_words(tmp_path: Path):
    path = tmp_path / "c.toml"
    path.write_text("")
    config = load_config(
        path, ["train.lr=2e-3", "train.compile=true", "data.source=text:a b/*.txt", "train.steps=7"]
    )
    assert (config.train.lr, config.train.compile, config.train.steps) == (2e-3, True, 7)
    assert config.data.source == "text:a b/*.txt"


def test_missing_and_malformed_files_are_config_errors(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        load_config(tmp_path / "nowhere.toml")
    (tmp_path / "bad.toml").write_text("[model\n")
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        load_config(tmp_path / "bad.toml")
    with pytest.raises(ConfigError, match="section"):
        from_dict({"model": 3})


def test_a_leaking_sigma_min_warns():
    assert Config().warnings == []
    leaky = Config().with_settings(objective__sigma_min=0.5)
    assert "leak" in leaky.warnings[0]


def test_any_text_survives_the_round_trip(tmp_path: Path):
    config = Config().with_settings(data__source='text:d\U0001f600/\x7f"\\é/*.txt')
    (tmp_path / "c.toml").write_text(config.to_toml())
    assert load_config(tmp_path / "c.toml") == config


def test_every_setting_is_documented():
    for name, _, doc in describe():
        assert len(doc) > 8, name
