"""Training in tests: nobody watches, and weights are compared bit for bit."""

from collections.abc import Callable, Mapping

import numpy as np

from blocktrain.training.checkpoints import Progress
from blocktrain.training.device import resolve
from blocktrain.training.trainer import BlockTrainer

CPU = resolve("cpu", "fp32")


def quiet(progress: Progress) -> None:
    pass


def stop_after(steps: int) -> Callable[[], bool]:
    """Asks a trainer to stop once it has made so many steps."""
    asked = iter([False] * (steps - 1) + [True])
    return lambda: next(asked)


def weights_of(trainer: BlockTrainer) -> dict[str, np.ndarray]:
    return {name: array.copy() for name, array in trainer.weights().items()}


def assert_equal(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name, array in a.items():
        assert np.array_equal(array, b[name]), name
