"""A command as somebody at a terminal sees it."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path

STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def seen(command: Sequence[str], columns: int, cwd: Path, env: Mapping[str, str]) -> str:
    """All that it wrote to a terminal of so many columns, without colours; it must succeed."""
    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    # Where these are set, they would count for more than the terminal.
    clean = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        command, stdin=there, stdout=there, stderr=there, cwd=cwd, env={**clean, "TERM": "xterm"}
    )
    os.close(there)
    written = b""
    try:
        while piece := os.read(here, 65536):
            written += piece
    except OSError:
        pass  # Linux's way of saying that nobody writes any more
    os.close(here)
    text = STYLE.sub("", written.decode())
    assert process.wait() == 0, text
    return text
