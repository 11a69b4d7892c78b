"""Loads stored weights into blocks and models; an error names the weight that does not fit.

A stored block is built without weights (on the meta device) and filled one tensor at a time, so
that a block larger than the host's memory can be loaded onto a device.

As a program it writes version 0 of every block of a new run to files. A coordinator starts it,
since a coordinator never loads torch:

    python -m blocktrain.training.stored_models CONFIG FOLDER [--force]
"""

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from blocktrain.config import Config, load_stored_config
from blocktrain.errors import BlocktrainError, ConfigError, RunError
from blocktrain.model.block import Block
from blocktrain.model.linear import Int8Linear, in_8_bits
from blocktrain.model.stack import Stack, assemble, initial_block, new_block
from blocktrain.storage.run_dir import RunDir
from blocktrain.storage.tensor_file import Tensors, encode
from blocktrain.training.device import Compute
from blocktrain.training.memory_check import check_first_versions

PREDICTS = ("norm.", "head.")  # weights through which a block predicts


def load_stack(run: RunDir, compute: Compute, *, frozen: bool = False) -> Stack:
    """The model of a run, its weights in fp32. If it is `frozen`, they are in the type of
    computing, and single rows are computed as fast as this machine can."""
    dtype = compute.dtype if frozen else torch.float32
    indices = range(run.config.block_count)
    blocks = [load_stored_block(run, index, compute, dtype) for index in indices]
    for block in blocks if frozen else ():
        block.use_row_products()
    return assemble(run.config, blocks)


def load_stored_block(
    run: RunDir,
    index: int,
    compute: Compute,
    dtype: torch.dtype,
    weight_format: str = "full",
    on_read: Callable[[int], None] = lambda count: None,
) -> Block:
    """Load one block of a run onto the device. With `weight_format` int8, the layers' matrices are
    stored in 8 bits. `on_read` gets the size of every tensor that was read."""
    block, origin = meta_init_block(run.config, index, weight_format), str(run.path)
    missing = weight_shapes(block)
    for name, weight in run.read_block(index, bf16_as_bits=True):
        on_read(weight.nbytes)
        stored = torch.from_numpy(weight)
        if weight.dtype == np.uint16:
            stored = stored.view(torch.bfloat16)
        _check_shape(name, stored.shape, missing.pop(name, None), origin)
        put_weight(block, name, stored.to(compute.device), dtype)
    for name in missing:
        _check_shape(name, None, missing[name], origin)
    return finish_loading(block, compute.device, compute.dtype)


def load_block(module: nn.Module, weights: Tensors, origin: str) -> None:
    """Copy weights into a module. `origin`: where they come from, for error messages."""
    parameters = dict(module.named_parameters())
    for name in sorted({*parameters, *weights}):
        stored, expected = weights.get(name), parameters.get(name)
        _check_shape(
            name,
            None if stored is None else stored.shape,
            None if expected is None else expected.shape,
            origin,
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(weights[name]))


def load_warm_start(module: nn.Module, config: Config, index: int) -> None:
    """Copy the weights of a block of the run in train.warm_start into a module. Runs that are cut
    elsewhere, or of another kind, have the same layers in other blocks."""
    origin = RunDir.open(Path(config.train.warm_start))
    theirs, ours = origin.config, config
    alike = theirs.kind == ours.kind and theirs.depths == ours.depths
    if theirs.kind.last_block_predicts or not (alike or theirs.kind.denoises):
        _load_layers(module, config, index, origin)
        return
    if theirs.block_count != ours.block_count:
        raise RunError(
            f"train.warm_start: {origin.path} has {theirs.block_count} blocks, this run has"
            f" {ours.block_count}; set model.blocks={theirs.block_count}"
        )
    load_block(module, origin.block_weights(index), str(origin.path))


def first_weights(config: Config, index: int) -> Tensors:
    """The weights of a block before its first step."""
    block = initial_block(config, index)
    if config.train.warm_start:
        load_warm_start(block, config, index)
    return {name: p.detach().numpy() for name, p in block.named_parameters()}


@torch.no_grad()
def _load_layers(module: nn.Module, config: Config, index: int, origin: RunDir) -> None:
    """Copy a causal block's layers, embedding, last norm and head from a model whose blocks may be
    cut elsewhere. A private tail keeps its initial weights, which have no effect."""
    _check_same_model(config, origin)
    parameters = dict(module.named_parameters())
    missing = {name for name in parameters if not name.startswith("tail.")}
    first = sum(config.depths[:index])
    for block in range(origin.config.block_count):
        shift = sum(origin.config.depths[:block]) - first
        is_last = block == origin.config.block_count - 1
        for stored, weight in origin.read_block(block):
            if stored.startswith("tail.") or (stored.startswith(PREDICTS) and not is_last):
                continue
            names = {_shifted(stored, shift)}
            if stored == "embed.weight" and origin.config.model.tied_embeddings:
                names.add("head.weight")
            for name in names & missing:
                _check_shape(name, weight.shape, parameters[name].shape, str(origin.path))
                parameters[name].copy_(torch.from_numpy(weight))
                missing.remove(name)
    for name in missing:
        _check_shape(name, None, parameters[name].shape, str(origin.path))


def _check_same_model(config: Config, origin: RunDir) -> None:
    """Raise ConfigError if the weights would compute something else with these settings."""
    cut = {"blocks", "depths", "window", "dropout", "tied_embeddings"}
    ours, theirs = asdict(config.model), asdict(origin.config.model)
    differing = [f"model.{name}" for name in ours if name not in cut and ours[name] != theirs[name]]
    if config.vocab.sha256 != origin.config.vocab.sha256:
        differing.append("data.tokenizer")
    if config.kind.denoises:
        differing.append("objective.kind")
    if differing:
        raise ConfigError(
            f"train.warm_start: {origin.path} has other settings ({', '.join(differing)}); start"
            f" from its settings with --config {origin.path / 'config.toml'}"
        )


def _shifted(name: str, by: int) -> str:
    """The name of a weight whose layer's number grows by `by`."""
    kind, _, rest = name.partition(".")
    number, _, leaf = rest.partition(".")
    return f"layers.{int(number) + by}.{leaf}" if kind == "layers" else name


def meta_init_block(config: Config, index: int, weight_format: str = "full") -> Block:
    """A block of the run whose parameters have shapes but no values."""
    with torch.device("meta"):
        block = new_block(config, index)
    if weight_format == "int8":
        for layers in ("layers", "tail"):
            in_8_bits(getattr(block, layers, nn.ModuleList()))
    return block


def weight_shapes(block: nn.Module) -> dict[str, torch.Size]:
    """The shape of every weight that a block needs, by its stored name."""
    shapes = {name: parameter.shape for name, parameter in block.named_parameters()}
    for name, module in block.named_modules():
        if isinstance(module, Int8Linear):
            shapes[f"{name}.weight"] = module.get_buffer("levels").shape
    return shapes


@torch.no_grad()
def put_weight(block: nn.Module, name: str, weight: Tensor, dtype: torch.dtype) -> None:
    """Set one weight of a meta-initialised block, on the weight's device."""
    path, _, leaf = name.rpartition(".")
    owner = block.get_submodule(path)
    if isinstance(owner, Int8Linear) and leaf == "weight":
        owner.take(weight.float())
    else:
        setattr(owner, leaf, nn.Parameter(weight.to(dtype), requires_grad=False))


def finish_loading(block: Block, device: torch.device, dtype: torch.dtype) -> Block:
    """Move the buffers to the device of the weights, and set the type to compute in."""
    block.compute_dtype = dtype
    return block.to(device).eval()


def _check_shape(
    name: str, stored: tuple[int, ...] | None, expected: tuple[int, ...] | None, origin: str
) -> None:
    if stored is None:
        fault = f"it lacks {name}"
    elif expected is None:
        fault = f"the model has no {name}"
    elif tuple(stored) != tuple(expected):
        fault = f"{name} has shape {tuple(stored)}, not {tuple(expected)}"
    else:
        return
    raise RunError(
        f"{origin} does not fit this model: {fault}; use weights with the same [model] settings"
    )


def _write_initial_weights(config_path: Path, folder: Path, *, force: bool) -> None:
    config = load_stored_config(config_path)
    if not force:
        check_first_versions(config)
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(config.block_count):
        weights = first_weights(config, index)
        with (folder / f"block-{index}.safetensors").open("wb") as file:
            file.writelines(encode(weights))


if __name__ == "__main__":
    try:
        _write_initial_weights(Path(sys.argv[1]), Path(sys.argv[2]), force="--force" in sys.argv)
    except BlocktrainError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
