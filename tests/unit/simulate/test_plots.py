"""Plots of simulations, where matplotlib is installed; a plain word where it is not."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.scenarios import scenario

from blocktrain.errors import ConfigError
from blocktrain.figures import check_plots_installed
from blocktrain.simulate.report import write_plots
from blocktrain.simulate.simulation import simulate

INSTALLED = importlib.util.find_spec("matplotlib") is not None


@pytest.mark.skipif(not INSTALLED, reason="needs matplotlib: pip install 'blocktrain[plots]'")
def test_a_sweep_is_drawn_as_one_picture_for_each_question(tmp_path: Path):
    reports = {str(n): simulate(scenario(simulate__workers=n)) for n in (1, 2)}
    write_plots(tmp_path / "new", "simulate.workers", reports)
    written = {path.name: path.read_bytes()[:4] for path in (tmp_path / "new").iterdir()}
    names = ("progress.png", "participation.png", "staleness.png")
    assert written == dict.fromkeys(names, b"\x89PNG")


@pytest.mark.skipif(not INSTALLED, reason="needs matplotlib: pip install 'blocktrain[plots]'")
def test_what_is_learned_is_drawn_where_something_is(tmp_path: Path):
    report = simulate(scenario(simulate__sample_seconds=5.0))
    samples = tuple(replace(sample, ce=3.0) for sample in report.samples)
    write_plots(tmp_path, "", {"": replace(report, samples=samples)})
    assert (tmp_path / "ce.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.skipif(INSTALLED, reason="matplotlib is installed here")
def test_without_matplotlib_the_error_says_what_to_install():
    with pytest.raises(ConfigError, match=r"pip install 'blocktrain\[plots\]'"):
        check_plots_installed()
