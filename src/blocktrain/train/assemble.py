"""From a run directory to a model in memory, ready to score or to generate."""

from torch import nn

from blocktrain.model.stack import Stack, new_block
from blocktrain.storage.run_dir import RunDir, Tensors
from blocktrain.train.device import Compute
from blocktrain.train.trainer import load_block


def load_stack(run: RunDir, compute: Compute) -> Stack:
    blocks = [_loaded(run, weights, compute) for weights in run.weights()]
    return Stack.assemble(run.config, blocks)


def _loaded(run: RunDir, weights: Tensors, compute: Compute) -> nn.Module:
    module = new_block(run.config)
    load_block(module, weights, str(run.path))
    module.compute_dtype = compute.dtype
    return module.to(compute.device)
