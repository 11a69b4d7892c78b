"""Windows: which bytes a batch holds depends on the seed and the batch's number, nothing else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktrain.config import BYTE_VOCABULARY
from blocktrain.data.corpus import TrainingWindows, evaluation_windows, permute, shifted
from blocktrain.numerics.sampling import mixed_seed

WINDOW = 8
# Long enough that no 8 bytes of it occur twice: a window's content tells where it starts.
TEXT = np.random.default_rng(0).integers(0, 256, 3000, dtype=np.uint8)
START_OF = {TEXT[i : i + WINDOW].tobytes(): i for i in range(len(TEXT) - WINDOW + 1)}

KEYS = st.integers(0, 2**63 - 1)


def starts(windows: TrainingWindows, epoch: int) -> list[int]:
    """Where the windows of one epoch start, in the order they are visited."""
    first, last = epoch * windows.per_epoch, (epoch + 1) * windows.per_epoch
    batches = range(first // windows.batch, (last - 1) // windows.batch + 1)
    rows = np.concatenate([windows[i] for i in batches])
    skipped = first - batches[0] * windows.batch
    return [START_OF[row.tobytes()] for row in rows[skipped : skipped + windows.per_epoch]]


def test_the_text_tells_where_a_window_starts() -> None:
    assert len(START_OF) == len(TEXT) - WINDOW + 1


@given(count=st.integers(1, 5000), key=KEYS)
@settings(deadline=None, max_examples=60)
def test_permute_is_a_permutation(count: int, key: int) -> None:
    everything = np.arange(count, dtype=np.uint64)
    assert np.array_equal(np.sort(permute(everything, count, key)), everything)


@given(count=st.integers(1, 5000), key=KEYS, data=st.data())
@settings(deadline=None, max_examples=60)
def test_a_rank_goes_to_the_same_place_alone_as_among_all(
    count: int, key: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, count - 1))
    alone = permute(np.array([rank], dtype=np.uint64), count, key)
    among_all = permute(np.arange(count, dtype=np.uint64), count, key)
    assert alone[0] == among_all[rank]


@given(key=KEYS)
@settings(deadline=None, max_examples=30)
def test_permute_leaves_few_ranks_in_place(key: int) -> None:
    everything = np.arange(1000, dtype=np.uint64)
    # A random permutation leaves one in place on average, and more than 20 practically never.
    assert (permute(everything, 1000, key) == everything).sum() < 20


def test_keys_give_different_permutations() -> None:
    everything = np.arange(1000, dtype=np.uint64)
    orders = {permute(everything, 1000, key).tobytes() for key in range(20)}
    assert len(orders) == 20


@given(
    length=st.integers(WINDOW, len(TEXT)),
    batch=st.integers(1, 40),
    seed=KEYS,
    epoch=st.integers(0, 5),
)
@settings(deadline=None, max_examples=60)
def test_an_epoch_visits_every_window_once(length: int, batch: int, seed: int, epoch: int) -> None:
    windows = TrainingWindows(TEXT[:length], WINDOW, batch, seed)
    visited = sorted(starts(windows, epoch))
    assert visited == list(range(visited[0], visited[0] + len(visited) * WINDOW, WINDOW))
    assert visited[-1] + WINDOW <= length
    # At most one window's worth of bytes is given up at each end.
    assert visited[0] <= WINDOW
    assert length - (visited[-1] + WINDOW) < 2 * WINDOW


@given(seed=KEYS, order=st.permutations(range(12)))
@settings(deadline=None, max_examples=20)
def test_a_batch_depends_on_seed_and_number_only(seed: int, order: list[int]) -> None:
    one = TrainingWindows(TEXT, WINDOW, 16, seed)
    in_order = [one[i] for i in range(12)]
    other = TrainingWindows(TEXT.copy(), WINDOW, 16, seed)
    for i in order:
        assert np.array_equal(other[i], in_order[i])


def test_the_batch_size_does_not_change_the_order_of_windows() -> None:
    small = TrainingWindows(TEXT, WINDOW, 3, seed=7)
    large = TrainingWindows(TEXT, WINDOW, 12, seed=7)
    assert np.array_equal(np.concatenate([small[i] for i in range(4)]), large[0])


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    orders = {
        tuple(starts(TrainingWindows(TEXT, WINDOW, 16, seed), epoch))
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(orders) == 16


def test_epochs_start_at_different_offsets() -> None:
    windows = TrainingWindows(TEXT, WINDOW, 16, seed=0)
    assert len({min(starts(windows, epoch)) % WINDOW for epoch in range(30)}) > WINDOW // 2


def test_a_batch_can_be_larger_than_an_epoch() -> None:
    windows = TrainingWindows(TEXT[: 3 * WINDOW], WINDOW, 7, seed=0)
    assert windows.per_epoch == 2
    assert windows[0].shape == (7, WINDOW)


def test_seeds_are_mixed_from_all_their_parts() -> None:
    parts = [(a, b) for a in range(10) for b in range(1, 10)]
    assert len({mixed_seed(*part) for part in parts}) == len(parts)


@given(length=st.integers(0, 500), window=st.integers(1, 64))
@settings(deadline=None)
def test_evaluation_covers_each_byte_once(length: int, window: int) -> None:
    windows = evaluation_windows(TEXT[:length], window)
    assert windows.shape == (length // window, window)
    assert np.array_equal(windows.reshape(-1), TEXT[: length - length % window])


def test_evaluation_stops_at_the_most_windows_asked_for() -> None:
    assert np.array_equal(evaluation_windows(TEXT, 10, most=3).reshape(-1), TEXT[:30])
    assert len(evaluation_windows(TEXT[:25], 10, most=3)) == 2


@pytest.mark.parametrize("count", [1, 5])
def test_the_context_starts_with_bos_and_lags_by_one(count: int) -> None:
    targets = evaluation_windows(TEXT, WINDOW, count)
    context = shifted(targets)
    assert (context[:, 0] == BYTE_VOCABULARY.bos).all()
    assert np.array_equal(context[:, 1:], targets[:, :-1])
