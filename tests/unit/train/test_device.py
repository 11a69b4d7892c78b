"""What a machine can compute with, and what is compiled for it."""

import pytest
import torch
from torch import nn

from blocktrain.errors import DeviceError
from blocktrain.train.device import Compute, resolve

LAYER = nn.Linear(2, 2)


def test_nothing_is_compiled_for_a_cpu():
    assert resolve("cpu", "fp32").compiled(LAYER) is LAYER


def test_without_a_c_compiler_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert Compute(torch.device("cuda"), torch.bfloat16).compiled(LAYER) is LAYER


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_for_a_gpu_it_is_compiled():
    assert resolve("cuda", "bf16").compiled(LAYER) is not LAYER


@pytest.mark.parametrize("name", ["tpu", "cuda:99", "cpu2"])
def test_a_device_that_is_not_there_is_named(name: str):
    with pytest.raises(DeviceError, match=name):
        resolve(name, "auto")
