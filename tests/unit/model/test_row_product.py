"""Single rows through a compiled product: the same numbers, wherever it is used."""

import logging

import pytest
import torch
from tests.support.models import awake_stack
from torch import Tensor

from blocktrain.config import Config
from blocktrain.model import linear as linears
from blocktrain.model import row_product as products
from blocktrain.model.linear import Int8Linear, Linear, use_row_products
from blocktrain.model.row_product import row_product

CALLS: list[torch.Size] = []


def counted(x_K: Tensor, weight_NK: Tensor, scale_N1: Tensor | None) -> Tensor:
    """The product before it is compiled."""
    CALLS.append(weight_NK.shape)
    return products._product(x_K, weight_NK, scale_N1)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix is large enough, and nothing is compiled."""
    CALLS.clear()
    monkeypatch.setattr(linears, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(linears, "row_product", lambda weights, inputs: counted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("in_8_bits", [False, True])
def test_one_row_gives_what_several_rows_give(
    dtype: torch.dtype, bias: bool, in_8_bits: bool
) -> None:
    torch.manual_seed(0)
    layer = Linear(48, 32, bias=bias)
    if bias:
        torch.nn.init.normal_(layer.bias)
    module: Linear | Int8Linear = layer
    if in_8_bits:
        module = Int8Linear(layer)
        module.take(layer.weight.detach())
    x = torch.randn(3, 1, 48).to(dtype)
    with torch.inference_mode():
        expected = module(x)
        use_row_products(torch.nn.ModuleList([module]), dtype)
        tolerance = {torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
        for row in range(3):
            found = module(x[row : row + 1])
            assert found.dtype == dtype
            torch.testing.assert_close(found[0], expected[row], atol=tolerance, rtol=tolerance)
        assert len(CALLS) == 3
        some = module.rows(x[:1], slice(8, 24))
        torch.testing.assert_close(some[0], expected[0, :, 8:24], atol=tolerance, rtol=tolerance)
        assert torch.equal(module(x), expected)
    assert len(CALLS) == 4


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_computes_single_rows_too(config: Config, tied: bool) -> None:
    settings = {"model__layer": "llama", "model__taps": 0, "model__tied_embeddings": tied}
    config = config.with_settings(objective__kind="end_to_end", **settings)
    (block,) = awake_stack(config).blocks
    private = torch.randn(1, 1, config.model.width)
    with torch.inference_mode():
        expected = block.predict(private)
        block.use_row_products()
        torch.testing.assert_close(block.predict(private), expected, atol=1e-5, rtol=1e-5)
    assert [torch.Size([config.vocabulary.size, config.model.width])] == CALLS


def test_8_bits_widened_in_parts_are_those_widened_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    levels, scale = torch.randint(-127, 128, (37, 24), dtype=torch.int8), torch.rand(37, 1)
    x = torch.randn(3, 2, 24)
    expected = linears.product(x, levels, scale)
    monkeypatch.setattr(linears, "MOST_WIDENED", 5 * 24)
    torch.testing.assert_close(linears.product(x, levels, scale), expected, atol=1e-3, rtol=1e-4)
    monkeypatch.setattr(linears, "MOST_WIDENED", 1)
    torch.testing.assert_close(linears.product(x, levels, scale), expected, atol=1e-3, rtol=1e-4)


def test_small_matrices_and_other_devices_keep_torchs_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linears, "LEAST_WEIGHTS", 48 * 32 + 1)
    with torch.device("meta"):
        elsewhere = Linear(480, 320)
    modules = torch.nn.ModuleList([Linear(48, 32), elsewhere])
    use_row_products(modules, torch.float32)
    assert [module.row_product for module in modules] == [None, None]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # in torch itself
def test_what_torch_compiles_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "TRIAL_SHAPE", (256, 128))
    monkeypatch.setattr(products, "_is_faster", _always(products._is_faster))
    compiled = row_product.__wrapped__(torch.int8, torch.float32)
    if compiled is None:
        pytest.skip("torch cannot compile for this processor")
    weight = torch.randint(-127, 128, (96, 200), dtype=torch.int8)
    x, scale = torch.randn(200), torch.rand(96, 1)
    with torch.inference_mode():
        found = compiled(x, weight, scale)
    expected = (weight.float() @ x) * scale[:, 0]
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)


def _always(trial: object) -> object:
    """The trial, whose outcome depends on the machine, and then yes."""

    def passed(*inputs: object) -> bool:
        trial(*inputs)  # type: ignore[operator]
        return True

    return passed


def test_without_a_compiler_torchs_own_product_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*inputs: object) -> Tensor:
        raise RuntimeError("No working C++ compiler found\nmore")

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: failing)
    with caplog.at_level(logging.INFO, "blocktrain"):
        assert row_product.__wrapped__(torch.float32, torch.float32) is None
    assert caplog.records[-1].message.endswith("uses its own: No working C++ compiler found")
