"""From stored weights to blocks and models in memory; what does not fit is an error that names it.

A stored block is built without weights (on the meta device) and filled one tensor at a time, so
that a block larger than the host's memory can be loaded onto a device.
"""

import torch
from torch import Tensor, nn

from blocktrain.config import Config
from blocktrain.errors import RunError
from blocktrain.model.block import Block
from blocktrain.model.int8 import Int8Linear, in_8_bits
from blocktrain.model.stack import Stack, assemble, new_block
from blocktrain.storage.run_dir import RunDir
from blocktrain.storage.tensor_file import Tensors
from blocktrain.train.device import Compute


def load_stack(run: RunDir, compute: Compute) -> Stack:
    indices = range(run.config.block_count)
    blocks = [load_stored_block(run, index, compute, torch.float32) for index in indices]
    return assemble(run.config, blocks)


def load_stored_block(
    run: RunDir, index: int, compute: Compute, dtype: torch.dtype, weight_format: str = "full"
) -> nn.Module:
    """One of a run's blocks, on the device; reads no other block. `weight_format` int8 stores the
    matrices of layers in 8 bits."""
    block, origin = meta_init_block(run.config, index, weight_format), str(run.path)
    missing = weight_shapes(block)
    for name, weight in run.read_block(index):
        stored = torch.from_numpy(weight)
        _check_shape(name, stored.shape, missing.pop(name, None), origin)
        put_weight(block, name, stored.to(compute.device), dtype)
    for name in missing:
        _check_shape(name, None, missing[name], origin)
    return finish_loading(block, compute.device, compute.dtype)


def load_block(module: nn.Module, weights: Tensors, origin: str) -> None:
    """Copy weights into a module; `origin` is what errors call them."""
    expected = dict(module.named_parameters())
    for name in sorted({*expected, *weights}):
        here = weights[name].shape if name in weights else None
        there = expected[name].shape if name in expected else None
        _check_shape(name, here, there, origin)
    for name, parameter in expected.items():
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(weights[name]))


def meta_init_block(config: Config, index: int, weight_format: str = "full") -> Block:
    """A block of the run whose parameters have shapes but no values."""
    with torch.device("meta"):
        block = new_block(config, index)
    if weight_format == "int8":
        for layers in ("layers", "tail"):
            in_8_bits(getattr(block, layers, nn.ModuleList()))
    return block


def weight_shapes(block: nn.Module) -> dict[str, torch.Size]:
    """Every weight that a block needs, by the name it is stored under."""
    shapes = {name: parameter.shape for name, parameter in block.named_parameters()}
    for name, module in block.named_modules():
        if isinstance(module, Int8Linear):
            shapes[f"{name}.weight"] = module.get_buffer("levels").shape
    return shapes


@torch.no_grad()
def put_weight(block: nn.Module, name: str, weight: Tensor, dtype: torch.dtype) -> None:
    """Give a meta-initialised block one of its weights, on the device that the weight is on."""
    path, _, leaf = name.rpartition(".")
    owner = block.get_submodule(path)
    if isinstance(owner, Int8Linear):
        owner.to_empty(device=weight.device)
        owner.take(weight)
    else:
        setattr(owner, leaf, nn.Parameter(weight.to(dtype), requires_grad=False))


def finish_loading(block: Block, device: torch.device, dtype: torch.dtype) -> Block:
    """Move the buffers to the device of the weights, and set the type to compute in."""
    block.compute_dtype = dtype
    return block.to(device).eval()


def _check_shape(
    name: str, here: tuple[int, ...] | None, there: tuple[int, ...] | None, origin: str
) -> None:
    if here is None or there is None:
        fault = "lacks" if here is None else "has no place for"
        subject = origin if here is None else "the model"
        raise RunError(f"{origin} does not fit this model: {subject} {fault} {name}")
    if tuple(here) != tuple(there):
        raise RunError(
            f"{origin} does not fit this model: {name} is {tuple(here)}, not {tuple(there)}"
        )
