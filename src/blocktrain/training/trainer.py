"""Trains one block by itself: no gradients pass from or to any other block.

A step is a function of the seed, the block, the step's number, the weights and moments and, in a
cascade, the block's predecessors. So a killed run continues from a checkpoint as if nothing had
happened. A step whose loss or gradient is not finite changes neither weights nor moments.
"""

import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from blocktrain.config import Config
from blocktrain.data.corpus import Corpus, TrainingWindows
from blocktrain.errors import DivergedError, RunError
from blocktrain.model.block import Trunk
from blocktrain.model.stack import initial_block
from blocktrain.numerics.sampling import mixed_seed
from blocktrain.storage.block_dir import BlockDir
from blocktrain.storage.inheritance import inherited
from blocktrain.storage.tensor_file import Tensors
from blocktrain.training.cascade import Predecessors
from blocktrain.training.checkpoints import Checkpointer, Progress
from blocktrain.training.device import Compute, GraphedStep
from blocktrain.training.frozen import Inside, Published
from blocktrain.training.objective import Batch, new_objective
from blocktrain.training.optimizer import BlockOptimizer, moment_shapes
from blocktrain.training.stored_models import load_block
from blocktrain.training.streamed import StreamedSuffix, placed_suffix

DATA_STREAM, STEP_STREAM = 2, 3


# Torch has one generator for all threads. A thread holds this lock from seeding to its last draw.
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
        """`published`: the source of the frozen blocks it trains with. `scratch`: the folder of
        their feature cache if there is no store."""
        settings = config.train
        self.config, self.block, self.corpus = config, block, corpus
        self.compute = compute
        self.checkpoints = Checkpointer(store)
        self._scratch = store.path if store else scratch
        # In a bf16 run, products that stay fp32 (z, logits) may use TF32.
        exact = compute.dtype == torch.float32
        torch.set_float32_matmul_precision("highest" if exact else "high")
        with GENERATOR_LOCK:
            self.module: nn.Module = initial_block(config, block)
        self.module.compute_dtype = compute.dtype
        self.module.recompute = settings.checkpoint_layers
        self.module.to(compute.device)
        with GENERATOR_LOCK:
            self.suffix = placed_suffix(config, block, compute, self._scratch)
        inside = Inside(cast("Trunk", self.module), self.suffix) if self.suffix else self.module
        streams = isinstance(self.suffix, StreamedSuffix)  # reads files within a step
        self.forward = compute.compiled(inside) if settings.compile and not streams else inside
        self.objective = new_objective(config, block, compute.device)
        self.windows = TrainingWindows(
            corpus.split("train", config.model.window, windows=2),
            config.model.window,
            settings.batch,
            mixed_seed(settings.seed, block, DATA_STREAM),
        )
        self._published = published
        self.predecessors: Predecessors | None = None
        if config.frozen_blocks(block):
            assert published, "the block needs the frozen blocks that it trains with"
            self.build_on(published, settings.steps)
        # On the device, so that a captured CUDA graph reads the current rate.
        self._lr = torch.tensor(settings.lr, device=compute.device)
        self.optimizer = BlockOptimizer(self.module, settings, self._lr)
        graphed = settings.cuda_graph and not (settings.checkpoint_layers or streams)
        self._graph = GraphedStep() if graphed and compute.device.type == "cuda" else None
        self.step = 0
        self.last_loss = torch.zeros((), device=compute.device)
        self._skipped = torch.zeros((), device=compute.device)
        self._streak = torch.zeros((), device=compute.device)
        self._worst_streak = torch.zeros((), device=compute.device)
        # Sums since the last report: loss, CE, number of steps.
        self._sums = torch.zeros(3, device=compute.device)

    def train(
        self,
        on_progress: Callable[[Progress], None],
        should_stop: Callable[[], bool] = lambda: False,
        until: int | None = None,
    ) -> bool:
        """Train to the end, or to step `until`, from the last checkpoint if there is one. Returns
        False if `should_stop` ended it early."""
        steps = self.config.train.steps
        end = steps if until is None else min(until, steps)
        finished = False
        if self._published and self.config.kind.reads_successors:
            self.build_on(self._published, end)  # a turn may begin here
        try:
            self.checkpoints.restore(self)
            after_step = self.checkpoints.reporter(self, on_progress)
            finished = self.run(self.step, end - self.step, after_step, should_stop)
        finally:
            if not finished or self.step == steps:
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
        """Make `steps` steps from number `first` on. Returns False if `should_stop` ended it early.

        `after_step` is called after every step, with True if training stops there. `positions` are
        the steps' positions in the learning-rate schedule; by default, their numbers.
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

    @property
    def at_stop(self) -> bool:
        """Whether the block has reached the end of a turn or phase: others go on before it does."""
        return self.step == self.config.stop(self.step - 1)

    def restore(self) -> None:
        """Load the last checkpoint or, if there is none, the weights of a warm start."""
        self.checkpoints.restore(self)

    def inherit(self) -> None:
        """Start as the tail of the block before, if the settings say so and it was trained."""
        block, published = self.block, self._published
        if block == 0 or not self.config.inherits or not published:
            return
        if published.version(block - 1) is not None:
            weights = published.weights(block - 1).items()
            before = {name: _to_numpy(torch.as_tensor(weight)) for name, weight in weights}
            first = inherited(self.config, block, self.weights(), before)
            load_block(self.module, first, f"the weights of block {block - 1}")

    def build_on(self, published: Published, until: int) -> None:
        """From now on, up to step `until`, train with these versions of the frozen blocks."""
        if self.predecessors:
            self.predecessors.close()
        if self.suffix:
            self.suffix.refresh(published)
        if self.block == 0:
            return
        self.predecessors = Predecessors(
            self.config, self.block, self.compute, published, self.windows, self._scratch, until
        )

    def train_step(self, position: int | None = None) -> None:
        """Make one optimizer step. Its number seeds all random draws and gives the learning rate,
        unless `position` is the step's position in the schedule."""
        with GENERATOR_LOCK:
            seed = mixed_seed(self.config.train.seed, self.block, STEP_STREAM, self.step)
            batch = self.objective.prepare(self.windows[self.step], seed).to(self.compute.device)
            if self.predecessors:
                features = self.predecessors.features(self.step, batch.inputs)
                batch = batch._replace(inputs=features)
            self.compute.seed(seed)  # last, because creating predecessors draws random numbers too
            position = self.step if position is None else position
            self._lr.fill_(self.config.learning_rate(self.block, position))
            if self._graph:
                self._graph(self._gradient_step, batch)
            else:
                self._gradient_step(batch)
            self.step += 1

    def _gradient_step(self, batch: Batch) -> None:
        """All of a step's work on the device, without waiting for the host."""
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
        """Free the memory or files of the feature cache and of the frozen blocks on disk."""
        if self.predecessors:
            self.predecessors.close()
        if isinstance(self.suffix, StreamedSuffix):
            self.suffix.close()

    def take_sums(self) -> tuple[float, float, int]:
        """Loss and CE summed over the steps since the last call, and the number of these steps.
        Skipped steps do not count. Waits for the device."""
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
        """Set the optimizer's state. Raises RunError if it does not fit the optimizer."""
        if {name: array.shape for name, array in moments.items()} != self.moment_shapes():
            optimizer = self.config.train.optimizer
            raise RunError(
                f"block {self.block}: the checkpoint's optimizer state does not fit"
                f" train.optimizer={optimizer}; set the optimizer that the block was trained with"
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
