"""Pinned numbers: a refactor must reproduce them.

Bytes, seeds and generated text are compared exactly. Losses and log-probabilities are floats that
different processors round differently, so they are compared to 1e-4. To pin anew after a
deliberate change of numerics: delete golden.json, run this test once, and say in the commit why.

On one machine a refactor can be held to the same bits. Set BLOCKTRAIN_GOLDEN_EXACT to a file: a run
writes it if it is missing, and compares with it bit for bit if it is there. So, with one file:

    git checkout OLD && BLOCKTRAIN_GOLDEN_EXACT=/tmp/exact.json pytest tests/golden
    git checkout NEW && BLOCKTRAIN_GOLDEN_EXACT=/tmp/exact.json pytest tests/golden

The exact file also holds digests of trained weights and losses in bfloat16. It is worth nothing on
another machine, or with another build of torch or numpy.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.coordinator import SetClock, join, running, tensors_of
from tests.support.published import Shelf

from blocktrain.codec import update_codec
from blocktrain.codec.frames import encode
from blocktrain.config import Config, SwarmConfig
from blocktrain.data.corpus import Corpus, TrainingWindows, evaluation_windows, shifted
from blocktrain.model.block import target_table
from blocktrain.model.stack import READOUTS, Stack, assemble, product, read_out
from blocktrain.numerics.merge import Contribution, MergeRule, finite_floats
from blocktrain.numerics.sampling import Sampling, mixed_seed
from blocktrain.serve.router.first_block import generate
from blocktrain.training.device import resolve
from blocktrain.training.trainer import BlockTrainer

PINNED = Path(__file__).with_name("golden.json")
EXACT = "BLOCKTRAIN_GOLDEN_EXACT"
STEPS = 6
PROMPT = b"the "

Numbers = dict[str, Any]


def measured(config: Config, corpus: Corpus, folder: Path) -> tuple[Numbers, Numbers]:
    """What golden.json pins, and what only the exact file does."""
    windows = TrainingWindows(corpus.splits["train"], 32, 4, seed=11)
    batches = b"".join(windows[index].tobytes() for index in (0, 1, 57, 1000))
    table = np.round(target_table(7, 256).numpy(), 5) + 0.0
    end_to_end = config.with_settings(objective__kind="end_to_end")
    adamw = config.with_settings(train__optimizer="adamw", train__lr=3e-3)
    cascade = config.with_settings(
        objective__kind="cascade", objective__tail=1, objective__refresh_every=STEPS // 2,
        model__layers=3, model__blocks=3,
    )  # fmt: skip
    denoising, of_denoising = denoising_stack(config, corpus)
    chained, of_cascade = cascade_stack(cascade, corpus)
    _, of_longer_tails = cascade_stack(cascade.with_settings(objective__tail=2), corpus)
    _, of_int8 = cascade_stack(cascade.with_settings(objective__frozen="int8"), corpus)
    pinned = {
        "seeds": [mixed_seed(0), mixed_seed(1, 2), mixed_seed(0, 1, 3, 99)],
        "batches": hashlib.sha256(batches).hexdigest(),
        "table": [float(x) for x in table[[0, 17, 255], [3, 99, 200]]],
        "bounds": list(config.partition().bounds),
        "denoise": losses(new_trainer(config, 1, corpus)),
        "end_to_end": losses(new_trainer(end_to_end, 0, corpus)),
        "adamw": losses(new_trainer(adamw, 1, corpus)),
        "cascade": {
            "of one layer's tails": of_cascade,
            "of two layers' tails": of_longer_tails,
            "before it in int8": of_int8,
        },
        "readouts": {
            "denoise": scores(denoising, corpus, ("mean", "noise")),
            "cascade": scores(chained, corpus, ("mean",)),
        },
        "generated": {"denoise": texts(denoising), "cascade": texts(chained)},
        "codecs": {name: encoded_digest(name) for name in ("bf16", "int8", "sparse")},
        "merge": merged_digests(),
        "versions": merged_versions(folder),
    }
    _, denoise_in_bf16 = denoising_stack(config, corpus, "bf16")
    _, cascade_in_bf16 = cascade_stack(cascade, corpus, "bf16")
    exact = {
        "weights": {"denoise": stack_digest(denoising), "cascade": stack_digest(chained)},
        "denoise losses": of_denoising,
        "bf16": {"denoise": denoise_in_bf16, "cascade": cascade_in_bf16},
    }
    return pinned, exact


# Training


def new_trainer(
    config: Config,
    block: int,
    corpus: Corpus,
    published: Shelf | None = None,
    precision: str = "fp32",
) -> BlockTrainer:
    return BlockTrainer(config, block, corpus, resolve("cpu", precision), None, published)


def losses(trainer: BlockTrainer, steps: int = STEPS) -> list[float]:
    result = []
    for _ in range(steps):
        trainer.train_step()
        result.append(float(trainer.last_loss))
    return result


def denoising_stack(
    config: Config, corpus: Corpus, precision: str = "fp32"
) -> tuple[Stack, list[list[float]]]:
    trainers = [
        new_trainer(config, block, corpus, None, precision) for block in range(config.block_count)
    ]
    found = [losses(trainer) for trainer in trainers]
    return assemble(config, [trainer.module for trainer in trainers]), found


def cascade_stack(
    config: Config, corpus: Corpus, precision: str = "fp32"
) -> tuple[Stack, dict[str, list[float]]]:
    """Every block makes half of its steps and publishes, twice: at its second turn it reads newer
    versions of the blocks before it."""
    shelf = Shelf()
    trainers = [
        new_trainer(config, block, corpus, shelf, precision) for block in range(config.block_count)
    ]
    found: dict[str, list[float]] = {name: [] for name in ("first", "middle", "last")}
    for _ in range(2):
        for name, trainer in zip(found, trainers, strict=True):
            found[name] += losses(trainer, STEPS // 2)
            shelf.put(trainer.block, trainer.step, trainer.module)
    halves = [STEPS // 2, STEPS]
    assert shelf.taken == [(0, halves[0]), (0, halves[0]), (1, halves[0]),
                           (0, halves[1]), (0, halves[1]), (1, halves[1])]  # fmt: skip
    return assemble(config, [trainer.module for trainer in trainers]), found


# What the trained blocks say


def scores(stack: Stack, corpus: Corpus, starts: tuple[str, ...]) -> Numbers:
    """Cross entropy of two windows, by every block and by both readouts."""
    windows = evaluation_windows(corpus.splits["valid"], stack.config.model.window, 2)
    ids, targets = torch.tensor(shifted(windows)).long(), torch.tensor(windows).long()
    result: Numbers = {}
    for start in starts:
        blocks = stack.log_probs(ids, start, seed=5)
        named = {f"block {index}": log_probs for index, log_probs in enumerate(blocks)}
        named |= {name: read_out(name, blocks) for name in READOUTS}
        named["product weighted"] = product(blocks, [0.3, 0.6, 0.2][: len(blocks)])
        result[start] = {
            name: float(-log_probs.gather(-1, targets[..., None]).mean())
            for name, log_probs in named.items()
        }
        result[start]["last position"] = named["product"][0, -1, 97:105].tolist()
    return result


def texts(stack: Stack) -> dict[str, str]:
    """A few bytes; with a long prompt, on past the end of the window."""
    window = stack.config.model.window
    result = {}
    for name in READOUTS:
        for start in ("mean", "noise"):
            sampling = Sampling(temperature=0.8, seed=3)
            prompt = PROMPT * (window // len(PROMPT) - 1)
            made = bytes(generate(stack, prompt, 12, sampling, readout=name, start=start))
            result[f"{name} {start}"] = made.hex()
    return result


# What travels, and what it is merged to


def an_update(count: int = 150_000) -> np.ndarray:
    """More than two frames of numbers of very different sizes, exactly the same everywhere."""
    draws = np.random.default_rng(42)
    sizes = np.exp2(draws.integers(-12, 0, count)).astype(np.float32)
    return (draws.integers(-1000, 1001, count).astype(np.float32) / 1024) * sizes


def encoded_digest(name: str) -> str:
    codec = update_codec(SwarmConfig(codec=name, top_k_per_4096=64))
    assert codec
    return hashlib.sha256(b"".join(encode(an_update(), codec))).hexdigest()


def merged_digests() -> dict[str, str]:
    """Two updates, the second late, merged twice with outer momentum."""
    rule = MergeRule(rate=0.7, momentum=0.9)
    current, velocity = an_update(1000), None
    result = {}
    for number in (1, 2):
        start = current * np.float32(0.875)
        updates = [
            Contribution("a", current + an_update(2000)[1000:] / number, 320.0),
            Contribution("b", start - an_update(3000)[2000:], 96.0, start, 0.5),
        ]
        target, velocity = rule.combine(current, updates, velocity)
        current = finite_floats(target)
        assert velocity is not None
        result[f"weights {number}"] = digest({"": current})
        result[f"velocity {number}"] = digest({"": velocity})
    return result


def merged_versions(folder: Path) -> dict[str, str]:
    """The same through a coordinator: two workers' updates of a block, and the version's files."""
    settings = {
        "swarm__quorum": 2, "swarm__outer_rate": 0.7, "swarm__outer_momentum": 0.9,
        "train__lr": 100.0,
    }  # fmt: skip
    result = {}
    with running(folder, SetClock(), **settings) as service:
        first, second = join(service), join(service)
        for number in (1, 2):
            ten, three = first.lease(blocks=(0,)), second.lease(blocks=(0,), steps_per_second=0.1)
            assert (ten.steps, three.steps) == (10, 3)
            first.send(first.make(ten, by=0.5))
            second.send(second.make(three, by=-0.25))
            assert service.merger.merge_due() == 1
            with service.run.ledger.read() as tx:
                version = tx.versions.get(0)
            assert version.version == number and version.velocity is not None
            result[f"weights {number}"] = digest(tensors_of(service.run, version.weights))
            result[f"velocity {number}"] = digest(tensors_of(service.run, version.velocity))
    return result


# Comparing


def digest(tensors: Mapping[str, np.ndarray]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(f"{name} {tensors[name].dtype} {tensors[name].shape} ".encode())
        found.update(np.ascontiguousarray(tensors[name]).tobytes())
    return found.hexdigest()


def stack_digest(stack: Stack) -> list[str]:
    return [
        digest({name: p.detach().numpy() for name, p in block.named_parameters()})
        for block in stack.blocks
    ]


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Every number and text by its place."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, part in pairs for k, v in leaves(part, f"{path}/{key}").items()}
    return {path: value}


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Measured once, by the first test that asks."""
    kept: list[tuple[Numbers, Numbers]] = []

    def get(config: Config, corpus: Corpus) -> tuple[Numbers, Numbers]:
        if not kept:
            kept.append(measured(config, corpus, tmp_path_factory.mktemp("run")))
        return kept[0]

    return get


def test_numbers_are_the_pinned_ones(numbers: Any, config: Config, corpus: Corpus):
    found, _ = numbers(config, corpus)
    if not PINNED.exists():
        PINNED.write_text(json.dumps(found, indent=1) + "\n")
        pytest.fail(f"{PINNED.name} was missing and has been written: look at it and commit it")
    expected, found = leaves(json.loads(PINNED.read_text())), leaves(found)
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        if isinstance(value, float):
            assert found[path] == pytest.approx(value, abs=1e-4), path
        else:
            assert found[path] == value, path


@pytest.mark.skipif(EXACT not in os.environ, reason=f"{EXACT} names no file to compare with")
def test_numbers_are_the_same_bits_as_before(numbers: Any, config: Config, corpus: Corpus):
    found = leaves(list(numbers(config, corpus)))
    exact = Path(os.environ[EXACT])
    if not exact.exists():
        exact.write_text(json.dumps(found, indent=1) + "\n")
        pytest.skip(f"{exact} was missing and has been written")
    expected = json.loads(exact.read_text())
    assert found.keys() == expected.keys()
    different = [path for path in expected if repr(found[path]) != repr(expected[path])]
    assert not different, f"{len(different)} of {len(expected)} numbers differ: {different[:20]}"
