"""The extensions of a run on this machine: a file beside its config.toml, which never changes.

The hash of config.toml is in every manifest of the run, so an extension is stored outside it.
"""

import json
from pathlib import Path
from typing import Any

from blocktrain.errors import CorruptFileError
from blocktrain.files import RESTORE, write_bytes

CONFIG, FILE = "config.toml", "extensions.json"


def extensions(folder: Path) -> list[int]:
    """The numbers of steps that a run was extended to, in order."""
    path = folder / FILE
    if not path.is_file():
        return []
    try:
        stored = json.loads(path.read_bytes())
    except ValueError:
        stored = None
    steps = stored.get("steps") if isinstance(stored, dict) else None
    if not isinstance(steps, list) or not all(type(each) is int for each in steps):
        raise CorruptFileError(f"{path} is not a list of extensions; {RESTORE}")
    return steps


def add_extension(folder: Path, steps: int) -> None:
    text = json.dumps({"steps": [*extensions(folder), steps]})
    write_bytes(folder / FILE, text.encode())


def extended_values(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """The settings in a file, with the extensions beside it if it is the config.toml of a run."""
    for steps in extensions(path.parent) if path.name == CONFIG else ():
        train = values.get("train")
        if not isinstance(train, dict) or "steps" not in train:
            raise CorruptFileError(f"{path} was altered: it has no train.steps; {RESTORE}")
        ends = [*train.get("extended_at", ()), train["steps"]]
        values = {**values, "train": {**train, "extended_at": ends, "steps": steps}}
    return values
