"""What bench/speed.py and bench/memory.py compare, on what data, and how they print it.

Not run by itself. The contenders, each a real training step on random bytes:

- end-to-end with all layers (by AdamW and by Muon), and with the layers of one denoising block;
- one denoising block;
- the last block of a cascade, and the one before it, which has a tail, each behind all earlier
  blocks;
- end-to-end with as many layers as such a worker trains;
- `plain`: an ordinary PyTorch loop with the shape of the first one.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch._dynamo
from torch import Tensor

from blocktrain.config import BYTE_VOCABULARY, Config
from blocktrain.data.corpus import Corpus
from blocktrain.training.device import Compute
from blocktrain.training.trainer import BlockTrainer
from lockstep import Board
from plain import PlainLoop

CORPUS_BYTES = 1 << 24
WORKER_COMPILE_THREADS = 4  # of each worker: they run side by side


@dataclass(frozen=True)
class Contender:
    key: str
    name: str
    config: Config
    block: int = 0


def contenders(config: Config) -> list[Contender]:
    """The plain loop steps by AdamW, so all do; what Muon costs is a contender's own question."""
    config = config.with_settings(train__optimizer="adamw")
    model = config.model
    depth = model.layers // model.blocks
    whole = config.with_settings(objective__kind="end_to_end")
    block = config.with_settings(objective__kind="denoise")
    cascade = config.with_settings(objective__kind="cascade")
    last, own = cascade.block_count - 1, cascade.depths[-1]
    return [
        Contender("end_to_end", f"end-to-end, {model.layers} layers", whole),
        Contender(
            "muon",
            f"end-to-end, {model.layers} layers, by Muon",
            whole.with_settings(train__optimizer="muon"),
        ),
        Contender("causal", f"causal LM, {depth} layers", _of_depth(whole, depth)),
        Contender("denoise", f"denoising block, {depth} layers", block),
        Contender("fitting", f"causal LM, {own} layers", _of_depth(whole, own)),
        Contender(
            "tailed",
            f"block {last - 1} of a cascade, {cascade.depths[last - 1]} layers and a tail,"
            f" {sum(cascade.depths[: last - 1])} frozen",
            cascade,
            last - 1,
        ),
        Contender(
            "cascade",
            f"last block of a cascade, {own} layers, {model.layers - own} frozen",
            cascade,
            last,
        ),
        Contender("plain", f"plain PyTorch loop, {model.layers} layers", whole),
    ]


def _of_depth(whole: Config, layers: int) -> Config:
    return whole.with_settings(
        model__layers=layers, model__blocks=1, model__depths=(), objective__bounds=()
    )


def random_corpus(seed: int) -> Corpus:
    data = np.random.default_rng(seed).integers(0, BYTE_VOCABULARY.size, CORPUS_BYTES, np.uint8)
    return Corpus("random bytes", {"train": data, "valid": data, "test": data}, {})


class Ours:
    """The project's own trainer, one real step at a time."""

    def __init__(self, config: Config, block: int, corpus: Corpus, compute: Compute) -> None:
        self.trainer = BlockTrainer(config, block, corpus, compute, None, Board())
        self.trainer.module.train()
        self.optimizer = self.trainer.optimizer

    def step(self) -> None:
        self.trainer.train_step()

    def last_loss(self) -> float:
        return float(self.trainer.last_loss)


class Runner(Protocol):
    optimizer: torch.optim.Optimizer

    def step(self) -> None: ...

    def last_loss(self) -> float: ...


def new_runner(contender: Contender, block: int, corpus: Corpus, compute: Compute) -> Runner:
    if contender.key == "plain":
        return PlainLoop(contender.config, corpus, compute)
    return Ours(contender.config, block, corpus, compute)


def parameters(runner: Runner) -> list[Tensor]:
    return [p for group in runner.optimizer.param_groups for p in group["params"]]


def parameter_count(runner: Runner) -> int:
    return sum(p.numel() for p in parameters(runner))


def refuse_eager_fallback() -> None:
    """Contenders share code that is compiled once per depth: make a full cache an error.

    By default the compiler, past its limit of versions of one function, goes on uncompiled.
    """
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def argument_parser(description: str) -> argparse.ArgumentParser:
    """The options of every bench; `--worker KEY` marks a process that run_worker has started."""
    parser = argparse.ArgumentParser(description=description.split("\n", maxsplit=1)[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", nargs="*", default=[], help="section.key=value ...")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


def run_worker(
    args: argparse.Namespace, key: str, options: Sequence[str] = (), settings: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """The running script again, in a process of its own, for one contender."""
    command = [sys.executable, sys.argv[0], "--worker", key, *options]
    command += ["--config", str(args.config), "--out", str(args.out)]
    command += ["--set", *args.set, *settings]
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": str(WORKER_COMPILE_THREADS)}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def write_report(
    path: Path, config: Config, compute: Compute, started: float, sections: dict[str, Any]
) -> None:
    """Write a bench's JSON, and say where and how; `started`: time.perf_counter() then."""
    report = {
        "torch": torch.__version__,
        "device": compute.name,
        "seed": config.train.seed,
        "config": config.to_dict(),
        **sections,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1))
    took = time.perf_counter() - started
    print(
        f"{compute.name}, torch {torch.__version__}, seed {config.train.seed}, {took:.0f} s, {path}"
    )


def markdown(title: str, header: str, rows: Sequence[Sequence[str]]) -> list[str]:
    columns = header.count("|") + 1
    lines = [f"### {title}", "", f"| {header} |", "|" + "---|" * columns]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]
