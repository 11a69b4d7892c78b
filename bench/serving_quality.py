"""Measures what the decoding modes write and what the wire format does to a model, in one process.

Not run by itself: it is the parts `quality`, `wire` and `weights` of bench/serving.py. Prompts are
the first bytes of equal stretches of a text, the same for every model and mode. The judge is
another run, trained end to end. Its score is the mean CE per byte of what a mode wrote, and it
reads every byte with at least half its window before it. Needs torch, numpy, safetensors only.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.support.serving import run_locally, spell_byte, taken, text_of

from blocktrain.config import Config
from blocktrain.model.stack import Stack
from blocktrain.numerics.sampling import Sampling
from blocktrain.serve.ring.activations import WIRE_TYPES, Activations, Row, pack, unpack
from blocktrain.serve.ring.batch import SlotLimits
from blocktrain.serve.ring.compute import BlockSource, StageCompute
from blocktrain.serve.router.decode import (
    AnswerCost,
    Decoding,
    GenerationRequest,
    Proposal,
    TraversalCost,
)
from blocktrain.serve.router.first_block import FirstBlock
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.device import Compute
from blocktrain.training.stored_models import load_stack

GRAM = 4
AT_ONCE = 64  # requests in a batch
INDEPENDENT = "independent guesses"
MODES: dict[str, dict[str, Any]] = {
    "ar": {"mode": "ar"},
    "sweep K=1": {"mode": "sweep", "passes": 1},
    "sweep K=2": {"mode": "sweep", "passes": 2},
    "sweep K=4": {"mode": "sweep", "passes": 4},
    "sweep K=1, drafted": {"mode": "sweep", "passes": 1, "drafts": "head"},
    "sweep K=4, drafted": {"mode": "sweep", "passes": 4, "drafts": "head"},
    "sweep converged": {"mode": "sweep", "passes": 0},
    "speculative": {"mode": "speculative"},
    "speculative, n-grams": {"mode": "speculative", "drafts": "ngram"},
}


@dataclass(frozen=True)
class Model:
    """A run's blocks, the first as a router holds it and every other as a stage does."""

    front: FirstBlock
    stages: Sequence[StageCompute]

    @classmethod
    def load(cls, folder: Path, compute: Compute, readout: str, held: str = "full") -> "Model":
        return cls.of(BlockSource(RunDir.open(folder), held), compute, readout)

    @classmethod
    def of(cls, source: BlockSource, compute: Compute, readout: str) -> "Model":
        limits = SlotLimits(AT_ONCE)
        first, *stages = (
            StageCompute.load(source, range(block, block + 1), compute, readout, limits)
            for block in range(source.config.block_count)
        )
        return cls(FirstBlock(first), stages)

    @property
    def config(self) -> Config:
        return self.front.first.config


class Independent(Decoding):
    """Every byte guessed from the known text alone: all others are MASK, in every block."""

    def _plan(self, most: int) -> tuple[list[int], int, bool]:
        return [self.vocabulary.mask] * most, 0, False

    def _settle(self, found: np.ndarray, right: int) -> int:
        return len(found)


def fixed_prompts(text: np.ndarray, count: int, length: int) -> list[bytes]:
    stride = len(text) // count
    return [text[n * stride : n * stride + length].tobytes() for n in range(count)]


def requests(
    prompts: Sequence[bytes], mode: str, temperature: float, most_bytes: int
) -> list[GenerationRequest]:
    """Each with a seed of its own, the same in every mode."""
    return [
        GenerationRequest(
            prompt, most_bytes, sampling=Sampling(temperature, seed=seed), **MODES[mode]
        )
        for seed, prompt in enumerate(prompts)
    ]


def guessed_independently(
    model: Model, asked: Sequence[GenerationRequest]
) -> list[tuple[bytes, AnswerCost]]:
    """The same blocks once around, no one's guess read by anyone."""
    decodings = [
        Independent(each, model.config, AnswerCost(), TraversalCost(), spell_byte) for each in asked
    ]
    texts = [bytearray() for _ in asked]
    while steps := {n: step for n, each in enumerate(decodings) if (step := each.propose())}:
        rows = [Row(n, step.start, step.ids, step.read) for n, step in steps.items()]
        work = model.front.first.step(Activations(rows), heads=True)
        for stage in model.stages:
            work = stage.step(work)
        for row, log_probs_RV in model.front.answers(work):
            texts[row.request] += text_of(taken(decodings[row.request], row, log_probs_RV))
    for compute in (model.front.first, *model.stages):
        for request in compute.requests:
            compute.release(request)
    return [(bytes(text), each.cost) for text, each in zip(texts, decodings, strict=True)]


def measured(
    model: Model,
    judge: Stack,
    prompts: Sequence[bytes],
    temperature: float,
    most_bytes: int,
    modes: Sequence[str],
) -> list[dict[str, Any]]:
    """Modes, ar among them, on the same prompts, with the same seeds."""
    answers = {
        mode: run_locally(
            model.front, model.stages, requests(prompts, mode, temperature, most_bytes)
        )
        for mode in modes
    }
    as_ar = requests(prompts, "ar", temperature, most_bytes)
    answers[INDEPENDENT] = guessed_independently(model, as_ar)
    sequential = [text for text, _ in answers["ar"]]
    rows = []
    for mode, answer in answers.items():
        texts = [text for text, _ in answer]
        same = [ours == theirs for ours, theirs in zip(texts, sequential, strict=True)]
        traversals = sum(account.traversals for _, account in answer)
        rows.append(
            {
                "mode": mode,
                "temperature": temperature,
                "ce": judged(judge, prompts, texts),
                "same_as_ar": sum(same) / len(same),
                "distinct_grams": distinct_share(texts),
                "bytes_per_traversal": sum(map(len, texts)) / traversals,
                "first": texts[0].decode(errors="replace"),
            }
        )
    return rows


def judged(judge: Stack, prompts: Sequence[bytes], texts: Sequence[bytes]) -> float:
    """Mean CE per byte of texts that are equally long, each after its prompt."""
    window = judge.config.model.window
    whole_BT = np.stack(
        [np.frombuffer(p + t, np.uint8) for p, t in zip(prompts, texts, strict=True)]
    )
    start, end = len(prompts[0]), whole_BT.shape[1]
    total = 0.0
    for first in range(start, end, window // 2):
        last = min(first + window // 2, end)
        begin = max(0, last - window)
        ids_BT = np.full((len(prompts), last - begin), judge.config.vocabulary.bos, np.int64)
        ids_BT[:, 1:] = whole_BT[:, begin : last - 1]
        log_probs = judge.log_probs(torch.from_numpy(ids_BT).to(judge.device))[-1]
        targets = torch.from_numpy(whole_BT[:, first:last].astype(np.int64)).to(judge.device)
        read = log_probs[:, first - begin :].gather(-1, targets[..., None])
        total -= float(read.double().sum())
    return total / (len(prompts) * (end - start))


def distinct_share(texts: Sequence[bytes]) -> float:
    """Of a text's 4-grams, how many are not repetitions; mean over texts."""
    grams = [[text[at : at + GRAM] for at in range(len(text) - GRAM + 1)] for text in texts]
    return float(np.mean([len(set(found)) / len(found) for found in grams]))


def on_the_wire(work: Activations, kind: str) -> Activations:
    """Work as the next stage gets it."""
    readout_RV = work.readout_RV
    if readout_RV.size:
        readout_RV = unpack(pack(readout_RV, kind), kind)
    return replace(work, state=unpack(pack(work.state, kind), kind), readout_RV=readout_RV)


def wire_bytes(work: Activations, kind: str) -> int:
    sent = [each for each in (work.state, work.readout_RV) if each.size]
    return sum(array.nbytes for each in sent for array in pack(each, kind))


def teacher_forced(model: Model, windows_BT: np.ndarray, kind: str) -> tuple[float, float]:
    """CE of a text that is read, not written; and the bytes that a position takes from one stage
    to the next."""
    total, sent = 0.0, 0.0
    for text_T in windows_BT:
        ids, tokens = np.array([model.config.vocabulary.bos, *text_T[:-1]]), 256
        (work,) = model.front.step({0: Proposal(0, ids, len(ids), 0, Sampling(), top=tokens)})
        sent = wire_bytes(work, kind) / len(ids)
        for stage in model.stages:
            work = stage.step(on_the_wire(work, kind))
        told = work.predictions
        assert told is not None
        right_TV = told.top_tokens_RK == text_T[:, None]
        total -= float(told.top_log_probs_RK[right_TV].astype(np.float64).sum())
    return total / windows_BT.size, sent


def wire_differences(
    folder: Path, compute: Compute, readout: str, windows_BT: np.ndarray
) -> list[dict[str, Any]]:
    model = Model.load(folder, compute, readout)
    found = {kind: teacher_forced(model, windows_BT, kind) for kind in WIRE_TYPES}
    exact = found["fp32"][0]
    return [
        {"wire": kind, "ce": ce, "difference": ce - exact, "bytes_per_position": sent}
        for kind, (ce, sent) in found.items()
    ]


def held_differences(
    folder: Path, compute: Compute, readout: str, windows_BT: np.ndarray
) -> list[dict[str, Any]]:
    """What weights in 8 bits do to a model."""
    found = {}
    for held in ("full", "int8"):
        model = Model.load(folder, compute, readout, held)
        found[held] = teacher_forced(model, windows_BT, "fp32")[0]
    return [
        {"weights": held, "ce": ce, "difference": ce - found["full"]} for held, ce in found.items()
    ]


def divergence(
    model: Model, prompts: Sequence[bytes], temperature: float, most_bytes: int
) -> list[dict[str, Any]]:
    """How often a mode that is to say what ar says does not: shapes of batches differ, and so does
    what is rounded in them."""
    told = {
        mode: [
            text
            for text, _ in run_locally(
                model.front, model.stages, requests(prompts, mode, temperature, most_bytes)
            )
        ]
        for mode in ("ar", "speculative", "sweep converged")
    }
    rows = []
    for mode in ("speculative", "sweep converged"):
        agreed = [agreeing(*pair) for pair in zip(told["ar"], told[mode], strict=True)]
        differing = sum(count < most_bytes for count in agreed)
        rows.append(
            {
                "mode": mode,
                "temperature": temperature,
                "answers": len(prompts),
                "differing": differing / len(prompts),
                "per_thousand_bytes": 1e3 * differing / max(1, sum(agreed)),
            }
        )
    return rows


def agreeing(one: bytes, other: bytes) -> int:
    """Bytes before the first that differs."""
    pairs = enumerate(zip(one, other, strict=True))
    return next((at for at, (a, b) in pairs if a != b), len(one))


def load_judge(folder: Path, compute: Compute) -> Stack:
    return load_stack(RunDir.open(folder), compute)


def timed_at_home(
    model: Model, prompts: Sequence[bytes], mode: str, temperature: float, most_bytes: int
) -> list[float]:
    """Seconds of each answer, one after another, all blocks in this process."""
    told = []
    for request in requests(prompts, mode, temperature, most_bytes):
        began = time.perf_counter()
        run_locally(model.front, model.stages, [request])
        told.append(time.perf_counter() - began)
    return told
