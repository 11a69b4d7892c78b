"""The command line: one file per group of commands, and what they share."""

import sys


def run() -> None:
    """The program `blocktrain`. Ctrl-C prints no traceback, even while main.py is imported."""
    try:
        from blocktrain.cli.main import main

        main()
    except KeyboardInterrupt:
        sys.exit(130)
