from pathlib import Path

import numpy as np
import pytest

from blocktrain.errors import UnreachableError
from blocktrain.worker.local_block import PIECE, ResidualFile, settle_leftover_residuals

OWED = np.arange(5, dtype=np.float32)


def load(kept: ResidualFile, count: int) -> np.ndarray:
    """What is added to zeros, which lie in several arrays."""
    zeros = np.zeros(count, np.float32)
    kept.add_to([zeros[:2], zeros[2:2], zeros[2:]])
    return zeros


def propose(kept: ResidualFile, lease: str, owed: np.ndarray) -> None:
    with kept.proposal(lease, owed.size) as owe:
        owe(owed[:3])
        owe(owed[3:])


def test_there_is_no_residual_at_first(tmp_path: Path):
    assert load(ResidualFile(tmp_path, 0), 5).tolist() == [0.0] * 5


def test_a_residual_counts_once_its_update_is_accepted(tmp_path: Path):
    kept = ResidualFile(tmp_path / "run", 0)
    propose(kept, "lease1", OWED)
    assert not load(kept, 5).any()
    kept.settle("lease1", accepted=True)
    assert load(ResidualFile(tmp_path / "run", 0), 5).tolist() == OWED.tolist()
    assert not load(ResidualFile(tmp_path / "run", 1), 5).any(), "another block's"


def test_an_update_that_was_refused_changes_nothing(tmp_path: Path):
    kept = ResidualFile(tmp_path, 0)
    propose(kept, "lease1", OWED)
    kept.settle("lease1", accepted=True)
    propose(kept, "lease2", 2 * OWED)
    kept.settle("lease2", accepted=False)
    assert load(kept, 5).tolist() == OWED.tolist()


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize(
    ("accepted", "owed"), [(True, 2 * OWED), (False, OWED), (None, np.zeros_like(OWED))]
)
def test_a_leftover_residual_depends_on_what_became_of_its_update(
    tmp_path: Path, ended: bool, accepted: bool | None, owed: np.ndarray
):
    """Where nobody knows, nothing is: told once is enough."""
    kept, other = ResidualFile(tmp_path, 0), ResidualFile(tmp_path, 1)
    for each in (kept, other):
        propose(each, "lease1", OWED)
        each.settle("lease1", accepted=True)
    propose(kept, "lease2", 2 * OWED)
    if ended:
        settle_leftover_residuals(tmp_path, {"lease2": accepted}.__getitem__)
    else:
        kept.settle("lease2", accepted=accepted)
    assert load(kept, 5).tolist() == owed.tolist()
    assert load(other, 5).tolist() == OWED.tolist(), "no update of that block was on its way"
    assert not list(tmp_path.glob("*.lease2"))


def test_without_an_answer_a_leftover_residual_waits_for_the_next_time(tmp_path: Path):
    kept = ResidualFile(tmp_path, 0)
    propose(kept, "lease1", OWED)

    def nobody_answers(lease: str) -> bool:
        raise UnreachableError("the worker was stopped")

    with pytest.raises(UnreachableError):
        settle_leftover_residuals(tmp_path, nobody_answers)
    settle_leftover_residuals(tmp_path, lambda lease: True)
    assert load(kept, 5).tolist() == OWED.tolist()


def test_an_update_that_was_never_made_keeps_the_old_residual(tmp_path: Path):
    kept = ResidualFile(tmp_path, 0)
    propose(kept, "lease1", OWED)
    kept.settle("lease1", accepted=True)
    with pytest.raises(ZeroDivisionError), kept.proposal("lease2", 5):
        raise ZeroDivisionError("the process ends in the middle")
    settle_leftover_residuals(tmp_path, lambda lease: None)
    assert load(kept, 5).tolist() == OWED.tolist()


def test_a_late_answer_about_an_earlier_update_changes_nothing(tmp_path: Path):
    kept = ResidualFile(tmp_path, 0)
    propose(kept, "lease1", OWED)
    propose(kept, "lease2", 2 * OWED)
    kept.settle("lease1", accepted=True)
    assert not load(kept, 5).any()
    kept.settle("lease2", accepted=True)
    assert load(kept, 5).tolist() == (2 * OWED).tolist()
    assert len(list(tmp_path.iterdir())) == 1


def test_an_unreadable_or_unfitting_residual_counts_as_none(tmp_path: Path):
    kept = ResidualFile(tmp_path, 0)
    propose(kept, "lease1", OWED)
    kept.settle("lease1", accepted=True)
    assert load(kept, 4).tolist() == [0.0] * 4
    next(tmp_path.iterdir()).write_bytes(b"damaged")
    assert not load(kept, 5).any()


def test_an_update_that_could_not_be_made_leaves_no_proposal(tmp_path: Path):
    kept = ResidualFile(tmp_path, 0)
    propose(kept, "lease1", OWED)
    kept.settle("lease1", accepted=True)
    with pytest.raises(ZeroDivisionError), kept.proposal("lease2", 5) as owe:
        owe(1 / 0 * OWED)
    kept.settle("lease2", accepted=True)
    assert load(kept, 5).tolist() == OWED.tolist()


def test_many_numbers_pass_through_in_pieces(tmp_path: Path):
    kept, owed = ResidualFile(tmp_path, 0), np.arange(2 * PIECE + 3, dtype=np.float32)
    propose(kept, "lease1", owed)
    kept.settle("lease1", accepted=True)
    weights = np.ones_like(owed)
    kept.add_to([weights[: PIECE + 1].reshape(1, -1), weights[PIECE + 1 :]])
    assert (weights == 1 + owed).all()
