"""Sends the numbers of a training to a program that draws them (train.log_to).

Each has a package of its own, imported only if it is chosen. What their libraries read, such as an
API key or the address of a server, comes from their own environment variables.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from blocktrain.errors import ConfigError
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.checkpoints import Progress

PROJECT = "blocktrain"
NUMBERS = ("loss", "ce", "lr", "bytes_per_s", "valid_ce", "skipped")


class Logger(ABC):
    """Receives the numbers of one block."""

    package: str

    @abstractmethod
    def __init__(self, module: ModuleType, run: RunDir, block: int) -> None:
        """`module`: the package's module, already imported."""

    @abstractmethod
    def log(self, numbers: Mapping[str, float], step: int) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class TensorBoard(Logger):
    """Event files in the run's folder."""

    package = "torch.utils.tensorboard"

    def __init__(self, module: ModuleType, run: RunDir, block: int) -> None:
        self._writer = module.SummaryWriter(str(run.path / "tensorboard" / f"block-{block}"))

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB(Logger):
    """A run of Weights & Biases. Runs of a folder's blocks share a group."""

    package = "wandb"

    def __init__(self, module: ModuleType, run: RunDir, block: int) -> None:
        self._run = module.init(**_named(run, block), dir=str(run.path), reinit="finish_previous")

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio(Logger):
    package = "trackio"

    def __init__(self, module: ModuleType, run: RunDir, block: int) -> None:
        self._module = module
        module.init(**_named(run, block), embed=False)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._module.log(dict(numbers), step=step)

    def close(self) -> None:
        self._module.finish()


class MLflow(Logger):
    """A run of the experiment that is set in MLflow's environment variables."""

    package = "mlflow"

    def __init__(self, module: ModuleType, run: RunDir, block: int) -> None:
        self._module = module
        module.start_run(run_name=_named(run, block)["name"])
        settings = run.config.to_dict()
        module.log_params({f"{section}.{name}": value for section, values in settings.items()
                           for name, value in values.items()})  # fmt: skip

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._module.log_metrics(dict(numbers), step=step)

    def close(self) -> None:
        self._module.end_run()


LOGGERS: dict[str, type[Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}


@contextmanager
def progress_logger(run: RunDir, block: int) -> Iterator[Callable[[Progress], None]]:
    """A function that logs a block's progress to what train.log_to names."""
    chosen = run.config.train.log_to
    if chosen == "nothing":
        yield lambda progress: None
        return
    kind = LOGGERS[chosen]
    try:
        module = importlib.import_module(kind.package)
    except ImportError:
        raise ConfigError(
            f"train.log_to = {chosen} needs a package that is not installed: pip install {chosen}"
        ) from None

    def log(progress: Progress) -> None:
        numbers = {name: getattr(progress, name) for name in NUMBERS}
        known = {name: float(value) for name, value in numbers.items() if value is not None}
        logger.log(known, progress.step)

    with closing(kind(module, run, block)) as logger:
        yield log


def _named(run: RunDir, block: int) -> dict[str, Any]:
    """What W&B and trackio call a run."""
    folder = Path(run.path).resolve().name
    settings = run.config.to_dict()
    return {"project": PROJECT, "name": f"{folder}-block-{block}", "group": folder,
            "config": settings}  # fmt: skip
