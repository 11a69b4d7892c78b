"""A model's blocks as stages in this process."""

from collections.abc import Callable, Sequence
from time import monotonic

from blocktrain.config import Config
from blocktrain.model.stack import Stack
from blocktrain.serve.router.decode import Request
from blocktrain.serve.router.front import FirstBlock
from blocktrain.serve.router.local import run_locally
from blocktrain.serve.stage.batch import DEFAULT_LIMITS, SlotLimits
from blocktrain.serve.stage.compute import StageCompute
from blocktrain.train.device import resolve

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


def answers(stack: Stack, requests: Sequence[Request], readout: str = "product") -> list[bytes]:
    return [data for data, _ in run_locally(*ring(stack, readout), requests)]


def of_kind(config: Config, kind: str) -> Config:
    """Three blocks of one layer, those of a cascade with a tail of one."""
    return config.with_settings(
        model__layers=3, model__blocks=3, objective__kind=kind, objective__tail=1
    )
