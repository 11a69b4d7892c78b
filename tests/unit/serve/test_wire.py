import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from blocktrain.codec.dense import LEAST_SCALE, STEPS
from blocktrain.errors import ProtocolError
from blocktrain.serve.ring.activations import WIRE_TYPES, pack, unpack

SHAPES = arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=6)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
NUMBERS = arrays.arrays(np.float32, SHAPES, elements=FLOATS)
MODEST = arrays.arrays(np.float32, SHAPES, elements=st.floats(-50, 50, width=32))


def there_and_back(numbers: np.ndarray, kind: str) -> np.ndarray:
    sent = pack(numbers, kind)
    assert len(sent) == len(WIRE_TYPES[kind])
    return unpack(sent, kind)


@settings(max_examples=60, deadline=None)
@given(NUMBERS)
def test_fp32_changes_nothing(numbers: np.ndarray):
    assert there_and_back(numbers, "fp32").tobytes() == numbers.tobytes()


@settings(max_examples=60, deadline=None)
@given(NUMBERS)
def test_bf16_is_within_a_256th(numbers: np.ndarray):
    error = np.abs(there_and_back(numbers, "bf16").astype(np.float64) - numbers)
    subnormal = 2.0**-134  # half of the least bfloat16
    assert (error <= np.abs(numbers.astype(np.float64)) / 256 + subnormal).all()


@settings(max_examples=60, deadline=None)
@given(NUMBERS)
def test_int8_is_within_half_a_step_of_its_own_row(numbers: np.ndarray):
    back = there_and_back(numbers, "int8")
    assert back.shape == numbers.shape and back.dtype == np.float32
    largest = np.abs(numbers.astype(np.float64)).max(axis=-1, keepdims=True, initial=0)
    step = np.maximum(largest / STEPS, float(LEAST_SCALE) * STEPS)
    assert (np.abs(back.astype(np.float64) - numbers) <= 0.5001 * step).all()


@settings(max_examples=60, deadline=None)
@given(NUMBERS, st.sampled_from(["fp32", "bf16"]))
def test_what_was_packed_once_does_not_change_again(numbers: np.ndarray, kind: str):
    once = there_and_back(numbers, kind)
    assert there_and_back(once, kind).tobytes() == once.tobytes()


@settings(max_examples=60, deadline=None)
@given(MODEST, st.sampled_from(list(WIRE_TYPES)))
def test_a_position_travels_the_same_alone_and_among_others(numbers: np.ndarray, kind: str):
    together = there_and_back(numbers, kind)
    for index in range(len(numbers) if numbers.ndim > 1 else 0):
        assert there_and_back(numbers[index], kind).tobytes() == together[index].tobytes()


@pytest.mark.parametrize("kind", WIRE_TYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_sent(kind: str, bad: float):
    numbers = np.ones((3, 4), np.float32)
    numbers[1, 2] = bad
    with pytest.raises(ProtocolError, match="finite"):
        pack(numbers, kind)


ONES = np.ones((2, 4), np.int8)
SCALES = np.ones((2, 1), np.float32)


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("fp64", (np.zeros(3),)),
        ("fp32", ()),
        ("fp32", (np.zeros(3, np.int32),)),
        ("fp32", (np.full(3, np.nan, np.float32),)),
        ("bf16", (np.zeros(3, np.float32),)),
        ("bf16", (np.full(3, 0x7F80, np.uint16),)),
        ("bf16", (np.full(3, 0xFFC0, np.uint16),)),
        ("int8", (ONES,)),
        ("int8", (SCALES, ONES)),
        ("int8", (ONES, SCALES[:1])),
        ("int8", (ONES, SCALES[:, 0])),
        ("int8", (np.ones((), np.int8), np.ones((), np.float32))),
        ("int8", (ONES, SCALES * np.inf)),
        ("int8", (ONES * 0, SCALES * np.inf)),
        ("int8", (ONES * 100, SCALES * np.float32(3e38))),
    ],
)
def test_what_does_not_fit_is_refused(kind: str, sent: tuple[np.ndarray, ...]):
    with pytest.raises(ProtocolError):
        unpack(sent, kind)


@pytest.mark.parametrize("kind", WIRE_TYPES)
def test_unpacking_allocates_little_more_than_its_result(kind: str):
    numbers = np.random.default_rng(0).standard_normal((512, 512), np.float32)
    sent = pack(numbers, kind)
    tracemalloc.start()
    unpack(sent, kind)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most <= 1.1 * numbers.nbytes
