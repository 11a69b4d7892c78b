"""Small simulations to look at closely."""

from typing import Any

from tests.support.coordinator import swarm_config

from blocktrain.config import build
from blocktrain.simulate.scenario import Scenario

# Everybody is equal and always there, and nothing takes time but training.
PLAIN = {
    "simulate__speed_spread": 0.0,
    "simulate__network_spread": 0.0,
    "simulate__latency_seconds": 0.0,
    "simulate__block_megabytes": 0.0,
    "simulate__workers": 1,
}


def scenario(**settings: Any) -> Scenario:
    """Two blocks of 40 batches, one plain worker; settings as section__key."""
    run = build(Scenario, swarm_config().to_dict())
    return run.with_settings(**{**PLAIN, **settings})
