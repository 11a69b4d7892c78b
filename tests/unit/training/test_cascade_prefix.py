"""The frozen blocks before: near the real ones, small, and as new as what was published."""

import pytest
import torch
from tests.support.models import awake_block
from tests.support.published import Shelf
from tests.support.training import CPU
from torch import Tensor, nn

from blocktrain.config import Config
from blocktrain.model.block import Trunk
from blocktrain.model.linear import Int8Linear, Linear
from blocktrain.model.stack import initial_block
from blocktrain.training.frozen import Prefix


@pytest.fixture
def deep(cascade: Config) -> Config:
    """Three blocks: one, two and one layers."""
    return cascade.with_settings(
        model__layers=4, model__blocks=3, model__depths=[1, 2, 1], model__width=64
    )


@pytest.fixture
def ids() -> Tensor:
    torch.manual_seed(9)
    return torch.randint(0, 256, (4, 32))


def awake_blocks(config: Config, count: int) -> list[nn.Module]:
    return [awake_block(config, block).eval() for block in range(count)]


def shelf_of(blocks: list[nn.Module], version: int = 1) -> Shelf:
    shelf = Shelf()
    for block, module in enumerate(blocks):
        shelf.put(block, version, module)
    return shelf


def refreshed(config: Config, blocks: list[nn.Module]) -> Prefix:
    prefix = Prefix(config, len(blocks), CPU)
    prefix.refresh(shelf_of(blocks))
    return prefix


@torch.no_grad()
def chained(blocks: list[nn.Module], ids: Tensor) -> Tensor:
    x = ids
    for block in blocks:
        x = block.features(x)
    return x


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(("frozen", "tolerance"), [("bf16", 0.015), ("int8", 0.05)])
def test_features_are_near_those_in_full_precision(
    deep: Config, ids: Tensor, frozen: str, tolerance: float
):
    """bf16 keeps 8 bits of a weight, int8 has 127 levels up to a row's largest weight."""
    deep = deep.with_settings(objective__frozen=frozen)
    blocks = awake_blocks(deep, 2)
    exact = chained(blocks, ids)
    assert 0 < distance(refreshed(deep, blocks).features(ids), exact) < tolerance
    assert distance(Prefix(deep, 2, CPU).features(ids), exact) > 0.3  # not refreshed: far off


def test_bf16_is_nearer_than_int8(deep: Config, ids: Tensor):
    blocks = awake_blocks(deep, 2)
    exact = chained(blocks, ids)
    bf16, int8 = (
        distance(refreshed(deep.with_settings(objective__frozen=kind), blocks).features(ids), exact)
        for kind in ("bf16", "int8")
    )
    assert bf16 < int8


@pytest.mark.parametrize("frozen", ["bf16", "int8"])
def test_until_it_is_refreshed_it_is_what_every_machine_starts_from(
    deep: Config, ids: Tensor, frozen: str
):
    deep = deep.with_settings(objective__frozen=frozen)
    prefix = Prefix(deep, 2, CPU)
    start = [initial_block(deep, block).eval() for block in range(2)]
    assert prefix.versions == [None, None]
    assert distance(prefix.features(ids), chained(start, ids)) < 0.01


def linear_weights(config: Config, count: int) -> dict[str, torch.Size]:
    """Name and shape of every linear map of the trunks, from trunks that are not frozen."""
    return {
        f"trunks.{block}.{name}": module.weight.shape
        for block in range(count)
        for name, module in Trunk(config, block).named_modules()
        if isinstance(module, Linear)
    }


def test_int8_is_one_byte_for_every_weight_of_every_linear_map(deep: Config):
    prefix = refreshed(deep.with_settings(objective__frozen="int8"), awake_blocks(deep, 2))
    modules = dict(prefix.named_modules())
    assert not any(isinstance(module, nn.Linear) for module in modules.values())
    wanted = linear_weights(deep, 2)
    assert len(wanted) == 3 * 4
    for name, shape in wanted.items():
        module = modules[name]
        assert isinstance(module, Int8Linear), name
        assert module.levels.dtype == torch.int8
        assert module.levels.shape == shape
        assert module.scale.shape == (shape[0], 1)
        assert module.levels.abs().amax(dim=1).eq(127).all()  # the whole range is used
    held = sum(b.nbytes for b in prefix.buffers() if b.dtype == torch.int8)
    assert held == sum(shape.numel() for shape in wanted.values())


@pytest.mark.parametrize("frozen", ["bf16", "int8"])
def test_parameters_are_held_in_bf16(deep: Config, frozen: str):
    prefix = Prefix(deep.with_settings(objective__frozen=frozen), 2, CPU)
    assert {p.dtype for p in prefix.parameters()} == {torch.bfloat16}
    prefix.refresh(shelf_of(awake_blocks(deep, 2)))
    assert {p.dtype for p in prefix.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("frozen", ["bf16", "int8"])
def test_nothing_in_it_is_trained(deep: Config, ids: Tensor, frozen: str):
    prefix = refreshed(deep.with_settings(objective__frozen=frozen), awake_blocks(deep, 2))
    assert not any(parameter.requires_grad for parameter in prefix.parameters())
    assert not prefix.features(ids).requires_grad
    assert not prefix(ids).requires_grad


@pytest.mark.parametrize("frozen", ["bf16", "int8"])
def test_tails_and_heads_are_not_held(deep: Config, frozen: str):
    prefix = Prefix(deep.with_settings(objective__frozen=frozen), 2, CPU)
    names = [name for name, _ in [*prefix.named_parameters(), *prefix.named_buffers()]]
    assert names
    assert not any(part in ("tail", "head") for name in names for part in name.split("."))
    blocks = awake_blocks(deep, 2)
    assert all(len(block.tail) == 1 for block in blocks)  # though the blocks have them


def test_bf16_holds_the_trunks_weights_and_no_others(deep: Config):
    prefix = Prefix(deep, 2, CPU)
    trunks = [Trunk(deep, k) for k in range(2)]
    assert sum(p.numel() for p in prefix.parameters()) == sum(
        p.numel() for trunk in trunks for p in trunk.parameters()
    )


def test_dropout_is_off_in_it(deep: Config, ids: Tensor):
    deep = deep.with_settings(model__dropout=0.5)
    prefix = refreshed(deep, awake_blocks(deep, 2))
    assert torch.equal(prefix.features(ids), prefix.features(ids))


def test_a_refresh_takes_over_newer_versions_and_leaves_the_others(deep: Config, ids: Tensor):
    shelf = Shelf()
    prefix = Prefix(deep, 2, CPU)
    prefix.refresh(shelf)
    assert shelf.taken == []
    shelf.put(1, 5, awake_block(deep, 1))
    prefix.refresh(shelf)
    assert shelf.taken == [(1, 5)]
    assert prefix.versions == [None, 5]
    first = prefix.features(ids)
    prefix.refresh(shelf)
    assert shelf.taken == [(1, 5)]
    shelf.put(0, 7, awake_block(deep, 0))
    prefix.refresh(shelf)
    assert shelf.taken == [(1, 5), (0, 7)]
    assert prefix.versions == [7, 5]
    assert not torch.equal(prefix.features(ids), first)


@pytest.mark.parametrize("version", [-1, 0, 3, 8])
def test_a_refresh_takes_over_any_other_version_than_it_holds(
    deep: Config, ids: Tensor, version: int
):
    """Step 0 may be a warm start, and a run may choose an older version: all count."""
    shelf = Shelf()
    shelf.put(0, version, awake_block(deep, 0))
    prefix = Prefix(deep, 1, CPU)
    untrained = prefix.features(ids)
    prefix.refresh(shelf)
    assert prefix.versions == [version]
    taken = prefix.features(ids)
    assert not torch.equal(taken, untrained)
    shelf.put(0, 5, awake_block(deep, 0))
    prefix.refresh(shelf)
    shelf.put(0, version, initial_block(deep, 0))
    prefix.refresh(shelf)
    assert shelf.taken == [(0, version), (0, 5), (0, version)]
    assert prefix.versions == [version]
    assert torch.equal(prefix.features(ids), untrained)


def test_it_is_a_snapshot(deep: Config, ids: Tensor):
    """Training goes on underneath what was taken over."""
    blocks = awake_blocks(deep, 2)
    prefix = Prefix(deep, 2, CPU)
    prefix.refresh(shelf_of(blocks))
    before = prefix.features(ids)
    with torch.no_grad():
        for block in blocks:
            for parameter in block.parameters():
                parameter.zero_()
    assert torch.equal(prefix.features(ids), before)
