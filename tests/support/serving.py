"""A model's blocks as stages in this process, and what a model says without a cache."""

from collections.abc import Callable, Sequence
from time import monotonic

import numpy as np
import torch
from torch import Tensor

from blocktrain.config import Config
from blocktrain.model import readout as readouts
from blocktrain.model.stack import DenoisingStack, Stack
from blocktrain.numerics.sampling import mixed_seed, pick
from blocktrain.serve.router.decode import GenerationRequest, Sampling
from blocktrain.serve.router.first_block import NOISE_STREAM, FirstBlock
from blocktrain.serve.router.local import run_locally
from blocktrain.serve.stage.batch import DEFAULT_LIMITS, Row, SlotLimits, initial
from blocktrain.serve.stage.compute import StageCompute
from blocktrain.train.device import resolve
from blocktrain.vocabulary import BOS

CPU = resolve("cpu", "fp32")


def stage(
    stack: Stack,
    blocks: range,
    readout: str = "product",
    limits: SlotLimits = DEFAULT_LIMITS,
    clock: Callable[[], float] = monotonic,
) -> StageCompute:
    modules = stack.blocks[blocks.start : blocks.stop]
    return StageCompute(stack.config, blocks, modules, CPU, readout, limits, clock)


def ring(stack: Stack, readout: str = "product") -> tuple[FirstBlock, list[StageCompute]]:
    """The first block in front; the second alone, then all others together."""
    count = len(stack.blocks)
    cuts = [range(1, min(2, count)), range(2, count)]
    front = FirstBlock(stage(stack, range(1), readout))
    return front, [stage(stack, blocks, readout) for blocks in cuts if blocks]


def answers(
    stack: Stack, requests: Sequence[GenerationRequest], readout: str = "product"
) -> list[bytes]:
    return [data for data, _ in run_locally(*ring(stack, readout), requests)]


def of_kind(config: Config, kind: str) -> Config:
    """Three blocks of one layer, those of a cascade with a tail of one."""
    return config.with_settings(
        model__layers=3, model__blocks=3, objective__kind=kind, objective__tail=1
    )


def stepped(stack: Stack, ids_BT: Tensor, lengths: Sequence[int]) -> np.ndarray:
    """The last block's log-probabilities at every position, read piece by piece with a cache."""
    blocks = range(len(stack.blocks))
    compute = StageCompute(
        stack.config, blocks, stack.blocks, CPU, "final", block_count=len(blocks)
    )
    pieces, start = [], 0
    for length in lengths:
        new = ids_BT[:, start : start + length].numpy().astype(np.uint16)
        rows = [Row(number, start, ids, length) for number, ids in enumerate(new)]
        pieces.append(compute.step(initial(rows)).readout_RV.reshape(len(rows), length, -1))
        start += length
    return np.concatenate(pieces, axis=1)


def reference_text(
    stack: Stack,
    prompt: bytes,
    count: int,
    sampling: Sampling,
    readout: str = "product",
    start: str = "mean",
) -> bytes:
    """One byte after another, each from its whole context without a cache. When the window is
    full, the newer half of the text is read as a fresh context."""
    window = stack.config.model.window
    text, begin = bytearray(prompt), max(0, len(prompt) - (window - 1))
    for _ in range(count):
        if len(text) - begin >= window:
            begin = len(text) - window // 2
        seed = mixed_seed(sampling.seed, len(text), NOISE_STREAM)
        blocks = _next_log_probs(stack, torch.tensor([[BOS, *text[begin:]]]), start, seed)
        log_probs = readouts.read(readout, [block[0, -1] for block in blocks]).numpy()
        text.append(pick(log_probs, sampling, len(text)))
    return bytes(text[len(prompt) :])


def _next_log_probs(stack: Stack, ids_1T: Tensor, start: str, seed: int) -> list[Tensor]:
    if start == "mean" or not isinstance(stack, DenoisingStack):
        return stack.log_probs(ids_1T)
    z = stack.starting_point("mean", ids_1T.shape)
    z[:, -1:] = stack.starting_point(start, torch.Size([1, 1]), seed)
    return stack.traverse(stack.read_contexts(ids_1T), z)
