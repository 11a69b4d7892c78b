"""Which device and number type a run computes with here, and whether it is compiled for it."""

import importlib.util
import os
import shutil
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import nn

from blocktrain.errors import DeviceError


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
            f"device {name!r} is not available here: {str(error).splitlines()[0]}"
        ) from None
    return device


@cache
def _has_triton() -> bool:
    """Its own parts are compiled where it is used, with Python's headers."""
    compilers = (os.environ.get("CC", ""), "gcc", "clang")
    headers = Path(sysconfig.get_path("include"), "Python.h")
    has_compiler = headers.exists() and any(map(shutil.which, compilers))
    return has_compiler and importlib.util.find_spec("triton") is not None


def _fast_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # Without matrix units for it, bf16 on a CPU is no faster than fp32.
    return device.type == "cpu" and bool(torch.cpu._is_amx_tile_supported())
