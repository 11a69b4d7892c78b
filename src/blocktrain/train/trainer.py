"""Trains one block alone: batches in, weights out, no gradient from or to any other block.

A step depends on (seed, block, step number), on the weights before it and, in a cascade, on the
frozen blocks before this one. A run that was killed therefore continues from a checkpoint as if
nothing had happened. A step whose loss or gradient is not finite changes neither weights nor
moments.
"""

import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from blocktrain.config import Config
from blocktrain.data.corpus import Corpus
from blocktrain.data.windows import TrainingWindows
from blocktrain.errors import DivergedError, RunError
from blocktrain.model.stack import initial_block
from blocktrain.numerics.sampling import mixed_seed
from blocktrain.storage.run_dir import BlockDir
from blocktrain.storage.tensor_file import Tensors
from blocktrain.train.cascade import Predecessors, Published
from blocktrain.train.checkpoints import Checkpointer, Progress
from blocktrain.train.device import Compute, GraphedStep
from blocktrain.train.objective import Batch, new_objective
from blocktrain.train.optimizer import BlockOptimizer, learning_rate, moment_shapes

DATA_STREAM, STEP_STREAM = 2, 3


# Torch has one generator for all threads: a thread that has seeded it draws before any other does.
GENERATOR_LOCK = threading.RLock()


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
        """`published`: where a block of a cascade finds the blocks before it; `scratch`: a folder
        for its feature cache if it has no store."""
        settings = config.train
        self.config, self.block, self.corpus = config, block, corpus
        self.compute = compute
        self.checkpoints = Checkpointer(store)
        self._scratch = store.path if store else scratch
        # In a bf16 run, what stays fp32 (z, logits) may use TF32 units.
        exact = compute.dtype == torch.float32
        torch.set_float32_matmul_precision("highest" if exact else "high")
        with GENERATOR_LOCK:
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
        self.optimizer = BlockOptimizer(self.module, settings, self._lr)
        graphed = settings.cuda_graph and not settings.checkpoint_layers
        self._graph = GraphedStep() if graphed and compute.device.type == "cuda" else None
        self.step = 0
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
        """Train to the end, or up to a step, from the last checkpoint if there is one.
        False: `should_stop` ended it early."""
        end = self.config.train.steps if until is None else min(until, self.config.train.steps)
        try:
            self.checkpoints.restore(self)
            after_step = self.checkpoints.reporter(self, on_progress)
            finished = self.run(self.step, end - self.step, after_step, should_stop)
        except BaseException:
            self.close()
            raise
        if not finished or self.step == self.config.train.steps:
            self.close()
        return finished

    def run(
        self,
        first: int,
        steps: int,
        after_step: Callable[[bool], None] = lambda stopping: None,
        should_stop: Callable[[], bool] = lambda: False,
        positions: Sequence[int] | None = None,
    ) -> bool:
        """Make this many steps, from step number `first` on; False: `should_stop` ended it early.

        `after_step` learns whether this step is the last because of a stop. `positions` are the
        steps' places in the schedule of the learning rate, if not their own numbers.
        """
        self.step = first
        self.module.train()
        for done in range(1, steps + 1):
            self.train_step(positions[done - 1] if positions else None)
            stopping = should_stop()
            after_step(stopping)
            if stopping and done < steps:
                return False
        return True

    def restore(self) -> None:
        """Load the last checkpoint, or the weights to start from."""
        self.checkpoints.restore(self)

    def build_on(self, published: Published, until: int) -> None:
        """From now on, up to step `until`, read these versions of the blocks before."""
        if self.predecessors:
            self.predecessors.close()
        config = self.config.with_settings(train__steps=until)
        self.predecessors = Predecessors(
            config, self.block, self.compute, published, self.windows, self._scratch
        )

    def train_step(self, position: int | None = None) -> None:
        """One optimizer step; every random draw in it comes from its number, and so does the
        learning rate, unless the step has another position in the schedule."""
        with GENERATOR_LOCK:
            seed = mixed_seed(self.config.train.seed, self.block, STEP_STREAM, self.step)
            batch = self.objective.prepare(self.windows[self.step], seed).to(self.compute.device)
            if self.predecessors:
                features = self.predecessors.features(self.step, batch.inputs)
                batch = batch._replace(inputs=features)
            self.compute.seed(seed)  # last, because making blocks draws random numbers too
            position = self.step if position is None else position
            self._lr.fill_(learning_rate(position, self.config.train))
            if self._graph:
                self._graph(self._gradient_step, batch)
            else:
                self._gradient_step(batch)
            self.step += 1

    def _gradient_step(self, batch: Batch) -> None:
        """All of a step's work on the device; nothing here waits for the host."""
        parts = self.config.train.accumulate
        size = self.config.train.batch // parts
        total = torch.zeros(2, device=self.compute.device)
        for part in range(parts):
            loss = self.objective.loss(self.forward, batch.rows(part * size, (part + 1) * size))
            (loss.value / parts).backward()  # type: ignore[no-untyped-call]
            total += torch.stack([loss.value.detach(), loss.ce]) / parts
        self.last_loss.copy_(total[0])
        self._apply_gradients(total)

    def close(self) -> None:
        """Free the memory or file of a feature cache."""
        if self.predecessors:
            self.predecessors.close()

    def take_sums(self) -> tuple[float, float, int]:
        """Loss and CE summed over the steps since the last call, and the number of those steps,
        without skipped ones. Waits for the device."""
        loss, ce, counted = self._sums.tolist()
        self._sums.zero_()
        return loss, ce, int(counted)

    def moments(self) -> Tensors:
        """The optimizer's state by parameter and kind; empty before the first step."""
        return {
            f"{name}.{key}": _to_numpy(moment)
            for name, parameter in self.module.named_parameters()
            for key, moment in self.optimizer.state[parameter].items()
        }

    def take_moments(self, moments: Tensors) -> None:
        if {name: array.shape for name, array in moments.items()} != self.moment_shapes():
            optimizer = self.config.train.optimizer
            raise RunError(
                f"block {self.block}: its optimizer state is not by train.optimizer={optimizer};"
                " use the optimizer that the block was trained with"
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
        self.optimizer.step_unless(bad)
        self.optimizer.zero_grad(set_to_none=True)
        self._skipped += bad
        self._streak.add_(bad).mul_(bad)
        torch.maximum(self._worst_streak, self._streak, out=self._worst_streak)
        counted = torch.cat([total, torch.ones_like(total[:1])])
        self._sums += torch.where(bad.bool(), torch.zeros_like(counted), counted)

    @property
    def skipped(self) -> int:
        """Steps that were skipped because their loss or gradient was not finite."""
        return int(self._skipped)

    @skipped.setter
    def skipped(self, count: int) -> None:
        self._skipped.fill_(count)

    def refuse_divergence(self) -> None:
        """Raise an error after too many skipped steps in a row."""
        streak = int(self._worst_streak)
        if streak >= self.config.train.max_skipped:
            raise DivergedError(
                f"block {self.block} stopped at step {self.step}: {streak} steps in a row had a"
                " non-finite loss or gradient and were skipped; lower train.lr, or set"
                " train.precision=fp32"
            )


def _to_numpy(tensor: Tensor) -> npt.NDArray[np.float32]:
    array: npt.NDArray[np.float32] = tensor.detach().cpu().numpy()
    return array
