"""Causal blocks and the cascade they make: what is handed on, what is private."""

import pytest
import torch
from tests.support.models import awake_block, awake_stack
from torch import Tensor

from blocktrain.config import BYTE_VOCABULARY, Config
from blocktrain.errors import ConfigError
from blocktrain.model.block import CausalBlock
from blocktrain.model.stack import CausalStack, Stack, assemble, initial_block, new_block


@pytest.fixture
def three(cascade: Config) -> Config:
    """Blocks of one, one and two layers; the first two with a tail of two."""
    return cascade.with_settings(
        model__layers=4, model__blocks=3, model__depths=[1, 1, 2], objective__tail=2
    )


@pytest.fixture
def ids() -> Tensor:
    torch.manual_seed(9)
    return torch.cat(
        [torch.full((2, 1), BYTE_VOCABULARY.bos), torch.randint(0, BYTE_VOCABULARY.size, (2, 19))],
        dim=1,
    )


def joined(stack: Stack) -> CausalBlock:
    """The trunks of a cascade as one block: the model it would be without seams."""
    config = stack.config.with_settings(objective__kind="end_to_end")
    whole = new_block(config, 0)
    assert isinstance(whole, CausalBlock)
    whole.embed = stack.blocks[0].embed
    whole.layers = torch.nn.ModuleList(layer for block in stack.blocks for layer in block.layers)
    whole.head = stack.blocks[-1].head
    return whole.eval()


@torch.no_grad()
def test_features_block_by_block_are_those_of_all_layers_in_one(three: Config, ids: Tensor):
    stack = awake_stack(three)
    whole = joined(stack)
    assert len(whole.layers) == three.model.layers
    x = ids
    for block in stack.blocks:
        x = block.features(x)
    assert torch.equal(x, whole.features(ids))
    assert torch.equal(stack.log_probs(ids)[-1], torch.log_softmax(whole(ids), dim=-1))


@torch.no_grad()
def test_a_cascade_of_one_block_is_the_end_to_end_model(cascade: Config, ids: Tensor):
    one = cascade.with_settings(model__blocks=1)
    end_to_end = one.with_settings(objective__kind="end_to_end")
    block, whole = awake_block(one), new_block(end_to_end, 0)
    whole.load_state_dict(block.state_dict())
    assert torch.equal(block(ids), whole(ids))
    for a, b in zip(
        initial_block(one, 0).parameters(), initial_block(end_to_end, 0).parameters(), strict=True
    ):
        assert torch.equal(a, b)


def test_only_the_first_block_reads_bytes_and_only_the_last_has_no_tail(three: Config):
    blocks = [new_block(three, block) for block in range(3)]
    assert [block.embed is not None for block in blocks] == [True, False, False]
    assert [len(block.tail) for block in blocks] == [2, 2, 0]
    assert [len(block.layers) for block in blocks] == [1, 1, 2]


@torch.no_grad()
def test_a_tail_is_private(three: Config, ids: Tensor):
    """Whatever block 0 predicts through, the blocks after it see the same."""
    stack = awake_stack(three)
    before = stack.log_probs(ids)
    for parameter in [*stack.blocks[0].tail.parameters(), stack.blocks[0].head.weight]:
        parameter.add_(torch.randn_like(parameter))
    after = stack.log_probs(ids)
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert torch.equal(before[2], after[2])


@torch.no_grad()
def test_a_trunk_is_not_private(three: Config, ids: Tensor):
    stack = awake_stack(three)
    before = stack.log_probs(ids)
    for parameter in stack.blocks[0].layers.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    for a, b in zip(before, stack.log_probs(ids), strict=True):
        assert not torch.allclose(a, b, atol=1e-3)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("kind", ["cascade", "denoise"])
def test_the_first_blocks_alone_answer_as_they_do_in_the_whole(
    three: Config, ids: Tensor, kind: str, count: int
):
    stack = awake_stack(three.with_settings(objective__kind=kind))
    whole = stack.log_probs(ids)
    early = stack.first(count)
    assert type(early) is type(stack)
    assert len(early.blocks) == count
    answers = early.log_probs(ids)
    assert len(answers) == count
    for a, b in zip(answers, whole, strict=False):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["cascade", "denoise", "end_to_end"])
def test_no_more_blocks_can_be_used_than_there_are(three: Config, kind: str):
    stack = awake_stack(three.with_settings(objective__kind=kind))
    count = len(stack.blocks)
    assert stack.first(None).blocks == stack.first(count).blocks == stack.blocks
    with pytest.raises(ConfigError, match=f"after {count + 1} blocks: .* only {count}"):
        stack.first(count + 1)


def test_a_stack_without_noise_has_no_use_for_a_start(cascade: Config, ids: Tensor):
    stack = assemble(cascade, [awake_block(cascade, block) for block in range(2)])
    assert isinstance(stack, CausalStack)
    for a, b in zip(stack.log_probs(ids, "mean"), stack.log_probs(ids, "noise", 3), strict=True):
        assert torch.equal(a, b)
