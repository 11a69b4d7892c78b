"""Serves a model of a given shape whose weights come from a seed; for shapes without a checkpoint.

    python bench/serving_seeded.py stage RUN --block K ...     like `blocktrain stage`
    python bench/serving_seeded.py serve RUN --stages A,B ...  like `blocktrain serve`

RUN has a config.toml and nothing else. The weights are made on the device, without passing through
disk or the host's memory. They are held as `full` (the compute type), `int8` (the layers' matrices
in 8 bits) or `logical`: one layer's matrices stand for those of all layers of a block. A logical
model computes and reads as much as a real one but holds less, so it says nothing about memory.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from blocktrain.config import Config
from blocktrain.model.block import Block
from blocktrain.numerics.sampling import mixed_seed
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.device import Compute
from blocktrain.training.stored_models import (
    finish_loading,
    meta_init_block,
    put_weight,
    weight_shapes,
)

HELD = ("full", "int8", "logical")
BENCH_STREAM = 77
SMALL_STD = 0.1  # of what is no matrix: embeddings, the local filter's taps
# Layers, width, heads, and the width of the MLP in multiples of the stream's. A head has 128.
SHAPES = {
    "tiny": (4, 64, 4, 4.0),
    "1.3B": (24, 2048, 16, 4.5),
    "7B": (32, 4096, 32, 4.5),
    "30B": (60, 6656, 52, 24192 / 6656),
    "75.8B": (80, 8192, 64, 41424 / 8192),
}


def config_of(shape: str) -> Config:
    """Four blocks that denoise."""
    layers, width, heads, ratio = SHAPES[shape]
    model = {"layers": layers, "width": width, "heads": heads, "mlp_ratio": ratio, "blocks": 4}
    return Config().with_settings(
        **{f"model__{name}": value for name, value in model.items()}, model__window=256
    )


@dataclass(frozen=True)
class SeededBlocks:
    config: Config
    held: str

    @torch.no_grad()
    def load(self, block: int, compute: Compute) -> nn.Module:
        module = self._hollow(block)
        seed = mixed_seed(self.config.train.seed, block, BENCH_STREAM)
        draws = torch.Generator(compute.device).manual_seed(seed)
        for name, shape in weight_shapes(module).items():
            weight = torch.randn(shape, generator=draws, device=compute.device)
            # No path is silent, as the zeros that training starts with would be.
            std = shape[1] ** -0.5 if name.endswith(".weight") else SMALL_STD
            put_weight(
                module, name, weight.mul_(SMALL_STD if "embed" in name else std), compute.dtype
            )
        if compute.device.type == "cuda":
            torch.cuda.empty_cache()  # what making them took, the other processes need
        return finish_loading(module, compute.device, compute.dtype)

    def fingerprint(self, block: int) -> str:
        return f"seed {self.config.train.seed}, {self.held}"

    def parameters(self) -> int:
        """Of the model as it computes, whether its layers have matrices of their own or not."""
        blocks = [meta_init_block(self.config, block) for block in range(self.config.block_count)]
        return sum(shape.numel() for block in blocks for shape in weight_shapes(block).values())

    def resident_bytes(self, dtype: torch.dtype) -> int:
        """Of weights, in all processes together."""
        blocks = [self._hollow(block) for block in range(self.config.block_count)]
        return sum(bytes_ for block in blocks for bytes_ in _sizes(block, dtype))

    def matrix(self) -> tuple[int, int]:
        """Outputs and inputs of one of the largest matrices."""
        return max(
            (
                (shape[0], shape[1])
                for shape in weight_shapes(meta_init_block(self.config, 0)).values()
            ),
            key=lambda shape: shape[0] * shape[1],
        )

    def _hollow(self, block: int) -> Block:
        module = meta_init_block(self.config, block, "int8" if self.held == "int8" else "full")
        if self.held == "logical":
            module.layers = nn.ModuleList([module.layers[0]] * len(module.layers))
        return module


def _sizes(block: Block, dtype: torch.dtype) -> Iterator[int]:
    for parameter in block.parameters():
        yield parameter.numel() * dtype.itemsize
    for name, held in block.named_buffers():
        if name.endswith((".levels", ".scale")):
            yield held.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("role", choices=["stage", "serve"])
    parser.add_argument("run", type=Path)
    parser.add_argument("--name", default="")
    parser.add_argument("--block", default="0", help="K or FIRST-LAST")
    parser.add_argument("--stages", default="")
    parser.add_argument("--listen", required=True)
    parser.add_argument("--keys", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--weights", required=True, choices=HELD)
    args = parser.parse_args()
    source = SeededBlocks(RunDir.open(args.run).config, args.weights)
    (hold if args.role == "stage" else route)(args, source)


def hold(args: argparse.Namespace, source: SeededBlocks) -> None:
    from blocktrain.serve.ring.stage import StageSettings, serve_stage

    first, _, last = args.block.partition("-")
    blocks = range(int(first), int(last or first) + 1)
    settings = StageSettings(
        run=args.run, blocks=blocks, listen=args.listen, announce="",
        keys=args.keys, name=args.name, device=args.device, precision=args.precision,
        weights=args.weights, readout="product", max_requests=64, cache_bytes=4 << 30,
        until_stdin_closes=False,
    )  # fmt: skip
    serve_stage(settings, print, source)


def route(args: argparse.Namespace, source: SeededBlocks) -> None:
    from blocktrain.serve.router.router_server import RouterSettings, serve_router

    settings = RouterSettings(
        run=args.run, listen=args.listen, api_keys=(), stages=tuple(args.stages.split(",")),
        keys=args.keys, plain_tcp=False, wire="fp32", readout="product", device=args.device,
        precision=args.precision, weights=args.weights, max_requests=32, max_tokens=4096,
        patience_seconds=10.0,
    )  # fmt: skip
    serve_router(settings, print, source)


if __name__ == "__main__":
    main()
