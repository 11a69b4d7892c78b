import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktrain.codec import Codec
from blocktrain.codec.dense import Bf16, Int8
from blocktrain.codec.sparse import Sparse
from blocktrain.errors import DivergedError
from blocktrain.storage.weights_file import apply_delta, encode_delta

Floats = npt.NDArray[np.float32]

CODECS = [Bf16(), Int8(), Sparse(3), Sparse(64)]
codecs = st.sampled_from(CODECS)
FEW = settings(max_examples=60, deadline=None)
SIZES = st.integers(1, 9000)


def numbers(seed: int, size: int, scale: float) -> Floats:
    draws = np.random.default_rng(seed)
    return (draws.standard_normal(size) * scale * 10.0 ** draws.integers(-4, 1, size)).astype(
        np.float32
    )


@FEW
@given(codecs, SIZES, st.integers(0, 2**32 - 1), st.sampled_from([1e-30, 1e-3, 1.0, 1e6]))
def test_whoever_follows_arrives_at_the_same_bits(codec: Codec, size: int, seed: int, scale: float):
    current = numbers(seed, size, 1.0)
    target = current + numbers(seed + 1, size, scale).astype(np.float64)
    frame = encode_delta(current, target, codec)
    decoded = codec.decode(frame.encoded, size)
    assert apply_delta(current, decoded).tobytes() == frame.weights.tobytes()


@FEW
@given(codecs, SIZES, st.integers(0, 2**32 - 1))
def test_what_is_owed_is_all_that_is_missing(codec: Codec, size: int, seed: int):
    current = numbers(seed, size, 1.0)
    target = current + numbers(seed + 1, size, 1e-3).astype(np.float64)
    frame = encode_delta(current, target, codec)
    reached = frame.weights.astype(np.float64) + frame.residual
    assert (np.abs(reached - target) <= 1e-7 * np.abs(frame.residual) + 1e-40).all()


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_debts_are_paid_though_each_step_is_small(codec: Codec):
    """A step far below what a weight of 1 can take, many times: versions get where the sum is."""
    current, owed = np.ones(5000, np.float32), np.zeros(5000, np.float32)
    step = numbers(0, 5000, 1e-6).astype(np.float64)
    for _ in range(2000 if isinstance(codec, Sparse) else 200):
        frame = encode_delta(current, current + step + owed, codec)
        current, owed = frame.weights, frame.residual
        step *= 0.9
    goal = 1.0 + numbers(0, 5000, 1e-6).astype(np.float64) * 10.0
    np.testing.assert_allclose(current.astype(np.float64) + owed, goal, atol=3e-9)
    assert np.abs(owed).max() < 2e-7  # no more than a weight of 1 can show


@FEW
@given(codecs, SIZES, st.integers(0, 2**32 - 1))
def test_what_the_codec_can_say_is_said_whole(codec: Codec, size: int, seed: int):
    """A lone update that came in by the same codec goes out again without a loss."""
    current = numbers(seed, size, 0.1)
    update = codec.decode(codec.encode(numbers(seed + 1, size, 1e-3)), size)
    reached = encode_delta(current, current + update.astype(np.float64), codec).weights
    if isinstance(codec, Int8):  # a group's scale may be rounded once more
        np.testing.assert_allclose(reached, current + update, atol=np.abs(update).max() / 127)
    else:
        assert reached.tobytes() == (current + update).tobytes()


def test_what_rounding_left_takes_nobody_s_place():
    """Room for four times as many numbers as matter: the rest stays owed, and costs nothing."""
    current, dust = np.linspace(0.5, 2.0, 4096, dtype=np.float32), np.full(4096, 1e-12)
    step = np.zeros(4096)
    step[::64] = np.where(np.arange(64) % 3, 0.5, -0.125)
    frame = encode_delta(current, current + step + dust, Sparse(256))
    assert np.array_equal(Sparse(256).decode(frame.encoded, 4096), step)
    assert len(frame.encoded) <= len(Sparse(64).encode(step.astype(np.float32)))
    np.testing.assert_allclose(frame.residual[1::64], 1e-12, rtol=1e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e39])
def test_a_target_that_is_no_number_is_refused(bad: float):
    target = np.zeros(10)
    target[3] = bad
    with pytest.raises(DivergedError):
        encode_delta(np.zeros(10, np.float32), target, Bf16())


def test_a_difference_that_leads_beyond_all_numbers_is_refused():
    huge = np.full(4, np.finfo(np.float32).max, np.float32)
    with pytest.raises(DivergedError):
        apply_delta(huge, huge)
