import itertools
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.training import CPU

from blocktrain.config import Config, TrainConfig, from_dict
from blocktrain.model.stack import new_block
from blocktrain.numerics.tensors import Sizes
from blocktrain.swarm.bounds import (
    CLIPPED_ABOVE,
    LARGEST_SINGULAR,
    LEAST_HISTORY,
    MUON_SIZE,
    REFUSED_ABOVE,
    Bounds,
    Move,
    TensorForm,
    balanced,
    lease_rates,
    optimizer_reach,
)
from blocktrain.training.optimizer import BlockOptimizer, moment_shapes, orthogonal

FEW = settings(max_examples=50, deadline=None)
FORM = [
    TensorForm("embed.weight", (50, 20)),
    TensorForm("layers.0.out.weight", (40, 30)),
    TensorForm("scale", ()),
]


def run_config(**settings: object) -> Config:
    return from_dict(
        {
            "model": {"layers": 2, "blocks": 2, "width": 16, "heads": 2, "window": 8},
            "train": {"steps": 1000, "lr": 0.01, "warmup": 10, "batch": 2},
        }
    ).with_settings(**settings)


def move(rates: float, rms: float, largest: float | None = None, room: float = 1.0) -> Move:
    most = rms if largest is None else largest
    return Move(rates, Sizes(np.full(3, rms), np.full(3, most)), room)


BOUNDS = Bounds(run_config(), FORM)
HISTORY = [move(1.0, 0.2, 0.4) for _ in range(LEAST_HISTORY)]


@pytest.mark.parametrize("layer", ["local", "llama"])
@pytest.mark.parametrize("kind", ["denoise", "cascade", "end_to_end"])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_the_tensors_that_muon_trains_are_known_by_their_names(
    layer: str, kind: str, optimizer: str
):
    biases = {"model__biases": "all"} if layer == "llama" else {}
    config = run_config(model__layer=layer, objective__kind=kind, **biases)
    config = config.with_settings(train__optimizer=optimizer)
    block = new_block(config, 0)
    form = [TensorForm(name, tuple(p.shape)) for name, p in block.named_parameters()]
    reach = optimizer_reach(config.train, form)
    by_muon = {name.removesuffix(".momentum") for name in moment_shapes(block, config.train)}
    for (name, _), rms in zip(form, reach.rms, strict=True):
        assert (rms < 1) == (name in by_muon), name
    assert any(rms < 1 for rms in reach.rms) == (optimizer == "muon")


@FEW
@given(st.integers(0, 10**6), st.sampled_from([(8, 8), (4, 32), (32, 4), (1, 9)]))
def test_no_step_of_muon_is_longer_than_its_reach(seed: int, shape: tuple[int, int]):
    draws = torch.Generator().manual_seed(seed)
    gradient = torch.randn(shape, generator=draws) ** 3
    gradient[:, 0] *= 100  # far from orthogonal
    step = MUON_SIZE * max(shape) ** 0.5 * orthogonal(gradient[None])[0]
    ((rms,), (largest,)) = optimizer_reach(
        TrainConfig(), [TensorForm("layers.0.qkv.weight", shape)]
    )
    assert step.square().mean().sqrt() <= rms
    assert step.abs().max() <= largest
    assert torch.linalg.svdvals(orthogonal(gradient[None]))[0, 0] <= LARGEST_SINGULAR


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.95, 0.95), (0.0, 0.0)])
@pytest.mark.parametrize("growth", [0.5, 0.9, 1.0, 1.05, 2.0])
def test_no_step_of_adamw_is_longer_than_its_reach(betas: tuple[float, float], growth: float):
    """Not even for gradients that grow or shrink all the time."""
    train = run_config().train
    train = replace(train, beta1=betas[0], beta2=betas[1], weight_decay=0.0, optimizer="adamw")
    module, rate = torch.nn.Linear(1, 1, bias=False), torch.tensor(0.01)
    optimizer = BlockOptimizer(module, train, rate)
    reach = optimizer_reach(train, [TensorForm("weight", (1, 1))])
    for step in range(60):
        before = module.weight.detach().clone()
        module.weight.grad = torch.full((1, 1), min(growth**step, 1e30))
        optimizer.step_unless(torch.zeros((), device=CPU.device))
        assert (module.weight - before).abs().item() <= 0.01 * float(reach.largest[0]) * (1 + 1e-4)


def test_rates_are_those_of_the_schedule():
    config = run_config()
    train = config.train
    expected = sum(train.learning_rate(7 + 3 * step) for step in range(20))
    lease = SimpleNamespace(block=1, schedule_start=7, schedule_stride=3, steps=20)
    assert lease_rates(config, lease) == pytest.approx(expected)


def test_an_update_may_go_as_far_as_the_optimizer_can():
    reach = optimizer_reach(run_config().train, FORM)
    for index, kind in itertools.product(range(3), ("rms", "largest")):
        sizes = Sizes(np.zeros(3), np.zeros(3))
        getattr(sizes, kind)[index] = 0.5 * getattr(reach, kind)[index]
        assert BOUNDS.fault(Move(0.5, sizes), []) == ""
        getattr(sizes, kind)[index] *= 1.1
        fault = BOUNDS.fault(Move(0.5, sizes), [])
        assert f"{FORM[index].name!r}" in fault and "its steps can move it" in fault


def test_one_huge_number_is_refused_though_its_tensor_moves_little():
    assert BOUNDS.fault(move(0.4, 0.05, 0.3), []) == ""
    fault = BOUNDS.fault(move(0.4, 0.05, 8.0), [])
    assert re.search(r"'embed.weight' by 8 \(largest number\).* by 0\.\d+ at most", fault)


def test_decay_and_rounding_allow_for_the_size_of_the_weights():
    large = Sizes(np.full(3, 100.0), np.full(3, 100.0))
    assert BOUNDS.fault(move(0.1, 0.3), [])
    assert BOUNDS.fault(move(0.1, 0.3), [], large) == ""
    assert BOUNDS.fault(move(0.1, 3.0), [], large)
    assert BOUNDS.fault(move(0.0, 1e-3), [], large) == ""


@pytest.mark.parametrize(("codec", "rounding"), [("none", 0), ("bf16", 2**-7), ("int8", 2**-6)])
def test_a_rounded_update_may_contain_a_little_of_earlier_ones(codec: str, rounding: float):
    """As does one of a single step after a hundred."""
    bounds = Bounds(run_config(swarm__codec=codec, swarm__most_steps=100), FORM)
    largest = optimizer_reach(run_config().train, FORM).largest.max()
    most = 0.01 * 0.25 + rounding * 100 * 0.01 * largest
    assert bounds.fault(move(0.01, 0.99 * most), []) == ""
    assert bounds.fault(move(0.01, 1.02 * most), [])


def test_an_update_of_a_sparse_codec_may_contain_what_earlier_leases_learned():
    bounds = Bounds(run_config(swarm__codec="sparse", swarm__most_steps=100), FORM)
    assert bounds.fault(move(0.01, 0.9), []) == ""
    assert bounds.fault(move(0.01, 1.1), [])


@pytest.mark.parametrize("kind", ["rms", "largest"])
def test_an_update_far_above_the_last_ones_is_refused(kind: str):
    share = 0.62  # so that the optimizer could do more
    usual = share * {"rms": 0.2, "largest": 0.4}[kind] * (1 + 3 / math.sqrt(1000))
    history = [each.scaled(np.full(len(FORM), share)) for each in HISTORY]
    for factor, words in ((0.99, ""), (1.01, "by the block's last updates it may move")):
        new = move(10.0, 0.0)
        getattr(new.sizes, kind)[0] = 10 * factor * REFUSED_ABOVE * usual
        fault = BOUNDS.fault(new, history)
        assert words in fault and bool(words) == bool(fault)
        assert BOUNDS.fault(new, history[1:]) == "", "the history is too short"


def test_what_is_usual_grows_with_learning_rates_and_steps():
    """At most in proportion; an update of fewer steps may be smaller only by the square root."""
    for rates, growth in ((1.0, 1.0), (3.0, 3.0), (0.25, 0.5)):
        most = CLIPPED_ABOVE * 0.2 * growth * (1 + 3 / math.sqrt(1000))
        for size, clipped in ((0.99 * most, False), (1.01 * most, True)):
            new = Move(rates, Sizes(np.array([size, 0.0, 0.0]), np.zeros(3)))
            assert (BOUNDS.clip_factors(new, HISTORY) is not None) == clipped


@FEW
@given(st.permutations(range(20)), st.floats(0.1, 10))
def test_the_order_of_the_history_does_not_matter(order: list[int], rates: float):
    moves = [move(0.1 + 0.05 * index, 0.1 * 1.2**index) for index in range(20)]
    new = move(rates, 300.0)
    expected = BOUNDS.clip_factors(new, moves)
    found = BOUNDS.clip_factors(new, [moves[index] for index in order])
    assert expected is not None and found is not None
    assert found.tolist() == expected.tolist()


@FEW
@given(st.floats(1e-3, 1e6), st.floats(1e-3, 1e6))
def test_a_clipped_update_is_not_larger_than_one_and_a_half_times_the_usual(
    rms: float, largest: float
):
    new = move(1.0, rms, largest)
    factors = BOUNDS.clip_factors(new, HISTORY)
    clipped = new if factors is None else new.scaled(factors)
    varies = 1 + 3 / np.sqrt([1000, 1200, 1])
    for size, usual in zip(clipped.sizes, (0.2, 0.4), strict=True):
        reach = 0.1 * optimizer_reach(run_config().train, FORM).largest
        assert (size <= CLIPPED_ABOVE * np.maximum(usual, reach) * varies * (1 + 1e-9)).all()
    assert factors is None or ((factors > 0).all() and (factors <= 1).all() and factors.min() < 1)


def test_usual_updates_are_not_clipped():
    assert BOUNDS.clip_factors(move(1.0, 0.3, 0.6), HISTORY) is None
    assert BOUNDS.clip_factors(move(1.0, 0.0, 0.0), HISTORY) is None


def test_an_update_of_a_codec_that_sends_more_may_be_larger():
    assert BOUNDS.clip_factors(move(1.0, 1.2, 0.4, room=4.0), HISTORY) is None
    assert BOUNDS.clip_factors(move(1.0, 1.2, 0.4), HISTORY) is not None


def test_a_move_survives_json():
    one = Move(0.123456789, Sizes(np.array([1e-9, 2.5]), np.array([3.0, 4e5])), 1.5)
    again = Move.from_json(one.to_json())
    assert (again.rates, again.room) == (one.rates, one.room)
    for sizes, same in zip(one.sizes, again.sizes, strict=True):
        assert same == pytest.approx(sizes, rel=1e-4)


def test_no_worker_alone_defines_what_is_usual():
    def move(rates: float) -> Move:
        return Move(rates, Sizes(np.ones(1), np.ones(1)))

    idle, busy = ("idle", move(0.0)), ("busy", move(1.0))
    assert [each.rates for each in balanced([idle] * 5 + [busy] * 2)] == [0.0, 0.0, 1.0, 1.0]
    assert [each.rates for each in balanced([busy, idle, busy, ("c", move(2.0))])] == [1, 0, 1, 2]
    assert len(balanced([idle] * 5)) == 5
    assert balanced([]) == []
