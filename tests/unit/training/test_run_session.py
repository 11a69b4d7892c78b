"""Blocks as child processes: their log lines and errors are those of the process that started
them."""

import logging
import sys
from pathlib import Path

import pytest
from tests.support.training import CPU, quiet

from blocktrain.config import Config
from blocktrain.data.corpus import Corpus
from blocktrain.errors import DataError
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.run_session import LocalRun

CHILD = """
import json, sys
line = {"time": "now", "level": "warning", "logger": "blocktrain.model", "message": "slow"}
line["step"] = 3
print("block 0 resumes at step 3", json.dumps(line), "[1]", file=sys.stderr, sep="\\n")
"""


def test_a_log_line_of_a_child_is_logged_with_its_block(
    tmp_path: Path, config: Config, corpus: Corpus, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "blocktrain")
    session = LocalRun(RunDir.create(tmp_path / "run", config), corpus, CPU)
    program = [sys.executable, "-c", CHILD]
    assert session.train_side_by_side([1], 1, quiet, lambda: False, program)
    (record,) = caplog.records
    assert (record.name, record.levelname, record.message) == (
        "blocktrain.model",
        "WARNING",
        "slow",
    )
    assert (vars(record)["step"], vars(record)["block"]) == (3, 1)


def test_the_error_of_a_child_is_raised_with_its_block(
    tmp_path: Path, config: Config, corpus: Corpus
):
    session = LocalRun(RunDir.create(tmp_path / "run", config), corpus, CPU)
    program = [
        sys.executable,
        "-c",
        "import sys; print('error: no text', file=sys.stderr); exit(3)",
    ]
    with pytest.raises(DataError, match="block 1: no text"):
        session.train_side_by_side([1], 1, quiet, lambda: False, program)
