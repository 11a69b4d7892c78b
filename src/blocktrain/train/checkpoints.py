"""Beside the training of a block: restoring, scoring, reporting, logging and saving it.

Without a store nothing is restored or saved, but training is still reported.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blocktrain.data.windows import evaluation_windows
from blocktrain.errors import RunError
from blocktrain.storage.run_dir import BlockDir, RunDir, Snapshot
from blocktrain.train.evaluate import solo_ce
from blocktrain.train.optimizer import learning_rate
from blocktrain.train.stored_models import load_block

if TYPE_CHECKING:
    from blocktrain.train.trainer import BlockTrainer

REPORT_EVERY = 10


@dataclass(frozen=True)
class Progress:
    block: int
    step: int
    steps: int
    loss: float | None  # None: every step since the last report was skipped
    ce: float | None  # of the local objective: denoising sees the noisy target, so not a score
    lr: float
    bytes_per_s: float
    seconds_left: float
    skipped: int
    valid_ce: float | None = None


class Checkpointer:
    """Holds no trainer: one that held something that holds it would keep its memory until the
    garbage collector ran."""

    def __init__(self, store: BlockDir | None) -> None:
        self.store = store
        self.best: tuple[float, int] | None = None  # the lowest CE on valid, and its step
        self._restored = False

    def restore(self, trainer: "BlockTrainer") -> None:
        """Load the last checkpoint, or the weights to start from; only once."""
        if self._restored:
            return
        self._restored = True
        snapshot = self.store.load_snapshot() if self.store else None
        if snapshot:
            self._load(trainer, snapshot)
        elif trainer.config.train.warm_start:
            _warm_start(trainer)
        if self.store:
            self.store.forget_metrics_after(trainer.step)

    def reporter(
        self, trainer: "BlockTrainer", on_progress: Callable[[Progress], None]
    ) -> Callable[[bool], None]:
        """What is to be done after each step of the trainer."""
        marked_at, marked_step = time.perf_counter(), trainer.step

        def after_step(stopping: bool) -> None:
            nonlocal marked_at, marked_step
            finished = trainer.step == trainer.config.train.steps
            last = finished or stopping
            valid_ce = self._score_if_due(trainer)
            if trainer.step % REPORT_EVERY == 0 or last or valid_ce is not None:
                progress = _progress(trainer, marked_at, marked_step, valid_ce)
                marked_at, marked_step = time.perf_counter(), trainer.step
                trainer.refuse_divergence()
                if self.store:
                    self.store.append_metrics(progress.__dict__)
                on_progress(progress)
            if last or self._save_due(trainer, valid_ce):
                self._save(trainer, valid_ce, finished=finished)

        return after_step

    def _load(self, trainer: "BlockTrainer", snapshot: Snapshot) -> None:
        assert self.store
        corpus = trainer.corpus
        if snapshot.data != corpus.digests.get("train", ""):
            raise RunError(
                f"{self.store.path} was trained on another text than {corpus.source} holds now;"
                " restore the old text, or start another run"
            )
        load_block(trainer.module, snapshot.weights, str(self.store.path))
        trainer.take_moments(snapshot.state)
        trainer.step = snapshot.step
        trainer.skipped = snapshot.counters["skipped"]
        best = snapshot.counters["best"]
        self.best = (best[0], best[1]) if best else None

    def _score_if_due(self, trainer: "BlockTrainer") -> float | None:
        config = trainer.config
        every, window = config.train.eval_every, config.model.window
        if not every or (trainer.step % every and trainer.step != config.train.steps):
            return None
        text = trainer.corpus.split("valid", window)
        valid = evaluation_windows(text, window, config.train.eval_windows)
        prefix = trainer.predecessors.prefix() if trainer.predecessors else None
        ce = solo_ce(config, trainer.block, trainer.module, valid, prefix)
        trainer.module.train()
        if math.isfinite(ce) and (self.best is None or ce < self.best[0]):
            self.best = (ce, trainer.step)
        return ce

    def _save_due(self, trainer: "BlockTrainer", valid_ce: float | None) -> bool:
        settings = trainer.config.train
        is_best = valid_ce is not None and self.best is not None and self.best[1] == trainer.step
        return trainer.step % settings.save_every == 0 or (settings.keep == "best" and is_best)

    def _save(self, trainer: "BlockTrainer", valid_ce: float | None, *, finished: bool) -> None:
        if not self.store:
            return
        chosen = self.best[1] if self.best and trainer.config.train.keep == "best" else None
        counters: dict[str, Any] = {"skipped": trainer.skipped, "best": self.best}
        if trainer.predecessors:
            counters["built_on"] = trainer.predecessors.versions  # steps of the blocks before
        self.store.save(
            Snapshot(
                trainer.step,
                trainer.step * trainer.config.bytes_per_step,
                valid_ce,
                trainer.weights(),
                trainer.moments(),
                counters,
                trainer.corpus.digests.get("train", ""),
                chosen,
                finished,
            )
        )


def _warm_start(trainer: "BlockTrainer") -> None:
    origin = RunDir.open(Path(trainer.config.train.warm_start))
    theirs, ours = origin.config.block_count, trainer.config.block_count
    if theirs != ours:
        raise RunError(f"train.warm_start: {origin.path} has {theirs} blocks, this run has {ours}")
    load_block(trainer.module, origin.block_weights(trainer.block), str(origin.path))


def _progress(
    trainer: "BlockTrainer", marked_at: float, marked_step: int, valid_ce: float | None
) -> Progress:
    loss, ce, counted = trainer.take_sums()  # waits for the device: before the clock is read
    seconds = time.perf_counter() - marked_at
    settings, per_step = trainer.config.train, trainer.config.bytes_per_step
    rate = (trainer.step - marked_step) * per_step / max(seconds, 1e-9)
    left = (settings.steps - trainer.step) * per_step / max(rate, 1e-9)
    return Progress(
        block=trainer.block,
        step=trainer.step,
        steps=settings.steps,
        loss=loss / counted if counted else None,
        ce=ce / counted if counted else None,
        lr=learning_rate(trainer.step - 1, settings),
        bytes_per_s=rate,
        seconds_left=left,
        skipped=trainer.skipped,
        valid_ce=valid_ce,
    )
