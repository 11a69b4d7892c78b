"""Which device and number type a run computes with here, and whether it is compiled for it."""

import gc
import importlib.util
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import nn

from blocktrain.environment import C_COMPILER
from blocktrain.errors import DeviceError
from blocktrain.train.objective import Batch


@dataclass(frozen=True)
class Compute:
    device: torch.device
    dtype: torch.dtype

    @property
    def name(self) -> str:
        kind = "bf16" if self.dtype == torch.bfloat16 else "fp32"
        if self.device.type == "cuda":
            return f"{torch.cuda.get_device_name(self.device)}, {kind}"
        return f"{self.device.type}, {torch.get_num_threads()} threads, {kind}"

    @property
    def compiles(self) -> bool:
        """Whether compiling is faster, and this machine can do it: a CPU gains nothing, and a GPU
        needs Triton, which needs a C compiler."""
        return self.device.type == "cuda" and _has_triton()

    def compiled(self, module: nn.Module) -> nn.Module:
        """The module as torch.compile has it, where there is anything to gain."""
        if not self.compiles:
            return module
        compiled: nn.Module = torch.compile(module)  # type: ignore[assignment]
        return compiled

    def seed(self, seed: int) -> None:
        """Seed the device's own generator. torch.manual_seed seeds every device there could be,
        which costs more than a small model's forward pass."""
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index or 0].manual_seed(seed)
        elif self.device.type == "mps":
            torch.mps.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)


def resolve(device: str, precision: str) -> Compute:
    chosen = _device(device)
    if precision == "auto":
        precision = "bf16" if _fast_bf16(chosen) else "fp32"
    return Compute(chosen, torch.bfloat16 if precision == "bf16" else torch.float32)


def _device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", 0)
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    if name.partition(":")[0] not in ("cpu", "cuda", "mps"):
        raise DeviceError(f"device {name!r} is not auto, cpu, mps, cuda or cuda:N")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise DeviceError(
            f"device {name!r} is not available here, use auto or cpu:"
            f" {str(error).splitlines()[0].split('. ')[0]}"
        ) from None
    return device


@cache
def _has_triton() -> bool:
    """Its own parts are compiled where it is used, with Python's headers."""
    compilers = (C_COMPILER.get(), "gcc", "clang")
    headers = Path(sysconfig.get_path("include"), "Python.h")
    has_compiler = headers.exists() and any(map(shutil.which, compilers))
    return has_compiler and importlib.util.find_spec("triton") is not None


def _fast_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # Without matrix units for it, bf16 on a CPU is no faster than fp32.
    return device.type == "cpu" and bool(torch.cpu._is_amx_tile_supported())


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
