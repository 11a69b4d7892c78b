"""Generation in one process: what `blocktrain generate` does."""

import pytest
from tests.support.models import awake_stack
from tests.support.serving import of_kind, reference_text

from blocktrain.config import Config
from blocktrain.numerics.sampling import Sampling
from blocktrain.serve.router.first_block import generate

SAMPLED = Sampling(1.0, seed=3)


def test_generation_is_fixed_by_its_seed(config: Config):
    stack = awake_stack(config)
    first = bytes(generate(stack, b"abc", 20, Sampling(1.0, seed=1)))
    assert first == bytes(generate(stack, b"abc", 20, Sampling(1.0, seed=1)))
    assert first != bytes(generate(stack, b"abc", 20, Sampling(1.0, seed=2)))


@pytest.mark.parametrize("start", ["mean", "noise"])
def test_stopping_after_a_byte_and_going_on_changes_nothing(config: Config, start: str):
    stack = awake_stack(config)
    whole = bytes(generate(stack, b"ab", 6, SAMPLED, start=start))
    assert whole[1:] == bytes(generate(stack, b"ab" + whole[:1], 5, SAMPLED, start=start))


@pytest.mark.parametrize("start", ["mean", "noise"])
@pytest.mark.parametrize("readout", ["product", "final"])
@pytest.mark.parametrize("blocks", [None, 1, 2])
@pytest.mark.parametrize("kind", ["denoise", "cascade"])
def test_generated_text_is_the_models_without_a_cache(
    config: Config, kind: str, blocks: int | None, readout: str, start: str
):
    """Past the window, from a long prompt; by all blocks and by the first ones alone."""
    stack = awake_stack(of_kind(config, kind)).first(blocks)
    for prompt in (b"", b"x" * 100):
        text = bytes(generate(stack, prompt, 40, SAMPLED, readout=readout, start=start))
        assert text == reference_text(stack, prompt, 40, SAMPLED, readout, start)
    greedy = bytes(generate(stack, b"hello", 12, readout=readout, start=start))
    assert greedy == reference_text(stack, b"hello", 12, Sampling(), readout, start)


def test_a_noise_start_is_not_a_mean_start(config: Config):
    stack = awake_stack(config)
    texts = {bytes(generate(stack, b"", 30, SAMPLED, start=start)) for start in ("mean", "noise")}
    assert len(texts) == 2
