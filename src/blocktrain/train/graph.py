"""A training step as a CUDA graph: captured once, replayed with new inputs.

Small models are bound by launching kernels, not by running them; a replay launches all of a
step's kernels at once. Randomness inside goes on following torch's generator.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from blocktrain.train.objective import Batch

EAGER_STEPS = 3  # libraries allocate and choose algorithms in the first steps; capture after


class GraphedStep:
    """Runs a few steps as they come, then captures one and replays it ever after.

    The step is handed in at every call, not kept: a trainer that held something that holds the
    trainer would keep its memory until the garbage collector comes by.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: Batch | None = None

    def __call__(self, step: Callable[[Batch], None], batch: Batch) -> None:
        self._calls += 1
        if self._calls <= EAGER_STEPS:
            _on_side_stream(step, batch)
            return
        if self._graph is None:
            self._capture(step, batch)
        assert self._graph and self._inputs
        for held, new in zip(self._inputs, batch, strict=True):
            held.copy_(new, non_blocking=True)
        self._graph.replay()

    def _capture(self, step: Callable[[Batch], None], batch: Batch) -> None:
        """Record a step on buffers of its own; recording runs nothing, so no step is lost."""
        self._inputs = Batch(*(part.clone() for part in batch))
        self._graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(self._graph):
            step(self._inputs)


def _on_side_stream(step: Callable[[Batch], None], batch: Batch) -> None:
    """Steps that warm up for a capture may not run on the default stream."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(batch)
    torch.cuda.current_stream().wait_stream(side)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Freeing an earlier model's device memory in the middle of a capture would spoil it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
