"""A run on one machine: its blocks one after another, or as processes side by side.

One after another, only one block and its optimizer are ever in memory. Side by side, each block
is a process of its own that reports JSON lines; the blocks exchange nothing.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import filelock
import torch

from blocktrain.config import Config
from blocktrain.data.corpus import Corpus, load_corpus
from blocktrain.errors import BlocktrainError, RunError
from blocktrain.storage.run_dir import BlockDir, RunDir
from blocktrain.train.device import Compute, resolve
from blocktrain.train.pilot import with_fitted_bounds
from blocktrain.train.trainer import BlockTrainer, Progress

OnProgress = Callable[[Progress], None]
ShouldStop = Callable[[], bool]

INTERRUPTED = 130  # the exit code of a child that stopped because it was asked to


def open_run(config: Config, out: Path, corpus: Corpus, compute: Compute) -> RunDir:
    """Start or reopen the run; an adaptive partition is fitted once, when the run starts."""
    if not (out / "config.toml").exists():
        config = with_fitted_bounds(config, corpus, compute)
    return RunDir.create(out, config)


def train_in_turn(
    config: Config, out: Path, blocks: Sequence[int], on_progress: OnProgress, stop: ShouldStop
) -> bool:
    """Train blocks one after another in this process. False: stopped before the end."""
    compute = resolve(config.train.device, config.train.precision)
    corpus = load_corpus(config.data)
    run = open_run(config, out, corpus, compute)
    for block in blocks:
        store = run.block(block)
        with training_lock(store), torch_writer(run, block) as write:
            if store.finished():
                continue
            trainer = BlockTrainer(run.config, block, corpus, compute, store)

            def report(progress: Progress, write: OnProgress = write) -> None:
                write(progress)
                on_progress(progress)

            if not trainer.train(report, stop):
                return False
            del trainer
    return True


def train_side_by_side(
    config: Config,
    out: Path,
    blocks: Sequence[int],
    jobs: int,
    on_progress: OnProgress,
    stop: ShouldStop,
) -> bool:
    """Train each block in a process of its own, `jobs` at a time. False: stopped before the end."""
    compute = resolve(config.train.device, config.train.precision)
    run = open_run(config, out, load_corpus(config.data), compute)
    threads = max(1, torch.get_num_threads() // jobs)

    def train(block: int) -> bool:
        # Ctrl-C reaches the processes that run by itself; those not started stay so.
        return not stop() and _child(run, block, config, threads, on_progress, stop)

    with ThreadPoolExecutor(jobs) as pool:
        return all(list(pool.map(train, blocks)))


def _child(
    run: RunDir,
    block: int,
    config: Config,
    threads: int,
    on_progress: OnProgress,
    stop: ShouldStop,
) -> bool:
    """Train one block in a process. False: it stopped because it, or all of this, was asked to."""
    command = [sys.executable, "-m", "blocktrain.cli.main", "train", "--json"]
    command += ["--config", str(run.path / "config.toml"), "--out", str(run.path)]
    command += ["--block", str(block), "--set", f"train.device={config.train.device}"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout
    errors: list[str] = []
    drain = threading.Thread(target=lambda: errors.extend(process.stderr or ()))
    drain.start()
    names = {item.name for item in fields(Progress)}
    for line in process.stdout:
        record = json.loads(line)
        if names <= record.keys():
            on_progress(Progress(**{name: record[name] for name in names}))
        if stop():  # a signal sent to this process alone
            process.terminate()
    code = process.wait()
    drain.join()
    if code not in (0, INTERRUPTED) and not stop():
        reason = errors[-1].strip().removeprefix("error: ") if errors else f"exit code {code}"
        raise BlocktrainError(f"block {block} failed: {reason}")
    return code == 0


@contextmanager
def training_lock(store: BlockDir) -> Iterator[None]:
    try:
        with store.lock():
            yield
    except filelock.Timeout:
        raise RunError(f"{store.path} is being trained by another process") from None


@contextmanager
def torch_writer(run: RunDir, block: int) -> Iterator[OnProgress]:
    """TensorBoard events beside the run, where the settings ask for them."""
    if not run.config.train.tensorboard:
        yield lambda progress: None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise BlocktrainError(
            "train.tensorboard needs the extra: pip install 'blocktrain[tensorboard]'"
        ) from None
    writer = SummaryWriter(str(run.path / "tensorboard" / f"block-{block}"))

    def write(progress: Progress) -> None:
        for name in ("loss", "ce", "lr", "bytes_per_s", "valid_ce"):
            value = getattr(progress, name)
            if value is not None:
                writer.add_scalar(name, value, progress.step)

    try:
        yield write
    finally:
        writer.close()
