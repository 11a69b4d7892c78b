"""In a process with this folder on PYTHONPATH: what torch found in the environment, and with how
many threads it computed, as lines of JSON in the file TORCH_WATCH. With TORCH_WATCH_STOP=1 the
process ends where it would import torch."""

import atexit
import json
import os
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")


def record(**values: object) -> None:
    with Path(os.environ["TORCH_WATCH"]).open("a") as file:
        file.write(json.dumps({"argv": sys.argv, **values}) + "\n")


class TorchImport(MetaPathFinder):
    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name != "torch":
            return
        sys.meta_path.remove(self)
        record(environment={name: os.environ.get(name) for name in NAMES})
        if os.environ.get("TORCH_WATCH_STOP"):
            os._exit(0)


def threads_at_exit() -> None:
    if torch := sys.modules.get("torch"):
        record(threads=torch.get_num_threads())


sys.meta_path.insert(0, TorchImport())
atexit.register(threads_at_exit)
