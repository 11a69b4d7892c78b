"""What arrives of updates: with a codec, the rest is sent with later updates."""

import numpy as np

from blocktrain.config import SwarmConfig
from blocktrain.simulate.learning import SimulatedUpdates
from blocktrain.simulate.virtual_block import VirtualBlock, VirtualLease

BASE = {
    "a": np.zeros((8, 64), np.float32),
    "b": np.ones(5000, np.float32),
}


def lease(worker: str = "ann") -> VirtualLease:
    return VirtualLease("1", worker, VirtualBlock(0, 10), 0, 5, base_version=0, deadline=60.0)


def test_without_a_codec_weights_arrive_as_they_are():
    updates = SimulatedUpdates(SwarmConfig())
    assert updates.starting_weights(lease(), BASE) is BASE
    end = {name: array + 1 for name, array in BASE.items()}
    fresh, late = lease(), lease()
    late.block.version = 1
    assert updates.send(fresh, BASE, end).start is None
    assert updates.send(late, BASE, end).start is BASE
    assert updates.send(late, BASE, end).values is end


def test_what_a_codec_leaves_out_is_part_of_the_weights_the_next_lease_starts_with():
    updates = SimulatedUpdates(SwarmConfig(codec="sparse"))
    draws = np.random.default_rng(0)
    end = {
        name: array + draws.standard_normal(array.shape, np.float32) for name, array in BASE.items()
    }
    sent = updates.send(lease(), BASE, end).values
    again = updates.starting_weights(lease(), BASE)
    assert any(sent[name].any() for name in sent)
    for name, array in end.items():
        assert np.allclose(again[name] + sent[name], array, atol=1e-5)
    assert updates.starting_weights(lease("bob"), BASE) is BASE
