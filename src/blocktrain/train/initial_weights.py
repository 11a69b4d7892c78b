"""Writes version 0 of every block of a new run to files.

A coordinator, which never loads torch, runs this once in another process:

    python -m blocktrain.train.initial_weights CONFIG FOLDER
"""

import sys
from pathlib import Path

from blocktrain.config import load_stored_config
from blocktrain.errors import BlocktrainError
from blocktrain.model.stack import initial_block
from blocktrain.storage.run_dir import RunDir
from blocktrain.storage.tensor_file import encode
from blocktrain.train.stored_models import load_block


def write_first_weights(config_path: Path, folder: Path) -> None:
    config = load_stored_config(config_path)
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(config.block_count):
        block = initial_block(config, index)
        if config.train.warm_start:
            origin = RunDir.open(Path(config.train.warm_start))
            load_block(block, origin.block_weights(index), str(origin.path))
        weights = {name: p.detach().numpy() for name, p in block.named_parameters()}
        with (folder / f"block-{index}.safetensors").open("wb") as file:
            file.writelines(encode(weights))


if __name__ == "__main__":
    try:
        write_first_weights(Path(sys.argv[1]), Path(sys.argv[2]))
    except BlocktrainError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
