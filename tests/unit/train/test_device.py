"""What a machine can compute with, and what is compiled for it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from blocktrain.errors import DeviceError
from blocktrain.train import device
from blocktrain.train.device import Compute, resolve

LAYER = nn.Linear(2, 2)


@pytest.fixture
def with_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if it were installed; it is looked for, and not imported."""
    (tmp_path / "triton.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    device._has_triton.cache_clear()
    yield
    device._has_triton.cache_clear()


def test_nothing_is_compiled_for_a_cpu():
    assert resolve("cpu", "fp32").compiled(LAYER) is LAYER


@pytest.mark.usefixtures("with_triton")
@pytest.mark.parametrize("compiler", ["gcc", None])
def test_a_gpu_s_step_is_compiled_where_there_is_a_c_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str | None
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if compiler:
        (tmp_path / compiler).touch(mode=0o755)
    if not Path(device.sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("this Python has no headers")
    gpu = Compute(torch.device("cuda"), torch.bfloat16)
    assert gpu.compiles == (compiler is not None)
    if not compiler:
        assert gpu.compiled(LAYER) is LAYER


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_for_a_gpu_it_is_compiled():
    assert resolve("cuda", "bf16").compiled(LAYER) is not LAYER


@pytest.mark.parametrize("name", ["tpu", "cuda:99", "cpu2"])
def test_a_device_that_is_not_there_is_named(name: str):
    with pytest.raises(DeviceError, match=name):
        resolve(name, "auto")


@pytest.mark.parametrize(("has_amx", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_cpu_computes_in_bf16_if_it_has_matrix_units_for_it(
    monkeypatch: pytest.MonkeyPatch, has_amx: bool, dtype: torch.dtype
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_tile": has_amx}, raising=False)
    assert resolve("cpu", "auto").dtype == dtype
