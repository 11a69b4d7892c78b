import pytest
import torch
from tests.support.models import awake_stack

from blocktrain.config import Config
from blocktrain.model import readout
from blocktrain.model.generation import GenerationOptions, generate
from blocktrain.vocabulary import BOS


def test_generation_is_fixed_by_its_seed(config: Config):
    stack = awake_stack(config)
    first = bytes(generate(stack, b"abc", 20, GenerationOptions(seed=1)))
    assert first == bytes(generate(stack, b"abc", 20, GenerationOptions(seed=1)))
    assert first != bytes(generate(stack, b"abc", 20, GenerationOptions(seed=2)))


@pytest.mark.parametrize("start", ["mean", "noise"])
def test_randomness_belongs_to_the_position(config: Config, start: str):
    """Stopping after a byte and going on gives what not stopping gives."""
    stack = awake_stack(config)
    whole = bytes(generate(stack, b"ab", 6, GenerationOptions(seed=3, start=start)))
    rest = bytes(generate(stack, b"ab" + whole[:1], 5, GenerationOptions(seed=3, start=start)))
    assert whole[1:] == rest


def test_greedy_takes_the_likeliest_byte_of_whole_window_scoring(config: Config):
    stack = awake_stack(config)
    text = list(b"hello")
    for byte in generate(stack, b"hello", 12, GenerationOptions(temperature=0.0)):
        ids = torch.tensor([[BOS, *text]])
        expected = readout.product(stack.log_probs(ids))[0, -1].argmax()
        assert byte == expected
        text.append(byte)


def test_generation_goes_on_past_the_window_and_with_a_long_prompt(config: Config):
    stack = awake_stack(config)
    assert len(bytes(generate(stack, b"x" * 100, 80, GenerationOptions()))) == 80
    assert (
        len(bytes(generate(stack, b"", 3, GenerationOptions(start="noise", readout="final")))) == 3
    )
