from pathlib import Path

import pytest

from blocktrain.config import Config
from blocktrain.data.corpus import Corpus
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.device import resolve
from blocktrain.training.run_session import loss_by_sigma, open_session, with_fitted_bounds

CPU = resolve("cpu", "fp32")


@pytest.fixture
def adaptive(config: Config) -> Config:
    return config.with_settings(
        model__layers=4, model__blocks=4, objective__partition="adaptive", objective__pilot_steps=30
    )


def test_the_measured_loss_rises_with_sigma(adaptive: Config, corpus: Corpus):
    sigmas, losses = loss_by_sigma(adaptive, corpus, CPU)
    assert (sigmas[0], sigmas[-1]) == (1.0, 10.0)
    assert losses[-1] > losses[0]


def test_cuts_are_fitted_once_and_stay_with_the_run(
    adaptive: Config, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_bytes(corpus.splits["train"].tobytes())
    adaptive = adaptive.with_settings(data__source=f"text:{tmp_path}/text.txt")
    run = open_session(adaptive, tmp_path / "run").run
    bounds = run.config.objective.bounds
    assert len(bounds) == 5
    assert bounds != adaptive.partition().bounds
    assert run.config.partition().bounds == bounds
    assert open_session(adaptive, run.path).run.config == run.config
    assert RunDir.open(run.path).config.objective.bounds == bounds


def test_a_lognormal_run_is_left_alone(config: Config, corpus: Corpus):
    assert with_fitted_bounds(config, corpus, CPU) is config
