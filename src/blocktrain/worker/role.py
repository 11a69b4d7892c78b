"""What a run takes a worker for: its invite says that at the first join, and it stays so."""

from pathlib import Path

from blocktrain.errors import ConfigError
from blocktrain.protocol.messages import Joined, Role


def check_role(joined: Joined, wanted: Role, folder: Path) -> None:
    if joined.role == wanted:
        return
    option = "leave --evaluate out" if joined.role == "train" else "add --evaluate"
    raise ConfigError(
        f"to the run this worker is one to {joined.role}: the invite is for that, or the key in"
        f" {folder} joined for that before; {option}, or {wanted} with an invite made for it"
        " and another --folder"
    )
