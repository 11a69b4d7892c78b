import pytest

from blocktrain.config import TrainConfig
from blocktrain.train.optimizer import learning_rate

SETTINGS = TrainConfig(steps=1000, warmup=100, lr=2e-3, lr_floor=0.1)


def test_the_rate_warms_up_peaks_and_ends_at_the_floor():
    assert learning_rate(0, SETTINGS) == pytest.approx(2e-5)
    assert learning_rate(1000, SETTINGS) == pytest.approx(2e-4)
    assert max(learning_rate(s, SETTINGS) for s in range(1000)) <= 2e-3
    assert learning_rate(100, SETTINGS) > 1.9e-3


def test_after_the_warm_up_it_only_falls():
    rates = [learning_rate(s, SETTINGS) for s in range(100, 1200)]
    assert rates == sorted(rates, reverse=True)


def test_no_warm_up_starts_at_the_peak():
    assert learning_rate(0, TrainConfig(warmup=0, lr=1e-3)) == pytest.approx(1e-3)
