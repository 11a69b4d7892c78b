"""The settings and learning rates of a run that was extended."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.config import Config, from_toml
from blocktrain.errors import ConfigError

LR, FLOOR, WARMUP = 1e-3, 0.1, 10
PLAIN = Config().with_settings(train__lr=LR, train__lr_floor=FLOOR, train__warmup=WARMUP)
RELAY = PLAIN.with_settings(
    model__layers=6, model__blocks=3, objective__kind="cascade", objective__tail=1,
    objective__order="relay",
)  # fmt: skip
TURNS = PLAIN.with_settings(
    model__layers=6, model__blocks=3, objective__kind="turns", objective__turn_steps=7
)
ends = st.lists(st.integers(1, 400), min_size=1, max_size=4, unique=True).map(sorted)


def extended(config: Config, ends: list[int]) -> Config:
    config = config.with_settings(train__steps=ends[0])
    for steps in ends[1:]:
        config = config.extended_to(steps)
    return config


@pytest.mark.parametrize("config", [PLAIN, RELAY, TURNS], ids=["plain", "relay", "turns"])
@given(ends=ends)
def test_an_extension_changes_no_rate_before_the_former_end(config: Config, ends: list[int]):
    short, longer = extended(config, ends), extended(config, [*ends, ends[-1] + 100])
    for block in range(config.block_count):
        for step in range(ends[-1]):
            assert short.learning_rate(block, step) == longer.learning_rate(block, step)


@given(ends=ends)
def test_the_rate_never_jumps(ends: list[int]):
    """It changes by at most a step of a warm-up and of a cosine."""
    config = extended(PLAIN, ends).train
    rates = [config.learning_rate(step) for step in range(config.steps)]
    first = 0
    for end in config.ends:
        steps = end - first
        warmup = WARMUP if first == 0 else min(WARMUP, steps // 10)
        steepest = LR * (1 / (warmup + 1) + math.pi / 2 / end) + LR * FLOOR
        for step in range(max(1, first), end):
            assert abs(rates[step] - rates[step - 1]) <= steepest + 1e-12
        first = end
    assert min(rates[WARMUP:], default=LR) >= LR * FLOOR * 0.999
    assert max(rates) <= LR


def test_after_the_warm_up_an_extension_follows_the_longer_cosine():
    planned = PLAIN.with_settings(train__steps=600)
    config = PLAIN.with_settings(train__steps=300).extended_to(600)
    assert config.train.ends == (300, 600)
    for step in (310, 400, 599):
        assert config.learning_rate(0, step) == pytest.approx(planned.learning_rate(0, step))
    assert config.learning_rate(0, 300) < config.learning_rate(0, 305) < LR
    assert config.learning_rate(0, 299) == pytest.approx(LR * FLOOR, rel=1e-3)
    # With several workers, a lease's schedule may reach past the end.
    assert config.learning_rate(0, 700) == pytest.approx(LR * FLOOR)


def test_an_extended_relay_has_one_schedule_per_phase():
    config = extended(RELAY, [20, 30])
    first = [config.learning_rate(block, step) for block in range(3) for step in range(20)]
    second = [config.learning_rate(block, step) for block in range(3) for step in range(20, 30)]
    alone = PLAIN.with_settings(train__steps=60).train
    assert first == [alone.learning_rate(step) for step in range(60)]
    assert second[3:] == sorted(second[3:], reverse=True)
    assert second[0] < second[3] > second[-1]
    assert first[-1] < second[3] < first[WARMUP]


@pytest.mark.parametrize(
    ("config", "stops"), [(PLAIN, [20, 30]), (RELAY, [20, 30]), (TURNS, [7, 14, 20, 27, 30])]
)
def test_blocks_stop_at_the_ends_of_phases_and_turns(config: Config, stops: list[int]):
    assert list(extended(config, [20, 30]).stops()) == stops


def test_settings_know_what_was_planned_before():
    config = extended(PLAIN, [20, 30, 40])
    assert config.planned_for(20) == extended(PLAIN, [20])
    assert config.planned_for(30) == extended(PLAIN, [20, 30])
    assert config.planned_for(40) == config.planned_for(25) == config
    assert from_toml(config.to_toml()) == config
    assert "extended_at" not in extended(PLAIN, [20]).to_toml()


@pytest.mark.parametrize("steps", [20, 7])
def test_an_extension_needs_more_steps(steps: int):
    with pytest.raises(ConfigError, match="planned for 20 steps per block already"):
        extended(PLAIN, [20]).extended_to(steps)


@pytest.mark.parametrize("ends", [[0], [30], [20, 10], [40], [-3]])
def test_former_ends_ascend_below_the_steps(ends: list[int]):
    with pytest.raises(ConfigError, match="must be ascending numbers"):
        PLAIN.with_settings(train__steps=30, train__extended_at=ends)
