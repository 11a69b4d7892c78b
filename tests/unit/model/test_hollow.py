"""A block that is filled weight by weight is the block they came from."""

import pytest
import torch
from tests.support.models import awake_block
from torch import nn

from blocktrain.config import Config
from blocktrain.model.loading import meta_init_block, put, settle, shapes
from blocktrain.model.stack import assemble

CPU = torch.device("cpu")


def filled(
    block: nn.Module, config: Config, index: int, held: str, dtype: torch.dtype
) -> nn.Module:
    hollow = meta_init_block(config, index, held)
    for name, parameter in block.named_parameters():
        put(hollow, name, parameter.detach().clone(), dtype)
    return settle(hollow, CPU, dtype)


@pytest.fixture(params=["denoise", "cascade"])
def kind(request: pytest.FixtureRequest, config: Config) -> Config:
    return config.with_settings(objective__kind=request.param, objective__tail=1)


@pytest.mark.parametrize(("held", "tolerance"), [("full", 0.0), ("int8", 0.02)])
def test_filled_blocks_say_what_the_whole_ones_say(kind: Config, held: str, tolerance: float):
    blocks = [awake_block(kind, index) for index in range(kind.block_count)]
    hollow = [filled(block, kind, n, held, torch.float32) for n, block in enumerate(blocks)]
    ids = torch.tensor([list(b"some bytes of text")])
    exact, found = (assemble(kind, each).log_probs(ids) for each in (blocks, hollow))
    for ours, theirs in zip(found, exact, strict=True):
        assert (ours - theirs).std() <= tolerance * theirs.std()


@pytest.mark.parametrize("held", ["full", "int8"])
def test_it_asks_for_every_weight_and_no_other(kind: Config, held: str):
    for index in range(kind.block_count):
        wanted = {name: p.shape for name, p in awake_block(kind, index).named_parameters()}
        assert shapes(meta_init_block(kind, index, held)) == wanted


def test_nothing_takes_memory_before_it_is_put_in(kind: Config):
    large = kind.with_settings(model__width=1 << 16)  # tens of gigabytes, were they there
    for held in ("full", "int8"):
        assert all(each.is_meta for each in meta_init_block(large, 0, held).parameters())


def test_int8_is_for_the_matrices_of_layers_alone(kind: Config):
    block = filled(awake_block(kind, 0), kind, 0, "int8", torch.bfloat16)
    levels = [name for name, held in block.named_buffers() if held.dtype == torch.int8]
    assert all(name.split(".")[0] in ("layers", "tail") for name in levels)
    assert len(levels) == 4 * (kind.depths[0] + kind.tail_layers(0))
    assert {parameter.dtype for parameter in block.parameters()} == {torch.bfloat16}
    assert {s.dtype for name, s in block.named_buffers() if name.endswith("scale")} == {
        torch.float32
    }
