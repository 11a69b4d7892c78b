"""What arrives of updates: with a codec, what is left out is owed, and told in the end."""

import numpy as np

from blocktrain.config import SwarmConfig
from blocktrain.simulate.learning import SimulatedUpdates
from blocktrain.simulate.virtual_block import VirtualBlock, VirtualLease

BASE = {
    "a": np.zeros((8, 64), np.float32),
    "b": np.ones(5000, np.float32),
}


def lease(worker: str = "ann") -> VirtualLease:
    return VirtualLease("1", worker, VirtualBlock(0, 10), 0, 5, deadline=60.0)


def test_without_a_codec_weights_arrive_as_they_are():
    parcels = SimulatedUpdates(SwarmConfig())
    assert parcels.begun(lease(), BASE) is BASE
    end = {name: array + 1 for name, array in BASE.items()}
    fresh, late = lease(), lease()
    late.block.version = 1
    assert parcels.sent(fresh, BASE, end).start is None
    assert parcels.sent(late, BASE, end).start is BASE
    assert parcels.sent(late, BASE, end).end is end


def test_what_a_codec_leaves_out_is_what_its_worker_begins_the_next_lease_with():
    parcels = SimulatedUpdates(SwarmConfig(codec="sparse"))
    draws = np.random.default_rng(0)
    end = {
        name: array + draws.standard_normal(array.shape, np.float32) for name, array in BASE.items()
    }
    told = parcels.sent(lease(), BASE, end).end
    again = parcels.begun(lease(), BASE)
    assert any(told[name].any() for name in told)
    for name, array in end.items():
        assert np.allclose(again[name] + told[name], array, atol=1e-5)
    assert parcels.begun(lease("bob"), BASE) is BASE
