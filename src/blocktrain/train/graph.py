"""A training step as a CUDA graph: captured once, replayed with new inputs.

Small models are bound by launching kernels, not by running them; a replay launches all of a
step's kernels at once. Randomness inside goes on following torch's generator.
"""

from collections.abc import Callable

import torch

from blocktrain.train.objective import Batch

EAGER_STEPS = 3  # libraries allocate and choose algorithms in the first steps; capture after


class GraphedStep:
    """Runs a few steps as they come, then captures one and replays it ever after."""

    def __init__(self, step: Callable[[Batch], None]) -> None:
        self._step = step
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: Batch | None = None

    def __call__(self, batch: Batch) -> None:
        self._calls += 1
        if self._calls <= EAGER_STEPS:
            self._on_side_stream(batch)
            return
        if self._graph is None:
            self._capture(batch)
        assert self._graph and self._inputs
        for held, new in zip(self._inputs, batch, strict=True):
            held.copy_(new, non_blocking=True)
        self._graph.replay()

    def _on_side_stream(self, batch: Batch) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step(batch)
        torch.cuda.current_stream().wait_stream(side)

    def _capture(self, batch: Batch) -> None:
        """Record a step on buffers of its own; recording runs nothing, so no step is lost."""
        self._inputs = Batch(*(part.clone() for part in batch))
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._step(self._inputs)
