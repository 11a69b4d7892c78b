"""Weights in 8 bits: near what they stand for, in every type of input, and in part."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blocktrain.model.linear import INT8_LEVELS, Int8Linear, Linear, fused_linear, product


def held(weight: Tensor) -> Int8Linear:
    module = Int8Linear(Linear(weight.size(1), weight.size(0)))
    module.take(weight)
    return module


@given(st.integers(1, 40), st.integers(1, 40), st.integers(-6, 6), st.integers(0, 2**32))
def test_no_weight_is_further_off_than_half_a_level_of_its_row(
    outputs: int, inputs: int, magnitude: int, seed: int
):
    draws = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=draws) * 10.0**magnitude
    module = held(weight)
    off = (module.levels.double() * module.scale.double() - weight).abs()
    assert (off <= module.scale.double() * (0.5 + 1e-4)).all()
    assert module.levels.abs().amax(dim=1).eq(INT8_LEVELS).all()


def test_a_row_of_zeros_stays_zero():
    weight = torch.tensor([[0.0, 0.0], [1.0, -2.0]])
    assert held(weight)(torch.ones(1, 2)).tolist() == [[0.0, pytest.approx(-1.0, abs=0.01)]]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_it_computes_in_the_type_of_its_input(dtype: torch.dtype, tolerance: float):
    torch.manual_seed(0)
    module, x = held(torch.randn(24, 40)), torch.randn(2, 3, 40)
    exact = x.to(dtype).double() @ (module.levels.double() * module.scale).T
    found = module(x.to(dtype))
    assert found.dtype == dtype
    assert (found.double() - exact).abs().max() <= tolerance * exact.abs().max()


def test_some_outputs_are_what_they_are_among_all():
    torch.manual_seed(0)
    module, x = held(torch.randn(24, 16)), torch.randn(5, 16)
    for chosen in (slice(0, 8), slice(8, None)):
        assert torch.allclose(module.rows(x, chosen), module(x)[:, chosen], atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 33, 64, 130, 256])
@pytest.mark.parametrize(("outputs", "inputs"), [(24, 40), (192, 1368), (1000, 2048)])
def test_the_kernel_says_what_the_way_around_it_says(
    dtype: torch.dtype, rows: int, outputs: int, inputs: int
):
    torch.manual_seed(0)
    module, x = held(torch.randn(outputs, inputs)), torch.randn(rows, inputs).to(dtype)
    expected = module(x).double()
    device = torch.device("cuda", 0)
    assert fused_linear(device, dtype)
    found = product(x.to(device), module.levels.to(device), module.scale.to(device))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert (found.cpu().double() - expected).abs().max() <= tolerance * expected.abs().max()
