from pathlib import Path

import pytest

from blocktrain.config import Config, load_config
from blocktrain.model.stack import new_block
from blocktrain.train.estimate import estimate

CONFIGS = Path(__file__).parents[3] / "configs"


def test_parameters_are_counted_exactly(config: Config):
    needs = estimate(config)
    per_block = sum(p.numel() for p in new_block(config).parameters())
    assert needs.parameters_per_block == per_block
    assert needs.parameters == 2 * per_block


@pytest.mark.parametrize("name", ["wikitext2-small", "wikitext2-38m", "wikipedia-38m"])
def test_blocks_together_stay_near_the_end_to_end_size(name: str):
    needs = estimate(load_config(CONFIGS / f"{name}.toml"))
    assert needs.parameters / needs.end_to_end_parameters <= 1.15


def test_a_block_costs_at_most_1_7_causal_steps_of_the_same_layers():
    config = load_config(CONFIGS / "wikitext2-38m.toml")
    causal = config.with_settings(objective__kind="end_to_end", model__layers=3, model__blocks=1)
    ratio = estimate(config).flops_per_step / estimate(causal).flops_per_step
    assert 1.3 < ratio < 1.7


def test_billions_are_estimated_without_allocating_them():
    big = load_config(
        CONFIGS / "wikitext2-38m.toml",
        ["model.layers=48", "model.width=8192", "model.heads=64", "model.blocks=12"],
    )
    needs = estimate(big)
    assert needs.parameters > 30e9
    assert needs.fixed_bytes_per_worker == needs.parameters_per_block * 16
    assert needs.seconds(1e15) == pytest.approx(needs.flops_per_step * needs.steps / 1e15)


@pytest.mark.parametrize(
    ("overrides", "measured_gb"),
    [
        ([], 4.24),
        (["objective.kind=end_to_end"], 9.01),
        (["train.checkpoint_layers=true"], 2.18),
        (["train.checkpoint_layers=true", "objective.kind=end_to_end"], 1.80),
    ],
)
def test_memory_is_near_what_was_measured(overrides: list[str], measured_gb: float):
    """Peaks of bench/memory.py on one H200 (docs/RESULTS.md), compiled, bf16."""
    needs = estimate(load_config(CONFIGS / "wikitext2-38m.toml", overrides))
    assert needs.memory_per_worker / 1e9 == pytest.approx(measured_gb, rel=0.2)
