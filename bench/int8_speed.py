"""Measures the speed of a linear map with int8 weights, against the same map in bf16.

    PYTHONPATH=src python bench/int8_speed.py [--outputs N --inputs K]

For each number of rows it times three ways, in milliseconds: the kernel that reads int8, int8
weights widened first and then multiplied, and bf16 weights. It also prints how far the kernel's
result is from that of the second way, and the speed of memory by a copy. Prints a table, then JSON.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blocktrain.model.linear import fused_linear
from blocktrain.training.device import resolve

ROWS = (1, 8, 32, 64, 128, 256)
TIMES = 20
COPIED_BYTES = 4 << 30


def milliseconds(function: Callable[[], Tensor], device: torch.device) -> float:
    for _ in range(3):
        function()
    _wait(device)
    began = time.perf_counter()
    for _ in range(TIMES):
        function()
    _wait(device)
    return (time.perf_counter() - began) / TIMES * 1e3


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_rate(device: torch.device) -> float:
    """Bytes a second, read and written together."""
    size = COPIED_BYTES if device.type == "cuda" else COPIED_BYTES >> 6
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2e3 * size / milliseconds(lambda: target.copy_(source), device)


def compared(rows: int, outputs: int, inputs: int, device: torch.device) -> dict[str, Any]:
    # More than one of each, so that no cache holds what is read.
    levels = [
        torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, device=device)
        for _ in range(2)
    ]
    wide = [each.to(torch.bfloat16) for each in levels]
    scale = torch.rand(outputs, 1, device=device)
    x = torch.randn(rows, inputs, device=device, dtype=torch.bfloat16)

    def widened() -> Tensor:
        for each in levels:
            y = F.linear(x, each.to(x.dtype)) * scale.view(-1)
        return y

    def plain() -> Tensor:
        for each in wide:
            y = F.linear(x, each)
        return y

    told = {"rows": rows, "bf16_ms": milliseconds(plain, device) / 2,
            "widened_ms": milliseconds(widened, device) / 2}  # fmt: skip
    if device.type == "cuda" and (fused := fused_linear(device, x.dtype)):

        def by_kernel() -> Tensor:
            for each in levels:
                y = fused(x, each, scale)
            return y

        found, expected = by_kernel().float(), widened().float()
        told["error"] = float((found - expected).abs().max() / expected.abs().max())
        told["kernel_ms"] = milliseconds(by_kernel, device) / 2
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--outputs", type=int, default=8192)
    parser.add_argument("--inputs", type=int, default=27616)
    args = parser.parse_args()
    device = resolve("auto", "bf16").device
    rate = memory_rate(device)
    rows = [compared(count, args.outputs, args.inputs, device) for count in ROWS]
    read_ms = args.outputs * args.inputs / rate * 1e3
    print(f"{args.outputs} x {args.inputs}; memory {rate / 1e12:.2f} TB/s, so {read_ms:.4f} ms for")
    print("the bytes; ms by rows, by the kernel, widened, with bf16 weights; largest difference")
    for row in rows:
        kernel, error = row.get("kernel_ms", float("nan")), row.get("error", float("nan"))
        others = f"{row['widened_ms']:.4f} | {row['bf16_ms']:.4f}"
        print(f"| {row['rows']} | {kernel:.4f} | {others} | {error:.1e} |")
    print(json.dumps({"bytes_per_second": rate, "rows": rows}))


if __name__ == "__main__":
    main()
