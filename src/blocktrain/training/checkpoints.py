"""Restores, scores, reports and saves a block that is being trained.

Without a store nothing is restored or saved, but progress is still reported.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blocktrain.data.corpus import evaluation_windows
from blocktrain.data.tokenizer import trained_on
from blocktrain.errors import RunError
from blocktrain.storage.block_dir import BlockDir, Snapshot
from blocktrain.training.evaluate import solo_ce
from blocktrain.training.stored_models import load_block, load_warm_start

if TYPE_CHECKING:
    from blocktrain.training.trainer import BlockTrainer

REPORT_EVERY = 10


@dataclass(frozen=True)
class Progress:
    block: int
    step: int
    steps: int
    loss: float | None  # per token; None: every step since the last report was skipped
    ce: float | None  # per byte, of the training objective; not a score, for denoising not honest
    lr: float
    bytes_per_s: float
    seconds_left: float
    skipped: int
    valid_ce: float | None = None  # per byte
    bytes_per_token: float = 1.0  # on average, in the run's text


class Checkpointer:
    """Restores, scores, reports and saves the block of a trainer. Keeps no reference to the
    trainer: such a cycle would keep the trainer's memory until the garbage collector runs."""

    def __init__(self, store: BlockDir | None) -> None:
        self.store = store
        self.best: tuple[float, int] | None = None  # the lowest CE on valid, and its step
        self._restored = False

    def restore(self, trainer: "BlockTrainer") -> None:
        """Load the last checkpoint or, if there is none, the first weights: a warm start, or those
        inherited from the block before. Later calls do nothing."""
        if self._restored:
            return
        self._restored = True
        snapshot = self.store.load_snapshot() if self.store else None
        if snapshot:
            self._load(trainer, snapshot)
        elif trainer.config.train.warm_start:
            load_warm_start(trainer.module, trainer.config, trainer.block)
        else:
            trainer.inherit()
        if self.store:
            self.store.forget_metrics_after(trainer.step)

    def reporter(
        self, trainer: "BlockTrainer", on_progress: Callable[[Progress], None]
    ) -> Callable[[bool], None]:
        """The function to call after each step: it scores, reports and saves when due."""
        marked_at, marked_step = time.perf_counter(), trainer.step

        def after_step(stopping: bool) -> None:
            nonlocal marked_at, marked_step
            finished = trainer.step == trainer.config.train.steps
            last = stopping or trainer.at_stop
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
                f"the text of {corpus.source} has changed since {self.store.path} was trained;"
                " restore the old text, or start another run"
            )
        load_block(trainer.module, snapshot.weights, str(self.store.path))
        trainer.take_moments(snapshot.state)
        trainer.step = snapshot.step
        trainer.skipped = snapshot.counters["skipped"]
        self.best = tuple(best) if (best := snapshot.counters["best"]) else None

    def _score_if_due(self, trainer: "BlockTrainer") -> float | None:
        config = trainer.config
        every, window = config.train.eval_every, config.model.window
        if not every or (trainer.step % every and trainer.step not in config.train.ends):
            return None
        text = trainer.corpus.split("valid", window)
        valid = evaluation_windows(text, window, config.train.eval_windows)
        prefix = trainer.predecessors.prefix() if trainer.predecessors else None
        ce = solo_ce(config, trainer.block, trainer.module, valid, prefix, trainer.suffix)
        ce *= trained_on(valid).size / max(1, trainer.corpus.bytes_of(valid))
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
            counters["built_on"] = trainer.predecessors.versions  # the predecessors' steps
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


def _progress(
    trainer: "BlockTrainer", marked_at: float, marked_step: int, valid_ce: float | None
) -> Progress:
    loss, ce, counted = trainer.take_sums()  # waits for the device, so it comes before the clock
    seconds = time.perf_counter() - marked_at
    settings, per_step = trainer.config.train, trainer.config.bytes_per_step
    bytes_per_token = trainer.config.vocabulary.bytes_per_token
    rate = (trainer.step - marked_step) * per_step / max(seconds, 1e-9)
    left = (settings.steps - trainer.step) * per_step / max(rate, 1e-9)
    return Progress(
        block=trainer.block,
        step=trainer.step,
        steps=settings.steps,
        loss=loss / counted if counted else None,
        ce=ce / counted / bytes_per_token if counted else None,
        lr=trainer.config.learning_rate(trainer.block, trainer.step - 1),
        bytes_per_s=rate,
        seconds_left=left,
        skipped=trainer.skipped,
        valid_ce=valid_ce,
        bytes_per_token=bytes_per_token,
    )
