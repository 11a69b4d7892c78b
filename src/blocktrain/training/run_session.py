"""A run on one machine: blocks are trained one after another, in turns, or side by side in
processes.

An adaptive partition is fitted first, to the loss of a pilot block that trains on all noise levels.
"""

import json
import logging
import math
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
from blocktrain.data.corpus import Corpus, evaluation_windows, shifted
from blocktrain.data.corpus_builder import OnProgress
from blocktrain.data.run_text import new_text, refuse_other_tokenizer, stored_text
from blocktrain.errors import BlocktrainError, ConfigError, DeviceError, RunError
from blocktrain.memory import is_out_of_memory
from blocktrain.numerics.noise import LogNormal, fitted_partition
from blocktrain.numerics.sampling import mixed_seed
from blocktrain.storage.block_dir import BlockDir
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.cascade import PublishedRun
from blocktrain.training.checkpoints import Progress
from blocktrain.training.device import Compute, resolve
from blocktrain.training.estimation import cache_bytes
from blocktrain.training.loggers import progress_logger
from blocktrain.training.objective import Denoise
from blocktrain.training.trainer import BlockTrainer

GRID_POINTS = 13
GRID_WINDOWS = 16
GRID_STREAM = 4


def with_fitted_bounds(config: Config, corpus: Corpus, compute: Compute) -> Config:
    """The config with bounds fitted by a pilot; unchanged unless the partition is adaptive."""
    objective = config.objective
    if not config.kind.denoises or objective.partition != "adaptive" or objective.bounds:
        return config
    sigmas, losses = loss_by_sigma(config, corpus, compute)
    prior = LogNormal(objective.p_mean, objective.p_std)
    partition = fitted_partition(config.model.blocks, sigmas, losses, objective.overlap, prior)
    return config.with_settings(objective__bounds=partition.bounds)


def loss_by_sigma(
    config: Config, corpus: Corpus, compute: Compute
) -> tuple[list[float], list[float]]:
    """Train a pilot and measure its loss on held-out text. Returns an even grid in ln(sigma), and
    the loss at each sigma."""
    trainer = BlockTrainer(_pilot_config(config), 0, corpus, compute, store=None)
    trainer.train(lambda progress: None)
    objective = trainer.objective
    assert isinstance(objective, Denoise)
    window = config.model.window
    targets = evaluation_windows(corpus.split("valid", window), window, GRID_WINDOWS)
    low, high = math.log(config.objective.sigma_min), math.log(config.objective.sigma_max)
    sigmas = [
        math.exp(low + (high - low) * point / (GRID_POINTS - 1)) for point in range(GRID_POINTS)
    ]
    sigmas[0], sigmas[-1] = config.objective.sigma_min, config.objective.sigma_max
    losses = []
    context = shifted(targets, config.vocabulary)
    trainer.module.eval()
    for sigma in sigmas:
        torch.manual_seed(mixed_seed(config.train.seed, GRID_STREAM))
        batch = objective.batch_at(targets, context, [sigma] * len(targets)).to(compute.device)
        with torch.no_grad():
            losses.append(float(objective.loss(trainer.module, batch).ce))
    return sigmas, losses


def _pilot_config(config: Config) -> Config:
    """One block as deep as the run's, over all sigmas, for a few steps."""
    steps = config.objective.pilot_steps
    return config.with_settings(
        model__layers=max(config.depths),
        model__blocks=1,
        model__depths=(),
        objective__partition="lognormal",
        train__steps=steps,
        train__extended_at=(),
        train__warmup=min(config.train.warmup, max(1, steps // 10)),
        train__eval_every=0,
        train__keep="last",
        train__warm_start="",
        train__compile=False,
    )


OnTrained = Callable[[Progress], None]
ShouldStop = Callable[[], bool]

INTERRUPTED = 130  # the exit code of a process that a signal stopped
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class LocalRun:
    """An open run, its text, and the device and dtype that it uses on this machine."""

    run: RunDir
    corpus: Corpus
    compute: Compute

    def notes(self, blocks: Sequence[int]) -> list[str]:
        """Notes and warnings for the user before these blocks are trained."""
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
        self, blocks: Sequence[int], on_progress: OnTrained, stop: ShouldStop
    ) -> bool:
        """Train blocks in turn in this process. Returns False if `stop` ended it early. In an
        extended run, no block goes on before all have reached the former end."""
        return all(
            self._train(block, until, on_progress, stop)
            for until in self.run.config.stops()
            for block in blocks
        )

    def train_side_by_side(
        self,
        blocks: Sequence[int],
        jobs: int,
        on_progress: OnTrained,
        stop: ShouldStop,
        program: Sequence[str],
    ) -> bool:
        """Train each block in a process of its own, `jobs` at a time. In a cascade a block begins
        once the one before has its lead. `program` is the command that runs blocktrain. Returns
        False if `stop` ended it early. If a block fails, stop the others and raise its error."""
        config = self.run.config
        if config.kind.reads_successors:
            raise ConfigError(
                "objective.kind = turns trains one block at a time; leave out --parallel"
            )
        if config.turn_steps and config.train.extended_at:
            raise ConfigError(
                "an extended relay trains its blocks in several turns, one block at a time; leave"
                " out --parallel"
            )
        share = max(1, torch.get_num_threads() // jobs)
        failed = threading.Event()
        stopped: set[int] = set()

        def halt() -> bool:
            return stop() or failed.is_set()

        def await_lead(block: int) -> bool:
            """Wait until the block before has its lead. Returns False if it will not get it."""
            while block - 1 in blocks and not self._has_lead(block - 1, block):
                if halt() or block - 1 in stopped:
                    return False
                time.sleep(POLL_SECONDS)
            return not halt()

        def train(block: int) -> bool:
            command = [*program, *_child_options(self.run, block, share)]
            done = await_lead(block) and _train_in_child(command, block, on_progress, halt)
            if not done:
                stopped.add(block)
            return done

        with ThreadPoolExecutor(jobs) as pool:
            tasks = [pool.submit(train, block) for block in sorted(blocks)]
            if any(task.exception() for task in wait(tasks, return_when=FIRST_EXCEPTION).done):
                failed.set()
        finished = [task.result() for task in tasks]  # raises the error of a block that failed
        return all(finished)

    def _has_lead(self, before: int, block: int) -> bool:
        config, store = self.run.config, self.run.block(before)
        lead = config.train.steps if config.turn_steps else config.lead * config.train.steps
        if not lead or store.finished():
            return True
        return store.reached() - self.run.block(block).reached() >= lead

    def _train(self, block: int, until: int, on_progress: OnTrained, stop: ShouldStop) -> bool:
        """Train a block to a step, unless it has got there before."""
        store = self.run.block(block)
        with training_lock(store), progress_logger(self.run, block) as write:
            if store.reached() >= until:
                return True

            def report(progress: Progress) -> None:
                write(progress)
                on_progress(progress)

            try:
                trainer = BlockTrainer(
                    self.run.config, block, self.corpus, self.compute, store, PublishedRun(self.run)
                )
                return trainer.train(report, stop, until)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                raise DeviceError(
                    f"block {block} does not fit into the memory of {self.compute.device}; raise"
                    " train.accumulate, lower train.batch, or set train.checkpoint_layers=true"
                ) from None


def open_session(
    config: Config, out: Path, on_text: OnProgress = lambda done, total: None
) -> LocalRun:
    """Create a run, or open it to resume. A new run's tokenizer is stored and its adaptive
    partition fitted first. `on_text`: progress of tokenising."""
    compute = resolve(config.train.device, config.train.precision)
    RunDir.refuse_other_folder(out)
    with RunDir(out, config).lock():
        if RunDir.resumable(out, config):
            run = RunDir.create(out, config)
            refuse_other_tokenizer(run)
            corpus = stored_text(run, on_progress=on_text).corpus
        else:
            text = new_text(config, on_text)
            corpus = text.corpus
            RunDir(out, config).store_tokenizer(text.tokenizer.files)
            run = RunDir.create(out, with_fitted_bounds(text.config, corpus, compute))
    if run.exported:
        raise RunError(
            f"{out} is an exported model and cannot be trained further; start another run with"
            f" train.warm_start={out}"
        )
    return LocalRun(run, corpus, compute)


def _child_options(run: RunDir, block: int, threads: int) -> list[str]:
    settings = run.config.train
    options = ["train", "--json", "--block", str(block), "--threads", str(threads)]
    options += ["--force"]  # this process has checked the memory of all of them
    options += ["--log-format", "json"]
    options += ["--config", str(run.path / "config.toml"), "--out", str(run.path)]
    options += ["--set", f"train.device={settings.device}"]
    return [*options, "--set", f"train.log_to={settings.log_to}"]


def _train_in_child(
    command: Sequence[str], block: int, on_progress: OnTrained, halt: ShouldStop
) -> bool:
    """Train one block in a process. Returns False if a signal or `halt` stopped it early."""
    errors: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        readers = [
            threading.Thread(target=_report, args=(process, on_progress)),
            threading.Thread(target=_read_errors, args=(process, block, errors)),
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


def _report(process: "subprocess.Popen[str]", on_progress: OnTrained) -> None:
    names = [item.name for item in fields(Progress)]
    for line in process.stdout or ():
        record = json.loads(line)
        on_progress(Progress(**{name: record[name] for name in names}))


def _read_errors(process: "subprocess.Popen[str]", block: int, errors: list[str]) -> None:
    """Log a child's log lines in this process. Its other lines go to `errors`: notes, which this
    process has shown already, and the reason of a failure."""
    for line in process.stderr or ():
        try:
            record = json.loads(line)
            level = logging.getLevelNamesMapping()[record.pop("level").upper()]
            logger, message = record.pop("logger"), record.pop("message")
        except (ValueError, KeyError, TypeError, AttributeError):  # not a log line
            errors.append(line)
            continue
        fields = {name: value for name, value in record.items() if name not in ("time", "block")}
        logging.getLogger(logger).log(level, "%s", message, extra={**fields, "block": block})


def _wait(process: "subprocess.Popen[str]", halt: ShouldStop) -> int:
    """Wait for a child process. If `halt` says so, terminate it, only once: it may be saving."""
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
