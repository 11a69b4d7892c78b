"""The text that comes with Python: enough of it, mostly prose, always the same."""

import ast
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from blocktrain.data import sources


@pytest.fixture(scope="module")
def text() -> bytes:
    # Warnings are errors here, so this also shows that parsing the library lets none out.
    return b"".join(sources.stdlib_prose())


def test_there_are_several_megabytes(text: bytes) -> None:
    assert len(text) >= 2_500_000


def test_it_is_prose(text: bytes) -> None:
    letters = sum(char.isalpha() or char.isspace() for char in text.decode())
    assert letters / len(text) > 0.85
    assert text.count(b" the ") > 15_000


def test_another_process_collects_the_same(text: bytes) -> None:
    code = (
        "import sys; from blocktrain.data.sources import stdlib_prose;"
        " sys.stdout.buffer.writelines(stdlib_prose())"
    )
    # Another hash seed, so that an order taken from a set would show.
    again = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        check=True,
        timeout=120,
    )
    assert again.stdout == text


def test_no_piece_occurs_twice(text: bytes) -> None:
    pieces = [*sources.manual_topics(), *sources.module_prose()]
    assert len(set(pieces)) < len(pieces), "the library repeats itself, or this shows nothing"
    expected = sum(len(piece.encode(errors="replace")) + 2 for piece in set(pieces)) - 2
    assert len(text) == expected


def test_docstrings_and_runs_of_comments_are_taken(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        '"""What the module is for."""\n'
        "# A single line of comment is not taken.\n"
        "x = 1\n"
        "class Thing:\n"
        "    '''What a thing is.'''\n"
        "    # First line of a comment\n"
        "    #   and its indented second.\n"
        '    pattern = "\\d"\n'
    )
    assert sources.prose_of(module) == [
        "What the module is for.",
        "What a thing is.",
        " First line of a comment\n   and its indented second.",
    ]


def test_parsing_lets_no_warning_out() -> None:
    source = '"""Text."""\npattern = "\\d"\n'
    with pytest.warns((DeprecationWarning, SyntaxWarning)):
        ast.parse(source)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(sources.docstrings(source)) == ["Text."]


@pytest.mark.parametrize("content", [b"print 'Python 2'\n", b"# \xff\n", b"# coding: nonsense\n"])
def test_a_stray_file_is_passed_over(tmp_path: Path, content: bytes) -> None:
    stray = tmp_path / "stray.py"
    stray.write_bytes(content)
    assert sources.prose_of(stray) == []


@pytest.mark.parametrize("count", [1, 2, 3, 6, 12, 100, 7919, 10_000])
def test_the_stride_visits_every_place(count: int) -> None:
    stride = sources.coprime_stride(count)
    assert {i * stride % count for i in range(count)} == set(range(count))
