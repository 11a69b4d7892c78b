"""Step-by-step generation: one byte per traversal, keys and values cached.

The randomness of position i depends on (seed, i) alone. When the window is full, the newer half
of the text is read again as a fresh context.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from blocktrain.model import readout
from blocktrain.model.stack import Stack
from blocktrain.numerics import sampling as choice
from blocktrain.numerics.sampling import mixed_seed
from blocktrain.vocabulary import BOS

NOISE_STREAM = 1


@dataclass(frozen=True)
class GenerationOptions:
    temperature: float = 1.0
    seed: int = 0
    start: str = "mean"
    readout: str = "product"


def generate(stack: Stack, prompt: bytes, count: int, sampling: GenerationOptions) -> Iterator[int]:
    """Yield `count` bytes that continue the prompt."""
    window = stack.config.model.window
    text = list(prompt)
    fresh = [BOS, *text[-(window - 1) :]]
    caches = stack.new_caches()
    rule = choice.Sampling(sampling.temperature, seed=sampling.seed)
    for _ in range(count):
        if caches[0].length + len(fresh) > window:
            caches = stack.new_caches()
            fresh = [BOS, *text[-(window // 2) :]]
        ids = torch.tensor([fresh], device=stack.device)
        seed = mixed_seed(sampling.seed, len(text), NOISE_STREAM)
        every_head = sampling.readout == "product"
        blocks = stack.advance(ids, caches, sampling.start, seed, every_head=every_head)
        log_probs = readout.read(sampling.readout, [block[:, -1] for block in blocks])[0]
        byte = choice.pick(log_probs.cpu().numpy(), rule, len(text))
        text.append(byte)
        fresh = [byte]
        yield byte
