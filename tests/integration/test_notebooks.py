"""Every notebook runs from top to bottom, and stores no outputs."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
BAR = "<progress value='100' max='100'>"  # of a finished block


@pytest.mark.parametrize(
    ("name", "shown"),
    [("train-and-inspect", "<progress value='40' max='40'>"), ("swarm", BAR)],
)
def test_a_notebook_runs(name: str, shown: str, tmp_path: Path):
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": tmp_path}})
    client.execute(env={**os.environ, "OMP_NUM_THREADS": "1"})  # tests share two cores
    assert shown in str([cell.get("outputs") for cell in notebook.cells])
