import dataclasses
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.config import (
    Config,
    ModelConfig,
    describe,
    from_dict,
    from_toml,
    load_config,
    load_stored_config,
    stored_values,
)
from blocktrain.config.run_config import balanced_depths
from blocktrain.config.sections import CONFIG_VERSION
from blocktrain.config.settings import KINDS
from blocktrain.errors import ConfigError, closest_match
from blocktrain.simulate.scenario import Scenario, load_scenario

# Layers, blocks and tail of a cascade that can be cut.
CASCADES = st.tuples(st.integers(1, 24), st.integers(0, 60), st.integers(0, 12)).map(
    lambda drawn: (drawn[0] + drawn[1], drawn[0], drawn[2])
)
CONFIGS = Path(__file__).parents[2] / "configs"
SIMULATIONS = sorted(CONFIGS.glob("simulate*.toml"))
PRESETS = sorted(set(CONFIGS.glob("*.toml")) - set(SIMULATIONS))


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_presets_load_and_survive_a_round_trip(path: Path, tmp_path: Path):
    config = load_config(path)
    copy = tmp_path / "copy.toml"
    copy.write_text(config.to_toml())
    assert load_config(copy) == config


@pytest.mark.parametrize("path", SIMULATIONS, ids=lambda p: p.stem)
def test_the_preset_of_a_simulation_is_no_runs(path: Path):
    assert load_scenario(path).simulate.workers > 1
    with pytest.raises(ConfigError, match="simulate"):
        load_config(path)


def test_every_preset_is_there_both_ways():
    names = {"tiny", "demo", "wikitext2-small", "wikitext2-38m", "wikipedia-38m"}
    tokens = {"tiny-tokens", "code-124m", "code-124m-cascade"}
    cascades = {f"{name}-cascade" for name in names}
    alone = {"demo-long", "wikipedia-38m-relay"}
    assert {p.stem for p in PRESETS} == tokens | names | cascades | alone


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
        ("model.depths=[4,4,4]", "model.depths"),
        ("model.depths=[3,3,3,4]", "model.depths"),
        ("model.depths=[0,4,4,4]", "model.depths"),
        ("model.depths=[-1,5,4,4]", "model.depths"),
        ("model.depths=[3,3,3,2.5]", "model.depths"),
        ("model.depths=3", "model.depths"),
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
        ("objective.tail=-1", "objective.tail"),
        ("objective.refresh_every=0", "objective.refresh_every"),
        ("objective.frozen=int4", "objective.frozen"),
        ("objective.feature_cache=tape", "objective.feature_cache"),
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
    for name, _, allowed, doc in describe(Scenario):
        assert len(doc) > 8, name
        assert allowed, name


def test_a_setting_says_what_it_can_be_set_to():
    allowed = {setting.name: setting.allowed for setting in describe(Config)}
    assert allowed["model.activation"] == "gelu, relu2, swiglu"
    assert allowed["model.taps"] == "integer from 0 to 16"
    assert allowed["train.compile"] == "true, false"
    assert allowed["objective.bounds"] == "list of numbers"


@given(cascade=CASCADES)
def test_balanced_depths_share_out_every_layer(cascade: tuple[int, int, int]):
    layers, blocks, _ = cascade
    depths = balanced_depths(*cascade)
    assert len(depths) == blocks
    assert sum(depths) == layers
    assert min(depths) >= 1


@given(cascade=CASCADES)
def test_balanced_depths_give_every_block_as_much_to_train(cascade: tuple[int, int, int]):
    """To within a layer, tails counted; tails too long for that leave blocks of one layer."""
    *before, last = balanced_depths(*cascade)
    trained = [depth + cascade[2] for depth in before]
    for layers in trained:
        assert last <= layers + 1
        assert layers <= last + 1 or set(before) == {1}


@pytest.mark.parametrize(
    ("cascade", "depths"),
    [
        ((12, 4, 4), (2, 2, 2, 6)),
        ((12, 12, 4), (1,) * 12),
        ((12, 1, 4), (12,)),
        ((12, 4, 0), (3, 3, 3, 3)),
        ((13, 4, 0), (3, 3, 3, 4)),  # what does not divide goes to the last, then to the first
        ((14, 4, 0), (4, 3, 3, 4)),
    ],
)
def test_balanced_depths_of_known_cascades(cascade: tuple[int, int, int], depths: tuple[int, ...]):
    assert balanced_depths(*cascade) == depths


def test_a_cascade_is_cut_by_its_tail_and_other_kinds_are_not():
    cascade = Config().with_settings(objective__kind="cascade", objective__tail=4)
    assert cascade.depths == (2, 2, 2, 6)
    assert cascade.with_settings(objective__kind="denoise").depths == (3, 3, 3, 3)
    assert cascade.with_settings(objective__kind="end_to_end").depths == (12,)


@pytest.mark.parametrize("kind", ["cascade", "denoise"])
def test_named_depths_are_taken_as_they_are(kind: str):
    config = Config().with_settings(objective__kind=kind, model__depths=[1, 5, 2, 4])
    assert config.depths == (1, 5, 2, 4)


def test_layers_that_do_not_divide_can_still_be_a_cascade():
    config = Config().with_settings(objective__kind="cascade", model__layers=13)
    assert sum(config.depths) == 13


def test_every_block_of_a_cascade_but_the_last_has_a_tail():
    cascade = Config().with_settings(objective__kind="cascade", objective__tail=3)
    assert [cascade.tail_layers(block) for block in range(4)] == [3, 3, 3, 0]
    assert cascade.with_settings(model__blocks=1).tail_layers(0) == 0


def test_the_most_layers_a_unit_trains_are_counted_with_its_tail():
    cascade = Config().with_settings(objective__kind="cascade", objective__tail=4)
    assert cascade.trained_layers == 6
    assert cascade.with_settings(model__depths=[2, 4, 3, 3]).trained_layers == 8
    assert cascade.with_settings(model__depths=[1, 1, 1, 9]).trained_layers == 9
    assert cascade.with_settings(objective__kind="denoise").trained_layers == 3
    assert cascade.with_settings(objective__kind="end_to_end").trained_layers == 12


@pytest.mark.parametrize("kind", ["denoise", "end_to_end"])
def test_other_kinds_have_no_tail(kind: str):
    config = Config().with_settings(objective__kind=kind, objective__tail=3)
    assert [config.tail_layers(block) for block in range(config.block_count)] == [
        0
    ] * config.block_count


def test_settings_written_down_before_there_was_a_lead_mean_what_they_meant():
    now = Config().with_settings(train__optimizer="adamw", objective__lead=0.0)
    lines = now.to_toml().splitlines()
    then = [line for line in lines if not line.startswith(("lead =", "optimizer ="))]
    then.insert(then.index("[objective]") + 1, "stagger = 0.0")
    assert from_toml("\n".join(then)) == now
    then[then.index("stagger = 0.0")] = "stagger = 0.5"
    with pytest.raises(ConfigError, match=r"was removed; use objective\.lead"):
        from_toml("\n".join(then))


def test_workers_that_do_not_know_a_setting_can_read_those_of_a_run_that_leaves_it_as_it_is():
    assert "heartbeat_timeout" not in Config().to_toml()
    patient = Config().with_settings(swarm__heartbeat_timeout=600.0)
    assert "heartbeat_timeout = 600.0" in patient.to_toml()
    assert from_toml(patient.to_toml()) == patient
    with pytest.raises(ConfigError, match=r"heartbeat_timeout = 20.0 must be at least 30"):
        Config().with_settings(swarm__heartbeat_timeout=20.0)


def test_the_blocks_of_a_cascade_begin_one_after_another():
    settings = {"model": {"layers": 8, "blocks": 4}, "objective": {"lead": 0.5}}
    settings["train"] = {"steps": 100}
    cascade = from_dict({**settings, "objective": {"lead": 0.5, "kind": "cascade"}})
    assert [cascade.first_step(block) for block in range(4)] == [0, 50, 100, 150]
    assert from_dict(settings).first_step(3) == 0


def test_the_kinds_differ_in_flags_that_every_package_can_ask_for():
    assert {name for name, kind in KINDS.items() if kind.denoises} == {"denoise"}
    assert {name for name, kind in KINDS.items() if kind.reads_predecessors} == {"cascade", "turns"}
    assert Config().end_to_end().block_count == 1
    assert Config().end_to_end().kind is KINDS["end_to_end"]


@pytest.mark.parametrize(("kind", "width"), [("denoise", 256), ("cascade", 512)])
def test_the_width_of_what_travels_between_blocks_depends_on_the_kind(kind: str, width: int):
    assert Config().with_settings(objective__kind=kind).state_width == width


# Settings of other releases


def test_renamed_settings_are_stored_under_their_old_names():
    """So that a worker of the release before can read them."""
    written = tomllib.loads(Config().with_settings(swarm__top_k_per_4096=20).to_toml())
    assert (written["swarm"]["kept"], written["swarm"]["kept_down"]) == (20, 0)
    assert "config_version" not in written
    assert "layer" not in written["model"]
    assert from_dict(written).swarm.top_k_per_4096 == 20


def test_what_is_stored_names_its_version_once_it_uses_a_newer_setting(
    monkeypatch: pytest.MonkeyPatch,
):
    layer = next(item for item in dataclasses.fields(ModelConfig) if item.name == "layer")
    monkeypatch.setattr(layer, "metadata", {**layer.metadata, "choices": ("local", "llama")})
    config = Config().with_settings(model__layer="llama")
    written = stored_values(config)
    assert written["config_version"] == CONFIG_VERSION
    assert written["swarm"]["top_k_per_4096"] == 154
    assert "kept" not in written["swarm"]
    assert from_toml(config.to_toml()) == config


def test_an_old_name_works_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "c.toml"
    path.write_text("[swarm]\nkept = 20\nkept_down = 30\n")
    swarm = load_config(path).swarm
    assert (swarm.top_k_per_4096, swarm.top_k_per_4096_down) == (20, 30)
    assert "swarm.kept was renamed; use swarm.top_k_per_4096" in caplog.text
    assert load_config(path, ["swarm.top_k_per_4096=40"]).swarm.top_k_per_4096 == 40
    caplog.clear()
    assert load_stored_config(path).swarm == swarm
    path.write_text(load_config(path).to_toml())
    caplog.clear()
    assert load_config(path, ["swarm.top_k_per_4096=40"]).swarm.top_k_per_4096 == 40
    assert not caplog.text  # nobody wrote the old name: blocktrain did


def test_an_old_name_beside_the_new_one_is_an_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="the same setting"):
        from_dict({"swarm": {"kept": 20, "top_k_per_4096": 30}})
    (tmp_path / "c.toml").write_text("[swarm]\nkept = 20\ntop_k_per_4096 = 30\n")
    with pytest.raises(ConfigError, match="the same setting"):
        load_config(tmp_path / "c.toml")


@pytest.mark.parametrize("values", [{"model": {"experts": 8}}, {"tokenizer": {}}])
def test_an_unknown_setting_of_a_newer_release_says_so(values: dict[str, dict[str, int]]):
    named = "model.experts" if "model" in values else "tokenizer"
    with pytest.raises(ConfigError, match=rf"{named}.*written by a newer blocktrain"):
        from_dict({"config_version": CONFIG_VERSION + 1, **values})
    with pytest.raises(ConfigError, match=rf"{named}.*(use one of|did you mean)"):
        from_dict({"config_version": CONFIG_VERSION, **values})


def test_settings_of_a_newer_release_are_read_if_all_are_known():
    values = {"config_version": CONFIG_VERSION + 1, "model": {"layers": 8}}
    assert from_dict(values).model.layers == 8


@pytest.mark.parametrize("version", [0, "1", 1.5, True])
def test_a_config_version_is_a_positive_whole_number(version: object):
    with pytest.raises(ConfigError, match="config_version"):
        from_dict({"config_version": version})


def test_a_mistyped_word_is_understood_and_another_is_not():
    known = ("width", "window", "layers")
    assert closest_match("wdth", known) == "width"
    assert closest_match("colour", known) is None
