"""The serving decoder with all blocks in one process: what `blocktrain generate` runs."""

from collections.abc import Iterator, Sequence

from blocktrain.errors import MissingPrefixError
from blocktrain.model.stack import Stack
from blocktrain.serve.router.decode import (
    GREEDY,
    AnswerCost,
    Decoding,
    GenerationRequest,
    Piece,
    Sampling,
    TraversalCost,
    new_decoding,
)
from blocktrain.serve.router.first_block import FirstBlock
from blocktrain.serve.stage.batch import Activations, SlotLimits
from blocktrain.serve.stage.compute import StageCompute
from blocktrain.train.device import Compute

ONE_REQUEST = SlotLimits(requests=1, cache_bytes=1 << 62)


def generate(
    stack: Stack,
    prompt: bytes,
    count: int,
    sampling: Sampling = GREEDY,
    *,
    readout: str = "product",
    start: str = "mean",
) -> Iterator[int]:
    """Yield `count` bytes that continue the prompt, one traversal each.

    A stack of the first blocks alone is an early exit. With the start "noise", a denoising model's
    z starts as noise instead of zeros.
    """
    compute = Compute(stack.device, stack.blocks[0].compute_dtype)  # type: ignore[arg-type]
    depth = len(stack.blocks)

    def stage(blocks: range) -> StageCompute:
        modules = stack.blocks[blocks.start : blocks.stop]
        return StageCompute(
            stack.config, blocks, modules, compute, readout, ONE_REQUEST, block_count=depth
        )

    front = FirstBlock(stage(range(1)), noise_start=start == "noise")
    stages = [stage(range(1, depth))] if depth > 1 else []
    request = GenerationRequest(prompt, count, mode="ar", sampling=sampling)
    for _, piece in stream_locally(front, stages, {0: _decoding(front, request)}):
        yield from piece.data


def run_locally(
    front: FirstBlock, stages: Sequence[StageCompute], requests: Sequence[GenerationRequest]
) -> list[tuple[bytes, AnswerCost]]:
    """Every request's answer and what it cost."""
    decodings = {number: _decoding(front, each) for number, each in enumerate(requests)}
    answers = {number: bytearray() for number in decodings}
    for number, piece in stream_locally(front, stages, decodings):
        answers[number] += piece.data
    return [(bytes(answers[number]), each.cost) for number, each in decodings.items()]


def stream_locally(
    front: FirstBlock, stages: Sequence[StageCompute], decodings: dict[int, Decoding]
) -> Iterator[tuple[int, Piece]]:
    """Decode requests together: the next piece of each after every traversal."""
    while going := {n: each for n, each in decodings.items() if not each.finished}:
        for row, log_probs_RV in front.answers(_traversed(front, stages, going)):
            piece = going[row.request].take(row, log_probs_RV)
            if going[row.request].finished:
                for compute in (front.first, *stages):
                    compute.release(row.request)
            yield row.request, piece


def _decoding(front: FirstBlock, request: GenerationRequest) -> Decoding:
    return new_decoding(request, front.first.config.model.window, TraversalCost(), AnswerCost())


def _traversed(
    front: FirstBlock, stages: Sequence[StageCompute], decodings: dict[int, Decoding]
) -> Activations:
    """One proposal of each request through all blocks; a context that a cache lost is replayed."""
    while True:
        proposals = {n: proposal for n, each in decodings.items() if (proposal := each.propose())}
        try:
            activations = front.step(proposals)
            for stage in stages:
                if prefills := front.prefills(proposals):
                    stage.prefill(prefills)
                activations = stage.step(activations)
        except MissingPrefixError as missing:
            for number in missing.requests:
                decodings[number].replay()
        else:
            return activations
