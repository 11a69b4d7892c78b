"""Small simulations."""

from typing import Any

from hypothesis import strategies as st
from tests.support.coordinator import swarm_config

from blocktrain.config import build
from blocktrain.simulate.scenario import Scenario

# All workers are equal and always present, and only training takes time.
PLAIN = {
    "simulate__speed_spread": 0.0,
    "simulate__network_spread": 0.0,
    "simulate__latency_seconds": 0.0,
    "simulate__block_megabytes": 0.0,
    "simulate__steps_per_second": 1.0,
    "simulate__workers": 1,
}


def scenario(**settings: Any) -> Scenario:
    """Two blocks of 40 batches, one plain worker; settings as section__key."""
    run = build(Scenario, swarm_config().to_dict())
    return run.with_settings(**{**PLAIN, **settings})


# Settings of simulations, drawn by hypothesis.
scenes = st.fixed_dictionaries(
    {
        "model__layers": st.just(6),
        "model__blocks": st.integers(1, 3),
        "train__steps": st.integers(1, 120),
        "swarm__lease_seconds": st.floats(1.0, 20.0),
        "swarm__shortest_deadline": st.floats(0.5, 40.0),
        "swarm__deadline_factor": st.floats(1.0, 4.0),
        "swarm__quorum": st.integers(1, 4),
        "swarm__grace_seconds": st.floats(0.0, 10.0),
        "swarm__most_stale": st.integers(0, 3),
        "simulate__seed": st.integers(0, 1000),
        "simulate__workers": st.integers(1, 12),
        "simulate__longest_seconds": st.floats(1.0, 2000.0),
        "simulate__block_megabytes": st.floats(0.0, 40.0),
        "simulate__speed_spread": st.floats(0.0, 1.5),
        "simulate__network_spread": st.floats(0.0, 1.0),
        "simulate__latency_seconds": st.floats(0.0, 1.0),
        "simulate__merge_megabytes": st.floats(5.0, 1000.0),
        "simulate__coordinators": st.integers(1, 3),
        "simulate__join_seconds": st.floats(0.0, 30.0),
        "simulate__availability": st.floats(0.2, 1.0),
        "simulate__stay_seconds": st.floats(2.0, 200.0),
        "simulate__lost_share": st.floats(0.0, 0.5),
        "simulate__goodbye_share": st.floats(0.0, 1.0),
        "simulate__straggler_share": st.floats(0.0, 1.0),
        "simulate__straggler_every": st.floats(1.0, 60.0),
        "simulate__straggler_seconds": st.floats(1.0, 60.0),
    }
)
