"""The chunked cross entropy against torch's, which holds all logits."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktrain.model import linear
from blocktrain.model.linear import linear_cross_entropy

GAIN = 8.0


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setitem(linear.CHUNK_LOGITS, "cpu", 3 * 50)  # three positions of 50 tokens


def problem(positions, tokens=50, seed=0):
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(positions, 16, generator=draws, requires_grad=True)
    weight = (0.2 * torch.randn(tokens, 16, generator=draws)).requires_grad_()
    targets = torch.randint(0, tokens, (positions,), generator=draws)
    shares = torch.rand(positions, generator=draws)
    return x, weight, targets, shares


@settings(max_examples=25, deadline=None)
@given(positions=st.integers(1, 20), seed=st.integers(0, 1000), weighted=st.booleans())
def test_value_and_gradients_are_those_of_the_whole_product(positions, seed, weighted):
    x, weight, targets, shares = problem(positions, seed=seed)
    total, losses = linear_cross_entropy(x, weight, targets, GAIN, shares if weighted else None)
    (2.0 * total).backward()
    got = x.grad.clone(), weight.grad.clone()
    x.grad = weight.grad = None
    expected = F.cross_entropy(GAIN * (x @ weight.T), targets, reduction="none")
    value = (expected * shares).sum() if weighted else expected.mean()
    (2.0 * value).backward()
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total, value, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[0], x.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got[1], weight.grad, rtol=1e-4, atol=1e-5)


def test_a_frozen_table_gets_no_gradient():
    x, weight, targets, _ = problem(7)
    total, _ = linear_cross_entropy(x, weight.detach(), targets, 1.0)
    total.backward()
    assert x.grad is not None
    assert weight.grad is None


def test_in_bf16_the_gradient_has_the_type_of_the_features():
    x, weight, targets, _ = problem(7)
    low = x.detach().bfloat16().requires_grad_()
    total, _ = linear_cross_entropy(low, weight, targets, GAIN)
    total.backward()
    assert low.grad.dtype == torch.bfloat16
    assert weight.grad.dtype == torch.float32
    full = F.cross_entropy(GAIN * (x @ weight.T), targets)
    assert total.item() == pytest.approx(full.item(), rel=0.02)
