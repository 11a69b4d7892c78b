from pathlib import Path

import numpy as np

from blocktrain.worker.kept_residual import KeptResidual

OWED = np.arange(5, dtype=np.float32)


def test_nothing_is_owed_at_first(tmp_path: Path):
    assert KeptResidual(tmp_path, 0).load(5).tolist() == [0.0] * 5


def test_what_is_left_out_counts_once_the_update_was_accepted(tmp_path: Path):
    kept = KeptResidual(tmp_path / "run", 0)
    kept.propose("lease1", OWED)
    assert not kept.load(5).any()
    kept.settle("lease1", accepted=True)
    assert KeptResidual(tmp_path / "run", 0).load(5).tolist() == OWED.tolist()
    assert not KeptResidual(tmp_path / "run", 1).load(5).any(), "another block's"


def test_an_update_that_was_refused_changes_nothing(tmp_path: Path):
    kept = KeptResidual(tmp_path, 0)
    kept.propose("lease1", OWED)
    kept.settle("lease1", accepted=True)
    kept.propose("lease2", 2 * OWED)
    kept.settle("lease2", accepted=False)
    assert kept.load(5).tolist() == OWED.tolist()


def test_late_news_of_an_earlier_update_is_no_news(tmp_path: Path):
    kept = KeptResidual(tmp_path, 0)
    kept.propose("lease1", OWED)
    kept.propose("lease2", 2 * OWED)
    kept.settle("lease1", accepted=True)
    assert not kept.load(5).any()
    kept.settle("lease2", accepted=True)
    assert kept.load(5).tolist() == (2 * OWED).tolist()
    assert len(list(tmp_path.iterdir())) == 1


def test_what_cannot_be_read_or_does_not_fit_is_nothing_owed(tmp_path: Path):
    kept = KeptResidual(tmp_path, 0)
    kept.propose("lease1", OWED)
    kept.settle("lease1", accepted=True)
    assert kept.load(4).tolist() == [0.0] * 4
    next(tmp_path.iterdir()).write_bytes(b"damaged")
    assert not kept.load(5).any()
