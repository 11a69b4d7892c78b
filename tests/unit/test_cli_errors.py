"""Errors of the option parser look like all others."""

import subprocess
import sys

import pytest

PROGRAM = [sys.executable, "-m", "blocktrain"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian"], "error: no such command 'trian'. Did you mean 'train'?; see blocktrain --help"),
        (["train", "--frce"], "see blocktrain train --help"),
        (["train"], "error: missing option '--config'; see blocktrain train --help"),
        (["worker", "x", "--nice", "99"], "error: invalid value for '--nice': 99 is not in the"),
        (["ban"], "error: missing argument 'WORKER'; see blocktrain ban --help"),
    ],
)
def test_an_error_of_the_options_is_one_line(arguments: list[str], expected: str):
    ended = subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert expected in ended.stderr
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1


def test_without_arguments_the_help_is_shown():
    ended = subprocess.run(PROGRAM, capture_output=True, text=True, check=False)
    assert "Usage: blocktrain" in ended.stdout + ended.stderr
    assert "error:" not in ended.stderr
