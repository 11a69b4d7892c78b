"""A block without its weights, and how they are put in: one at a time, where they are to stay.

So a block larger than the host's memory can be loaded, or be made on the device. Parameters are
held in the number type they are used in; the layers' matrices, where asked for, in 8 bits. Knows
nothing of files.
"""

import torch
from torch import Tensor, nn

from blocktrain.config import Config
from blocktrain.model.block import Block
from blocktrain.model.int8 import Int8Linear, in_8_bits
from blocktrain.model.stack import new_block


def meta_init_block(config: Config, index: int, held: str = "full") -> Block:
    """A block of the run whose parameters have shapes and nothing else."""
    with torch.device("meta"):
        block = new_block(config, index)
    if held == "int8":
        for layers in ("layers", "tail"):
            in_8_bits(getattr(block, layers, nn.ModuleList()))
    return block


def shapes(block: nn.Module) -> dict[str, torch.Size]:
    """Every weight that a block needs, by the name it is stored under."""
    found = {name: parameter.shape for name, parameter in block.named_parameters()}
    for name, module in block.named_modules():
        if isinstance(module, Int8Linear):
            found[f"{name}.weight"] = module.get_buffer("levels").shape
    return found


@torch.no_grad()
def put(block: nn.Module, name: str, weight: Tensor, dtype: torch.dtype) -> None:
    """One weight into its place, on the device that it is on."""
    path, _, leaf = name.rpartition(".")
    owner = block.get_submodule(path)
    if isinstance(owner, Int8Linear):
        owner.to_empty(device=weight.device)
        owner.take(weight)
    else:
        setattr(owner, leaf, nn.Parameter(weight.to(dtype), requires_grad=False))


def settle(block: Block, device: torch.device, dtype: torch.dtype) -> Block:
    """When all weights are in: the rest of it to the same device, and the type to compute in."""
    block.compute_dtype = dtype
    return block.to(device).eval()
