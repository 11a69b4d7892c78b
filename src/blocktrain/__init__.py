"""blocktrain: one model trained as independent blocks, composed into one at inference.

    import blocktrain as bt

    run = bt.train("tiny", out="runs/mine")
    model = bt.load(run)
    print(model.generate("The "), model.evaluate().ce)

Importing this loads nothing else: a name below is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from blocktrain import errors
    from blocktrain.api.models import Model, export_hf, import_hf, load, train
    from blocktrain.api.swarm import Swarm

__all__ = [
    "Model",
    "Swarm",
    "__version__",
    "errors",
    "export_hf",
    "import_hf",
    "load",
    "train",
]

_MODULES = {"Swarm": "api.swarm", "errors": "errors"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES.get(name, 'api.models')}")
    return module if name == "errors" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
