"""A run on one machine: its blocks one after another, or as processes side by side.

One after another, only one block and its optimizer are ever in memory. Side by side, each block
is a process of its own that reports JSON lines. Blocks exchange no gradient; those of a cascade
read the versions that the blocks before them have saved in the run.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import filelock
import torch

from blocktrain.config import Config
from blocktrain.data.corpus import Corpus, load_corpus
from blocktrain.errors import BlocktrainError, DeviceError, RunError
from blocktrain.storage.run_dir import BlockDir, RunDir
from blocktrain.train.cascade import PublishedRun, cache_bytes
from blocktrain.train.device import Compute, resolve
from blocktrain.train.pilot import with_fitted_bounds
from blocktrain.train.trainer import BlockTrainer, Progress

OnProgress = Callable[[Progress], None]
ShouldStop = Callable[[], bool]

INTERRUPTED = 130  # the exit code of a process that stopped because it was asked to
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class LocalRun:
    """An open run, its text, and what it computes with here."""

    run: RunDir
    corpus: Corpus
    compute: Compute

    def notes(self, blocks: Sequence[int]) -> list[str]:
        """What whoever trains these blocks should know before they do."""
        config, found = self.run.config, self._resumed(blocks)
        if max(blocks) > 0 and (size := cache_bytes(config)):
            where = config.objective.feature_cache
            found.append(f"feature cache: {size / 1e6:,.0f} MB per block, {where}")
        if config.kind.reads_predecessors:
            before = set(range(max(blocks))) - set(blocks)
            missing = [block for block in sorted(before) if not self.run.block(block).versions()]
            if missing:
                found.append(
                    f"warning: block {max(blocks)} reads blocks that have no version yet:"
                    f" {', '.join(map(str, missing))}"
                )
        return found

    def _resumed(self, blocks: Sequence[int]) -> list[str]:
        stores = [self.run.block(block) for block in blocks]
        done = [str(store.index) for store in stores if store.finished()]
        found = [f"finished before: block {', '.join(done)}"] if done else []
        return found + [
            f"block {store.index} goes on from step {store.versions()[-1].step}"
            for store in stores
            if store.versions() and not store.finished()
        ]

    def train_in_turn(
        self, blocks: Sequence[int], on_progress: OnProgress, stop: ShouldStop
    ) -> bool:
        """Train blocks one after another in this process. False: stopped before the end."""
        return all(self._train(block, on_progress, stop) for block in blocks)

    def train_side_by_side(
        self, blocks: Sequence[int], jobs: int, on_progress: OnProgress, stop: ShouldStop
    ) -> bool:
        """Train each block in a process of its own, `jobs` at a time; in a cascade each begins when
        the one before has its lead. False: stopped before the end. When one fails, the others are
        stopped and its error is raised."""
        share = max(1, torch.get_num_threads() // jobs)
        failed = threading.Event()
        stopped: set[int] = set()

        def halt() -> bool:
            return stop() or failed.is_set()

        def begins(block: int) -> bool:
            """Once the block before has its lead; never, if that was stopped without one."""
            while block - 1 in blocks and not self._has_lead(block - 1):
                if halt() or block - 1 in stopped:
                    return False
                time.sleep(POLL_SECONDS)
            return not halt()

        def train(block: int) -> bool:
            done = begins(block) and _train_in_child(self.run, block, share, on_progress, halt)
            if not done:
                stopped.add(block)
            return done

        with ThreadPoolExecutor(jobs) as pool:
            tasks = [pool.submit(train, block) for block in sorted(blocks)]
            if any(task.exception() for task in wait(tasks, return_when=FIRST_EXCEPTION).done):
                failed.set()
        finished = [task.result() for task in tasks]  # raises what a block raised
        return all(finished)

    def _has_lead(self, block: int) -> bool:
        config, store = self.run.config, self.run.block(block)
        made = max((version.step for version in store.versions()), default=0)
        return store.finished() or made >= config.lead * config.train.steps

    def _train(self, block: int, on_progress: OnProgress, stop: ShouldStop) -> bool:
        store = self.run.block(block)
        with training_lock(store), tensorboard_writer(self.run, block) as write:
            if store.finished():
                return True

            def report(progress: Progress) -> None:
                write(progress)
                on_progress(progress)

            try:
                trainer = BlockTrainer(
                    self.run.config,
                    block,
                    self.corpus,
                    self.compute,
                    store,
                    PublishedRun(self.run),
                )
                return trainer.train(report, stop)
            except torch.OutOfMemoryError:
                raise DeviceError(
                    f"block {block} does not fit into the memory of {self.compute.device}: raise"
                    " train.accumulate, lower train.batch, or set train.checkpoint_layers=true"
                ) from None


def open_session(config: Config, out: Path) -> LocalRun:
    """Start or reopen a run; an adaptive partition is fitted once, when the run starts."""
    compute = resolve(config.train.device, config.train.precision)
    corpus = load_corpus(config.data)
    with RunDir(out, config).lock():
        if not RunDir.resumes(out, config):
            config = with_fitted_bounds(config, corpus, compute)
        run = RunDir.create(out, config)
    if run.exported:
        raise RunError(f"{out} is an exported model: it can be used, or warm-start another run")
    return LocalRun(run, corpus, compute)


def _train_in_child(
    run: RunDir, block: int, share: int, on_progress: OnProgress, halt: ShouldStop
) -> bool:
    """Train one block in a process. False: it stopped because it, or all of this, was asked to."""
    command = [sys.executable, "-m", "blocktrain.cli.main", "train", "--json"]
    command += ["--config", str(run.path / "config.toml"), "--out", str(run.path)]
    command += ["--block", str(block), "--threads", str(share)]
    command += ["--set", f"train.device={run.config.train.device}"]
    command += ["--set", f"train.tensorboard={str(run.config.train.tensorboard).lower()}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    errors: list[str] = []
    readers = [
        threading.Thread(target=_report, args=(process, on_progress)),
        threading.Thread(target=lambda: errors.extend(process.stderr or ())),
    ]
    for reader in readers:
        reader.start()
    code = _wait(process, halt)
    for reader in readers:
        reader.join()
    if code not in (0, INTERRUPTED) and not halt():
        reason = errors[-1].strip().removeprefix("error: ") if errors else f"exit code {code}"
        raise BlocktrainError.of_exit_code(code)(f"block {block}: {reason}")
    return code == 0


def _report(process: "subprocess.Popen[str]", on_progress: OnProgress) -> None:
    names = [item.name for item in fields(Progress)]
    for line in process.stdout or ():
        record = json.loads(line)
        on_progress(Progress(**{name: record[name] for name in names}))


def _wait(process: "subprocess.Popen[str]", halt: ShouldStop) -> int:
    """Wait for a child; pass on a stop that was asked of this process alone, once."""
    told = False
    while True:
        try:
            return process.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            if halt() and not told:
                process.terminate()
                told = True


@contextmanager
def training_lock(store: BlockDir) -> Iterator[None]:
    try:
        with store.lock():
            yield
    except filelock.Timeout:
        raise RunError(f"{store.path} is being trained by another process") from None


@contextmanager
def tensorboard_writer(run: RunDir, block: int) -> Iterator[OnProgress]:
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
