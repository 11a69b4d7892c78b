"""What a router and a stage must agree on before they work together: settings and weights."""

import hashlib
import json

from blocktrain.config import Config
from blocktrain.storage.run_dir import RunDir, Tensors


def of_settings(config: Config) -> str:
    """Of the settings that make the model; where and how it was trained does not matter."""
    values = config.to_dict()
    made_of = [values["model"], values["objective"], values["train"]["seed"]]
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:16]


def of_weights(weights: Tensors) -> str:
    """Of one block, whatever kind of file it lies in."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name]
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        digest.update(tensor.data if tensor.flags.c_contiguous else tensor.tobytes())
    return digest.hexdigest()[:16]


def of_block(run: RunDir, block: int) -> str:
    return of_weights(run.block_weights(block))
