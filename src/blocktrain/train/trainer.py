"""Trains one block alone: batches in, weights out, no gradient from or to any other block.

A step depends on (seed, block, step number) and the weights before it, and in a cascade on the
frozen blocks before this one, on nothing else; with weights and optimizer moments on disk, a
killed run goes on as if nothing had happened. A step whose loss or gradient is not finite leaves
weights and moments untouched.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from blocktrain.config import Config
from blocktrain.data.corpus import Corpus
from blocktrain.data.windows import TrainingWindows, evaluation_windows
from blocktrain.errors import DivergedError, RunError
from blocktrain.model.stack import initial_block
from blocktrain.numerics.sampling import mixed_seed
from blocktrain.storage.run_dir import BlockDir, RunDir, Snapshot, Tensors
from blocktrain.train.assemble import load_block
from blocktrain.train.cascade import Predecessors, Published
from blocktrain.train.device import Compute, GraphedStep
from blocktrain.train.evaluate import solo_ce
from blocktrain.train.objective import Batch, new_objective
from blocktrain.train.optimizer import learning_rate, moment_shapes, new_optimizer

DATA_STREAM, STEP_STREAM = 2, 3
REPORT_EVERY = 10


@dataclass(frozen=True)
class Progress:
    block: int
    step: int
    steps: int
    loss: float | None  # None where every step since the last report was skipped
    ce: float | None  # of the local objective: denoising sees the noisy target, so not a score
    lr: float
    bytes_per_s: float
    seconds_left: float
    skipped: int
    valid_ce: float | None = None


class BlockTrainer:
    def __init__(
        self,
        config: Config,
        block: int,
        corpus: Corpus,
        compute: Compute,
        store: BlockDir | None,
        published: Published | None = None,
        scratch: Path | None = None,
    ) -> None:
        """`published`: where a block of a cascade finds the blocks before it; `scratch`: where it
        may keep a feature cache, if not in its store."""
        settings = config.train
        self.config, self.block, self.corpus = config, block, corpus
        self.compute, self.store = compute, store
        self._scratch = store.path if store else scratch
        # In a bf16 run, what stays fp32 (z, logits) may use TF32 units.
        exact = compute.dtype == torch.float32
        torch.set_float32_matmul_precision("highest" if exact else "high")
        self.module: nn.Module = initial_block(config, block)
        self.module.compute_dtype = compute.dtype
        self.module.recompute = settings.checkpoint_layers
        self.module.to(compute.device)
        self.forward = compute.compiled(self.module) if settings.compile else self.module
        self.objective = new_objective(config, block, compute.device)
        self.windows = TrainingWindows(
            corpus.split("train", config.model.window, windows=2),
            config.model.window,
            settings.batch,
            mixed_seed(settings.seed, block, DATA_STREAM),
        )
        self.predecessors: Predecessors | None = None
        if config.kind.reads_predecessors and block > 0:
            assert published, "a block of a cascade needs the blocks before it"
            self.build_on(published, settings.steps)
        # On a CUDA device the rate is read there, so that a captured step can go on using it.
        self._lr = torch.tensor(settings.lr, device=compute.device)
        self.optimizer = new_optimizer(self.module, settings, self._lr)
        graphed = settings.cuda_graph and not settings.checkpoint_layers
        self._graph = GraphedStep() if graphed and compute.device.type == "cuda" else None
        self.step = 0
        self._restored = False
        self.best: tuple[float, int] | None = None  # (valid CE, step)
        self.last_loss = torch.zeros((), device=compute.device)
        self._skipped = torch.zeros((), device=compute.device)
        self._streak = torch.zeros((), device=compute.device)
        self._worst_streak = torch.zeros((), device=compute.device)
        # Since the last report: loss, CE, and how many steps they sum over.
        self._sums = torch.zeros(3, device=compute.device)

    def train(
        self,
        on_progress: Callable[[Progress], None],
        should_stop: Callable[[], bool] = lambda: False,
        until: int | None = None,
    ) -> bool:
        """Train to the end, or until a step, from the last checkpoint if there is one.
        False: stopped before."""
        try:
            return self._train(on_progress, should_stop, until)
        except BaseException:
            self._close()
            raise

    def _train(
        self,
        on_progress: Callable[[Progress], None],
        should_stop: Callable[[], bool],
        until: int | None,
    ) -> bool:
        self.restore()
        self.module.train()
        end = self.config.train.steps if until is None else min(until, self.config.train.steps)
        mark, marked_step = time.perf_counter(), self.step
        while self.step < end:
            self.train_step()
            done = self.step == self.config.train.steps
            stopping = should_stop()
            valid_ce = self._score_if_due()
            if self.step % REPORT_EVERY == 0 or done or stopping or valid_ce is not None:
                progress = self._progress(mark, marked_step, valid_ce)
                mark, marked_step = time.perf_counter(), self.step
                self.refuse_divergence()
                self._log(progress)
                on_progress(progress)
            if self._save_due(valid_ce) or done or stopping:
                self._save(valid_ce, finished=done)
            if done or stopping:
                self._close()
            if stopping and not done:
                return False
        return True

    def build_on(self, published: Published, until: int) -> None:
        """Read these versions of the blocks before, from now on and up to step `until`."""
        if self.predecessors:
            self.predecessors.close()
        config = self.config.with_settings(train__steps=until)
        self.predecessors = Predecessors(
            config, self.block, self.compute, published, self.windows, self._scratch
        )

    def train_step(self, position: int | None = None) -> None:
        """One optimizer step; every random draw in it comes from its own number, and so does the
        learning rate, unless the step has another position in the schedule."""
        seed = mixed_seed(self.config.train.seed, self.block, STEP_STREAM, self.step)
        batch = self.objective.prepare(self.windows[self.step], seed).to(self.compute.device)
        if self.predecessors:
            batch = batch._replace(inputs=self.predecessors.features(self.step))
        self.compute.seed(seed)  # last, because making blocks draws random numbers too
        position = self.step if position is None else position
        self._lr.fill_(learning_rate(position, self.config.train))
        if self._graph:
            self._graph(self._gradient_step, batch)
        else:
            self._gradient_step(batch)
        self.step += 1

    def _gradient_step(self, batch: Batch) -> None:
        """All of a step's device work: nothing here waits for the host."""
        parts = self.config.train.accumulate
        size = self.config.train.batch // parts
        total = torch.zeros(2, device=self.compute.device)
        for part in range(parts):
            loss = self.objective.loss(self.forward, batch.rows(part * size, (part + 1) * size))
            (loss.value / parts).backward()  # type: ignore[no-untyped-call]
            total += torch.stack([loss.value.detach(), loss.ce]) / parts
        self.last_loss.copy_(total[0])
        self._apply_gradients(total)

    def _close(self) -> None:
        if self.predecessors:
            self.predecessors.close()

    def take_sums(self) -> tuple[float, float, int]:
        """Loss and CE summed over the steps since they were last taken, and how many those are,
        skipped ones left out."""
        loss, ce, counted = self._sums.tolist()
        self._sums.zero_()
        return loss, ce, int(counted)

    def moments(self) -> Tensors:
        """The optimizer's state, once it has made a step."""
        return {
            f"{name}.{key}": _to_numpy(moment)
            for name, parameter in self.module.named_parameters()
            for key, moment in self.optimizer.state[parameter].items()
        }

    def take_moments(self, moments: Tensors) -> None:
        if {name: array.shape for name, array in moments.items()} != self.moment_shapes():
            optimizer = self.config.train.optimizer
            raise RunError(
                f"block {self.block}: what its optimizer kept is not by train.optimizer={optimizer}"
            )
        parameters = dict(self.module.named_parameters())
        for full_name, moment in moments.items():
            name, _, key = full_name.rpartition(".")
            state = self.optimizer.state[parameters[name]]
            state[key] = torch.from_numpy(moment).to(parameters[name].device)

    def moment_shapes(self) -> dict[str, tuple[int, ...]]:
        return moment_shapes(self.module, self.config.train)

    def weights(self) -> Tensors:
        return {name: _to_numpy(p) for name, p in self.module.named_parameters()}

    def _apply_gradients(self, total: Tensor) -> None:
        limit = self.config.train.clip or math.inf
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), limit)
        bad = (~torch.isfinite(total.sum() + norm)).float()
        if self.compute.device.type == "mps":  # its fused optimizer does not read the flag
            if not bad:
                self.optimizer.step()
        else:
            # The fused optimizer reads the flag on the device and skips: no wait for the host.
            self.optimizer.found_inf = bad  # type: ignore[attr-defined]
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._skipped += bad
        self._streak.add_(bad).mul_(bad)
        torch.maximum(self._worst_streak, self._streak, out=self._worst_streak)
        counted = torch.cat([total, torch.ones_like(total[:1])])
        self._sums += torch.where(bad.bool(), torch.zeros_like(counted), counted)

    def restore(self) -> None:
        """Take over the last checkpoint, or the weights to start from; once."""
        if self._restored:
            return
        self._restored = True
        snapshot = self.store.load_snapshot() if self.store else None
        if snapshot:
            self._load_snapshot(snapshot)
        elif self.config.train.warm_start:
            self._warm_start()
        if self.store:
            self.store.forget_metrics_after(self.step)

    def _load_snapshot(self, snapshot: Snapshot) -> None:
        assert self.store
        if snapshot.data != self.corpus.digests.get("train", ""):
            raise RunError(
                f"{self.store.path} was trained on other text than {self.corpus.source} holds now;"
                " put the old text back, or start another run"
            )
        load_block(self.module, snapshot.weights, str(self.store.path))
        self.take_moments(snapshot.state)
        self.step = snapshot.step
        self._skipped.fill_(snapshot.counters["skipped"])
        best = snapshot.counters["best"]
        self.best = (best[0], best[1]) if best else None

    def _warm_start(self) -> None:
        origin = RunDir.open(Path(self.config.train.warm_start))
        if origin.config.block_count != self.config.block_count:
            raise RunError(
                f"{origin.path} has {origin.config.block_count} blocks, this run another number"
            )
        load_block(self.module, origin.block_weights(self.block), str(origin.path))

    def _score_if_due(self) -> float | None:
        every = self.config.train.eval_every
        if not every or (self.step % every and self.step != self.config.train.steps):
            return None
        window = self.config.model.window
        valid = evaluation_windows(
            self.corpus.split("valid", window), window, self.config.train.eval_windows
        )
        prefix = self.predecessors.prefix() if self.predecessors else None
        ce = solo_ce(self.config, self.block, self.module, valid, prefix)
        self.module.train()
        if math.isfinite(ce) and (self.best is None or ce < self.best[0]):
            self.best = (ce, self.step)
        return ce

    def _save_due(self, valid_ce: float | None) -> bool:
        settings = self.config.train
        is_best = valid_ce is not None and self.best is not None and self.best[1] == self.step
        return self.step % settings.save_every == 0 or (settings.keep == "best" and is_best)

    def _save(self, valid_ce: float | None, *, finished: bool) -> None:
        if not self.store:
            return
        chosen = self.best[1] if self.best and self.config.train.keep == "best" else None
        counters: dict[str, Any] = {"skipped": int(self._skipped), "best": self.best}
        if self.predecessors:
            counters["built_on"] = self.predecessors.versions  # steps the blocks before stood at
        snapshot = Snapshot(
            self.step,
            self._bytes(self.step),
            valid_ce,
            self.weights(),
            self.moments(),
            counters,
            self.corpus.digests.get("train", ""),
            chosen,
            finished,
        )
        self.store.save(snapshot)

    def _bytes(self, steps: int) -> int:
        return steps * self.config.train.batch * self.config.model.window

    def _progress(self, mark: float, since: int, valid_ce: float | None) -> Progress:
        loss, ce, counted = self.take_sums()  # waits for the device: before the clock is read
        seconds = time.perf_counter() - mark
        rate = self._bytes(self.step - since) / max(seconds, 1e-9)
        left = self._bytes(self.config.train.steps - self.step) / max(rate, 1e-9)
        return Progress(
            block=self.block,
            step=self.step,
            steps=self.config.train.steps,
            loss=loss / counted if counted else None,
            ce=ce / counted if counted else None,
            lr=learning_rate(self.step - 1, self.config.train),
            bytes_per_s=rate,
            seconds_left=left,
            skipped=int(self._skipped),
            valid_ce=valid_ce,
        )

    def _log(self, progress: Progress) -> None:
        if self.store:
            self.store.append_metrics(progress.__dict__)

    def refuse_divergence(self) -> None:
        streak = int(self._worst_streak)
        if streak >= self.config.train.max_skipped:
            raise DivergedError(
                f"block {self.block} stopped at step {self.step}: {streak} steps in a row had a"
                " non-finite loss or gradient; the weights are those before them."
                " Lower train.lr, or train.precision=fp32"
            )


def _to_numpy(tensor: Tensor) -> npt.NDArray[np.float32]:
    array: npt.NDArray[np.float32] = tensor.detach().cpu().numpy()
    return array
