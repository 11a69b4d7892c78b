"""A model's blocks as stages in this process, and what a model says without a cache."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from time import monotonic

import numpy as np
import torch
from tests.support.models import awake_stack
from torch import Tensor

from blocktrain.config import Config, load_config
from blocktrain.config.presets import config_path
from blocktrain.errors import MissingPrefixError
from blocktrain.model.stack import DenoisingStack, Stack, read_out
from blocktrain.numerics.sampling import Sampling, adjustments, mixed_seed
from blocktrain.serve.ring.activations import Activations, Choice, Row, joined
from blocktrain.serve.ring.batch import DEFAULT_LIMITS, SlotLimits, picks, predictions
from blocktrain.serve.ring.compute import StageCompute
from blocktrain.serve.router.decode import (
    AnswerCost,
    Decoding,
    GenerationRequest,
    TraversalCost,
    new_decoding,
)
from blocktrain.serve.router.first_block import NOISE_STREAM, DraftModel, FirstBlock
from blocktrain.serve.router.output import OutputToken, Spell
from blocktrain.training.device import resolve

CPU = resolve("cpu", "fp32")
WINDOW = 16


def pick(log_probs_V: np.ndarray, sampling: Sampling, position: int) -> int:
    return int(picks(torch.from_numpy(log_probs_V)[None], [sampling], [position])[0])


def spell_byte(token: int) -> bytes:
    return bytes([token])


def text_of(tokens: Sequence[OutputToken]) -> bytes:
    return b"".join(token.data for token in tokens)


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


def run_locally(
    front: FirstBlock, stages: Sequence[StageCompute], requests: Sequence[GenerationRequest]
) -> list[tuple[bytes, AnswerCost]]:
    """Every request's answer and what it cost."""
    return [(text_of(each), cost) for each, cost in generated(front, stages, requests)]


def generated(
    front: FirstBlock,
    stages: Sequence[StageCompute],
    requests: Sequence[GenerationRequest],
    spell: Spell = spell_byte,
    draft: DraftModel | None = None,
) -> list[tuple[list[OutputToken], AnswerCost]]:
    """The same as tokens."""
    config = front.first.config
    decodings = {
        number: new_decoding(each, config, AnswerCost(), TraversalCost(), spell)
        for number, each in enumerate(requests)
    }
    answers = {number: list(each.opening) for number, each in decodings.items()}
    while unfinished := {n: each for n, each in decodings.items() if not each.finished}:
        for part in front.split(_traversed(front, stages, unfinished, draft)):
            (row,), predicted = part.rows, part.predictions
            answers[row.request] += unfinished[row.request].take(row, predicted)
            if unfinished[row.request].finished:
                for compute in (front.first, *stages, *([draft] if draft else [])):
                    compute.release(row.request)
    return [(answers[number], each.cost) for number, each in decodings.items()]


def taken(decoding: Decoding, row: Row, log_probs_RV: np.ndarray) -> list[OutputToken]:
    """What becomes final by these predictions for a row that was proposed."""
    proposal = decoding.propose()
    assert proposal
    predicted = predictions(torch.from_numpy(log_probs_RV), [row], proposal.top)
    return decoding.take(row, predicted)


def _traversed(
    front: FirstBlock,
    stages: Sequence[StageCompute],
    decodings: Mapping[int, Decoding],
    draft: DraftModel | None = None,
) -> Activations:
    """One proposal of each answer through all blocks; a context that a cache lost is replayed."""
    while True:
        proposals = {n: proposal for n, each in decodings.items() if (proposal := each.propose())}
        if draft:
            proposals = draft.drafted(proposals)
        try:
            activations = joined(front.step(proposals))
            for stage in stages:
                if prefills := front.prefills(proposals):
                    stage.prefill(prefills)
                activations = stage.step(activations)
            return activations
        except MissingPrefixError as missing:
            for number in missing.requests:
                decodings[number].replay()


def answers(
    stack: Stack, requests: Sequence[GenerationRequest], readout: str = "product"
) -> list[bytes]:
    return [data for data, _ in run_locally(*ring(stack, readout), requests)]


def of_kind(config: Config, kind: str) -> Config:
    """Three blocks of one layer, those of a cascade with a tail of one."""
    return config.with_settings(
        model__layers=3, model__blocks=3, objective__kind=kind, objective__tail=1
    )


@lru_cache
def small_stack(kind: str) -> Stack:
    """Three blocks with random heads, and windows of WINDOW bytes."""
    tiny = ["model.width=16", "model.heads=2", f"model.window={WINDOW}"]
    return awake_stack(of_kind(load_config(config_path("tiny"), tiny), kind))


def stepped(stack: Stack, ids_BT: Tensor, lengths: Sequence[int]) -> np.ndarray:
    """The last block's log-probabilities at every position, read piece by piece with a cache."""
    top = stack.config.vocabulary.size
    blocks = range(len(stack.blocks))
    compute = StageCompute(
        stack.config, blocks, stack.blocks, CPU, "final", block_count=len(blocks)
    )
    pieces, start = [], 0
    for length in lengths:
        new = ids_BT[:, start : start + length].numpy()
        rows = [Row(number, start, ids, length, Choice(top=top)) for number, ids in enumerate(new)]
        log_probs = all_log_probs(compute.step(Activations(rows)))
        pieces.append(log_probs.reshape(len(rows), length, -1))
        start += length
    return np.concatenate(pieces, axis=1)


def all_log_probs(activations: Activations) -> np.ndarray:
    """By token, if all were asked for as the likeliest."""
    told = activations.predictions
    found = np.empty_like(told.top_log_probs_RK)
    np.put_along_axis(found, told.top_tokens_RK, told.top_log_probs_RK, axis=1)
    return found


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
    window, bos = stack.config.model.window, stack.config.vocabulary.bos
    text, begin = bytearray(prompt), max(0, len(prompt) - (window - 1))
    for _ in range(count):
        if len(text) - begin >= window:
            begin = len(text) - window // 2
        seed = mixed_seed(sampling.seed, len(text), NOISE_STREAM)
        blocks = _next_log_probs(stack, torch.tensor([[bos, *text[begin:]]]), start, seed)
        log_probs = read_out(readout, [block[0, -1] for block in blocks]).detach().numpy()
        answer = np.array([*text[max(begin, len(prompt)) :]], np.int64)
        counts = np.bincount(answer, minlength=len(log_probs))
        adjusted = (log_probs + adjustments(sampling, counts)).astype(np.float32)
        text.append(pick(adjusted, sampling, len(text)))
    return bytes(text[len(prompt) :])


def _next_log_probs(stack: Stack, ids_1T: Tensor, start: str, seed: int) -> list[Tensor]:
    if start == "mean" or not isinstance(stack, DenoisingStack):
        return stack.log_probs(ids_1T)
    z = stack.starting_point("mean", ids_1T.shape)
    z[:, -1:] = stack.starting_point(start, torch.Size([1, 1]), seed)
    predictions = stack.traverse(stack.read_contexts(ids_1T), z)
    return [torch.log_softmax(logits(slice(None)), dim=-1) for logits in predictions]
