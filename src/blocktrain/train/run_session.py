"""A run on one machine: its blocks are trained one after another, or as processes side by side.

One after another, only one block and its optimizer are in memory at a time. Side by side, each
block is a process that reports JSON lines. Blocks exchange no gradient; those of a cascade read the
versions that the blocks before them have saved in the run.
"""

import json
import subprocess
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
from blocktrain.train.checkpoints import Progress
from blocktrain.train.device import Compute, resolve
from blocktrain.train.pilot import with_fitted_bounds
from blocktrain.train.trainer import BlockTrainer

OnProgress = Callable[[Progress], None]
ShouldStop = Callable[[], bool]

INTERRUPTED = 130  # the exit code of a process that a signal stopped
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class LocalRun:
    """An open run, its text, and the device and number type it computes with here."""

    run: RunDir
    corpus: Corpus
    compute: Compute

    def notes(self, blocks: Sequence[int]) -> list[str]:
        """What a person should know before these blocks are trained."""
        config, notes = self.run.config, self._resumed(blocks)
        if max(blocks) > 0 and (size := cache_bytes(config)):
            where = config.objective.feature_cache
            notes.append(f"feature cache: {size / 1e6:,.0f} MB per block, {where}")
        if config.kind.reads_predecessors:
            before = set(range(max(blocks))) - set(blocks)
            missing = [block for block in sorted(before) if not self.run.block(block).versions()]
            if missing:
                notes.append(
                    f"warning: block {max(blocks)} reads features of blocks that have no version"
                    f" yet: {', '.join(map(str, missing))}; train those first"
                )
        return notes

    def _resumed(self, blocks: Sequence[int]) -> list[str]:
        stores = [self.run.block(block) for block in blocks]
        done = [str(store.index) for store in stores if store.finished()]
        finished = [f"already finished: block {', '.join(done)}"] if done else []
        return finished + [
            f"block {store.index} resumes at step {store.versions()[-1].step}"
            for store in stores
            if store.versions() and not store.finished()
        ]

    def train_in_turn(
        self, blocks: Sequence[int], on_progress: OnProgress, stop: ShouldStop
    ) -> bool:
        """Train blocks one after another in this process. False: `stop` ended it early."""
        return all(self._train(block, on_progress, stop) for block in blocks)

    def train_side_by_side(
        self,
        blocks: Sequence[int],
        jobs: int,
        on_progress: OnProgress,
        stop: ShouldStop,
        program: Sequence[str],
    ) -> bool:
        """Train each block in a process of its own, `jobs` at a time; in a cascade each begins when
        the one before has its lead. `program` starts the blocktrain command. False: `stop` ended it
        early. If one fails, the others are stopped and its error is raised."""
        share = max(1, torch.get_num_threads() // jobs)
        failed = threading.Event()
        stopped: set[int] = set()

        def halt() -> bool:
            return stop() or failed.is_set()

        def begins(block: int) -> bool:
            """Wait until the block before has its lead; False if that will not happen."""
            while block - 1 in blocks and not self._has_lead(block - 1):
                if halt() or block - 1 in stopped:
                    return False
                time.sleep(POLL_SECONDS)
            return not halt()

        def train(block: int) -> bool:
            command = [*program, *_child_options(self.run, block, share)]
            done = begins(block) and _train_in_child(command, block, on_progress, halt)
            if not done:
                stopped.add(block)
            return done

        with ThreadPoolExecutor(jobs) as pool:
            tasks = [pool.submit(train, block) for block in sorted(blocks)]
            if any(task.exception() for task in wait(tasks, return_when=FIRST_EXCEPTION).done):
                failed.set()
        finished = [task.result() for task in tasks]  # raises the error of a block that failed
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
                    f"block {block} does not fit into the memory of {self.compute.device}; raise"
                    " train.accumulate, lower train.batch, or set train.checkpoint_layers=true"
                ) from None


def open_session(config: Config, out: Path) -> LocalRun:
    """Create a run, or open it to resume; an adaptive partition is fitted when it is created."""
    compute = resolve(config.train.device, config.train.precision)
    corpus = load_corpus(config.data)
    with RunDir(out, config).lock():
        if not RunDir.resumes(out, config):
            config = with_fitted_bounds(config, corpus, compute)
        run = RunDir.create(out, config)
    if run.exported:
        raise RunError(
            f"{out} is an exported model, which cannot be trained on; name it in the"
            " train.warm_start of another run instead"
        )
    return LocalRun(run, corpus, compute)


def _child_options(run: RunDir, block: int, threads: int) -> list[str]:
    settings = run.config.train
    options = ["train", "--json", "--block", str(block), "--threads", str(threads)]
    options += ["--config", str(run.path / "config.toml"), "--out", str(run.path)]
    options += ["--set", f"train.device={settings.device}"]
    return [*options, "--set", f"train.tensorboard={str(settings.tensorboard).lower()}"]


def _train_in_child(
    command: Sequence[str], block: int, on_progress: OnProgress, halt: ShouldStop
) -> bool:
    """Train one block in a process. False: a signal or `halt` stopped it early."""
    errors: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
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
    """Wait for a child process; `halt` terminates it, once, since it may be saving."""
    terminated = False
    while True:
        try:
            return process.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            if halt() and not terminated:
                process.terminate()
                terminated = True


@contextmanager
def training_lock(store: BlockDir) -> Iterator[None]:
    try:
        with store.lock():
            yield
    except filelock.Timeout:
        raise RunError(
            f"another process is training {store.path}; wait for it, or stop it first"
        ) from None


@contextmanager
def tensorboard_writer(run: RunDir, block: int) -> Iterator[OnProgress]:
    """Writes TensorBoard events beside the run if train.tensorboard is set."""
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
