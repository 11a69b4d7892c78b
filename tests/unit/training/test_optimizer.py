"""Muon against what it is by definition, and against torch's own."""

import pytest
import torch
from tests.support.training import CPU, quiet
from torch import Tensor, nn

from blocktrain.config import Config, ModelConfig, TrainConfig
from blocktrain.data.corpus import Corpus
from blocktrain.errors import RunError
from blocktrain.model.layer import Layer, LocalLayer
from blocktrain.model.linear import Linear
from blocktrain.model.stack import new_block
from blocktrain.training import optimizer as optimizer_module
from blocktrain.training.optimizer import (
    MOMENTUM,
    BlockOptimizer,
    moment_shapes,
    orthogonal,
)
from blocktrain.training.trainer import BlockTrainer

RATE = 0.01


@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 32, 8), (2, 8, 32)])
def test_singular_values_come_near_one_and_directions_stay(shape: tuple[int, int, int]):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = orthogonal(matrices)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.5 and values.max() < 1.3
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    along = left.mT @ found @ right.mT  # the same singular vectors: diagonal there
    assert (along - torch.diag_embed(along.diagonal(dim1=1, dim2=2))).abs().max() < 1e-4


def test_a_matrix_without_gradient_direction_stays_at_nothing():
    assert not orthogonal(torch.zeros(1, 4, 4)).any()


class OneMatrix(LocalLayer):
    """A layer of which the output map alone is looked at."""

    def __init__(self) -> None:
        super().__init__(
            ModelConfig(width=16, heads=2, mlp_ratio=2.0, activation="gelu", taps=1, dropout=0.0)
        )


def stepped(layer: nn.Module, gradients: list[dict[str, Tensor]], settings: TrainConfig) -> None:
    optimizer = BlockOptimizer(layer, settings, torch.tensor(RATE))
    for gradient in gradients:
        for name, parameter in layer.named_parameters():
            parameter.grad = gradient[name].clone()
        optimizer.step_unless(torch.zeros(()))


def some_gradients(layer: nn.Module, count: int) -> list[dict[str, Tensor]]:
    draws = torch.Generator().manual_seed(1)
    return [
        {name: torch.randn(p.shape, generator=draws) for name, p in layer.named_parameters()}
        for _ in range(count)
    ]


def test_a_whole_matrix_is_stepped_as_by_torchs_own_muon():
    """Theirs rounds to bfloat16, and its scale is ours: alike to that rounding."""
    torch.manual_seed(0)
    layer = OneMatrix()
    before = layer.out.weight.detach().clone()
    theirs = nn.Parameter(before.clone())
    gradients = some_gradients(layer, 3)
    reference = torch.optim.Muon(
        [theirs], lr=RATE, weight_decay=0.1, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"
    )
    for gradient in gradients:
        theirs.grad = gradient["out.weight"].clone()
        reference.step()
    stepped(layer, gradients, TrainConfig(weight_decay=0.1))
    moved, expected = layer.out.weight - before, theirs - before
    assert (moved - expected).norm() / expected.norm() < 0.03


def test_maps_side_by_side_are_stepped_one_by_one():
    """Queries, keys and values share a matrix in memory, not an orthogonal step."""
    torch.manual_seed(0)
    layer = OneMatrix()
    before = layer.qkv.weight.detach().clone()
    stepped(layer, some_gradients(layer, 1), TrainConfig(weight_decay=0.0))
    for part in (layer.qkv.weight - before).chunk(3):
        values = torch.linalg.svdvals(part.detach()) / (RATE * 0.2 * 16**0.5)
        assert values.min() > 0.5 and values.max() < 1.3


def test_a_few_at_once_are_stepped_like_all_together(monkeypatch: pytest.MonkeyPatch):
    results = []
    for at_once in (2**25, 1):
        monkeypatch.setattr(optimizer_module, "AT_ONCE", at_once)
        torch.manual_seed(0)
        layers = nn.ModuleList(OneMatrix() for _ in range(3))
        stepped(layers, some_gradients(layers, 2), TrainConfig())
        results.append(torch.cat([p.detach().flatten() for p in layers.parameters()]))
    assert torch.allclose(*results, atol=1e-6)


def test_one_moment_for_matrices_of_layers_two_for_all_else(config: Config, corpus: Corpus):
    trainer = BlockTrainer(config, 0, corpus, CPU, None)
    trainer.train(quiet, until=1)
    in_layers = {
        f"{name}.{part_name}.weight"
        for name, layer in trainer.module.named_modules()
        if isinstance(layer, Layer)
        for part_name, part in layer.named_modules()
        if isinstance(part, Linear)
    }
    kept = {name: set() for name, _ in trainer.module.named_parameters()}
    for moment in trainer.moments():
        name, _, key = moment.rpartition(".")
        kept[name].add(key)
    assert {name for name, keys in kept.items() if keys == {"momentum"}} == in_layers
    rest = [keys for name, keys in kept.items() if name not in in_layers]
    assert rest and all(keys == {"step", "exp_avg", "exp_avg_sq"} for keys in rest)
    shapes = {name: moment.shape for name, moment in trainer.moments().items()}
    assert shapes == moment_shapes(trainer.module, config.train)


def test_adamw_alone_keeps_two_moments_of_everything(config: Config):
    block = new_block(config, 0)
    settings = config.with_settings(train__optimizer="adamw").train
    shapes = moment_shapes(block, settings)
    assert len(shapes) == 3 * len(list(block.parameters()))


def test_without_muon_every_bit_is_that_of_torchs_own_adamw(config: Config):
    settings = config.with_settings(train__optimizer="adamw", train__weight_decay=0.1).train
    torch.manual_seed(0)
    ours, theirs = OneMatrix(), OneMatrix()
    theirs.load_state_dict(ours.state_dict())
    gradients = some_gradients(ours, 3)
    stepped(ours, gradients, settings)
    undecayed = set(theirs.undecayed())
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in theirs.parameters() if p not in undecayed]},
            {"params": list(undecayed), "weight_decay": 0.0},
        ],
        lr=RATE, betas=(settings.beta1, settings.beta2), weight_decay=0.1, fused=True,
    )  # fmt: skip
    for gradient in gradients:
        for name, parameter in theirs.named_parameters():
            parameter.grad = gradient[name].clone()
        reference.step()
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, theirs.get_parameter(name)), name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_with_the_flag_set_changes_nothing(optimizer: str):
    layer = OneMatrix()
    stepping = BlockOptimizer(layer, TrainConfig(optimizer=optimizer), torch.tensor(RATE))
    (gradient,) = some_gradients(layer, 1)
    for bad in (0.0, 1.0):
        for name, parameter in layer.named_parameters():
            parameter.grad = gradient[name] if not bad else torch.full_like(parameter, torch.nan)
        before = {name: p.detach().clone() for name, p in layer.named_parameters()}
        kept = {p: {k: v.clone() for k, v in s.items()} for p, s in stepping.state.items()}
        stepping.step_unless(torch.tensor(bad))
        moved = [not torch.equal(p, before[name]) for name, p in layer.named_parameters()]
        assert all(moved) if not bad else not any(moved)
    assert kept
    for parameter, state in kept.items():
        for key, value in state.items():
            assert torch.equal(stepping.state[parameter][key], value), key


def test_what_another_optimizer_kept_is_refused(config: Config, corpus: Corpus):
    trainers = [
        BlockTrainer(config.with_settings(train__optimizer=name), 0, corpus, CPU, None)
        for name in ("adamw", "muon")
    ]
    for trainer, other in zip(trainers, trainers[::-1], strict=True):
        trainer.train(quiet, until=1)
        with pytest.raises(RunError, match=r"does not fit train\.optimizer"):
            other.take_moments(trainer.moments())


SETTINGS = TrainConfig(steps=1000, warmup=100, lr=2e-3, lr_floor=0.1)


def test_the_rate_warms_up_peaks_and_ends_at_the_floor():
    assert SETTINGS.learning_rate(0) == pytest.approx(2e-5)
    assert SETTINGS.learning_rate(1000) == pytest.approx(2e-4)
    assert max(SETTINGS.learning_rate(s) for s in range(1000)) <= 2e-3
    assert SETTINGS.learning_rate(100) > 1.9e-3


def test_after_the_warm_up_it_only_falls():
    rates = [SETTINGS.learning_rate(s) for s in range(100, 1200)]
    assert rates == sorted(rates, reverse=True)


def test_no_warm_up_starts_at_the_peak():
    assert TrainConfig(warmup=0, lr=1e-3).learning_rate(0) == pytest.approx(1e-3)
