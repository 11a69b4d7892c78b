"""The device and dtype that a run uses on this machine; compiled steps and CUDA graphs."""

import gc
import importlib.util
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from blocktrain.environment import C_COMPILER
from blocktrain.errors import DeviceError
from blocktrain.training.objective import Batch


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
        """Whether to compile on this device: a CPU gains nothing, and a GPU needs Triton, which
        needs a C compiler."""
        return self.device.type == "cuda" and has_triton()

    def compiled(self, module: nn.Module) -> nn.Module:
        """The module, compiled if `compiles`."""
        if not self.compiles:
            return module
        compiled: nn.Module = torch.compile(module)  # type: ignore[assignment]
        return compiled

    def seed(self, seed: int) -> None:
        """Seed this device's generator only. torch.manual_seed seeds those of all devices, which
        takes longer than a small model's forward pass."""
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
        raise DeviceError(f"unknown device {name!r}; use auto, cpu, mps, cuda or cuda:N")
    if name.startswith("mps") and not torch.backends.mps.is_available():
        raise DeviceError("this machine has no MPS device (Apple's GPU); use auto or cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise DeviceError(
            f"device {name!r} is not available on this machine"
            f" ({str(error).splitlines()[0].split('. ')[0]}); use auto or cpu"
        ) from None
    return device


@cache
def has_triton() -> bool:
    """Whether Triton works here. It compiles its launcher at run time, so it needs a C compiler and
    Python's headers."""
    compilers = (C_COMPILER.get(), "gcc", "clang")
    headers = Path(sysconfig.get_path("include"), "Python.h")
    has_compiler = headers.exists() and any(map(shutil.which, compilers))
    return has_compiler and importlib.util.find_spec("triton") is not None


def _fast_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # Without AMX, bf16 is no faster than fp32 on a CPU. A torch without get_capabilities cannot
    # tell, and uses fp32.
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return device.type == "cpu" and bool(capabilities.get("amx_tile"))


EAGER_STEPS = 3  # the first steps, in which libraries allocate memory and choose algorithms


class GraphedStep:
    """Runs a few steps eagerly, then captures one as a CUDA graph and replays it.

    Each call passes the step. An attribute would make a reference cycle with the trainer and keep
    the trainer's memory until the garbage collector runs.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: Batch | None = None

    def __call__(self, step: Callable[[Batch], None], batch: Batch) -> None:
        self._calls += 1
        if self._calls <= EAGER_STEPS:
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # steps before a capture must not use the default stream
                step(batch)
            torch.cuda.current_stream().wait_stream(side)
            return
        if self._graph is None:
            self._capture(step, batch)
        assert self._graph and self._inputs
        for captured, new in zip(self._inputs, batch, strict=True):
            captured.copy_(new, non_blocking=True)
        self._graph.replay()

    def _capture(self, step: Callable[[Batch], None], batch: Batch) -> None:
        """Record a step that reads the graph's own input buffers. Recording computes nothing."""
        self._inputs = Batch(*(part.clone() for part in batch))
        self._graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(self._graph):
            step(self._inputs)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection: freeing device memory during a capture would break it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
