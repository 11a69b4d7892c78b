"""The arithmetic of training, against counts by hand."""

from pathlib import Path

import pytest

from blocktrain.config import Config, load_config
from blocktrain.config.compute import (
    end_to_end_steps,
    flops_per_step,
    total_flops,
)
from blocktrain.config.sizes import layer_size

CONFIGS = Path(__file__).parents[2] / "configs"


def test_a_cascade_at_equal_steps_costs_what_was_counted_by_hand():
    """Three units for a trained layer, one for a frozen one, three for a head: 2 + 4, 2 + 4, 2 + 4
    and 6 trained layers after 0, 2, 4 and 6 frozen ones, against 12."""
    cascade = load_config(CONFIGS / "wikipedia-38m-cascade.toml")
    relative = end_to_end_steps(cascade) / cascade.train.steps
    costs, head = layer_size(cascade.model), 256 * 512
    layer = costs.parameters + costs.attention
    by_hand = (3 * 24 + 12) * layer + 4 * 3 * head
    assert relative == pytest.approx(by_hand / (3 * 12 * layer + 3 * head))
    assert round(relative, 2) == 2.34
    assert end_to_end_steps(cascade.with_settings(train__steps=1068)) == pytest.approx(
        2500, rel=1e-3
    )


def test_a_run_costs_what_its_blocks_have_trained(config: Config):
    first, second = (flops_per_step(config, block) for block in range(2))
    assert total_flops(config, [3, 5]) == 3 * first + 5 * second
    assert total_flops(config) == config.train.steps * (first + second)


def test_in_turns_the_layers_after_a_block_cost_two_thirds(config: Config):
    """Gradients pass through them, but not to their weights; attention costs as if it were
    trained, because both its factors depend on the block."""
    turns = config.with_settings(objective__kind="turns")
    costs, head = layer_size(turns.model), 256 * turns.model.width
    layer = costs.parameters + costs.attention
    positions = turns.train.batch * turns.model.window
    through = 4 * costs.parameters + 6 * costs.attention
    assert flops_per_step(turns, 0) == positions * (6 * layer + through + 4 * head)
    assert flops_per_step(turns, 1) == positions * (6 * layer + 2 * layer + 6 * head)
