import tracemalloc
from collections.abc import Mapping
from dataclasses import astuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.blobs import LARGE, SMALL, whole

from blocktrain.codec import Codec
from blocktrain.codec import frames as codecs
from blocktrain.codec.dense import Bf16, Int8
from blocktrain.codec.sparse import Sparse
from blocktrain.errors import ProtocolError
from blocktrain.numerics.merge import MergeRule
from blocktrain.protocol.messages import Blob
from blocktrain.storage.blobs import Blobs
from blocktrain.storage.chunks import LocalChunks
from blocktrain.storage.merging import Compression, Merged, MergeInput, merge_blobs
from blocktrain.storage.tensor_file import decode, encode
from blocktrain.storage.weights_file import AT_ONCE, follow_blobs

Floats = npt.NDArray[np.float32]
Shapes = Mapping[str, tuple[int, ...]]

PLAIN = MergeRule(1.0, 0.0)


def version(blobs: Blobs, shapes: Shapes = SMALL) -> Blob:
    draws = np.random.default_rng(0)
    tensors = {name: np.float32(draws.normal(size=shape)) for name, shape in shapes.items()}
    return blobs.write(encode({name: np.asarray(tensor) for name, tensor in tensors.items()}))


def numbers_of(blobs: Blobs, blob: Blob | None) -> Floats:
    assert blob is not None
    tensors = decode(whole(blobs, blob))
    return np.concatenate([tensors[name].reshape(-1) for name in sorted(tensors)])


def learned(blobs: Blobs, name: str, size: int, codec: Codec, weight: float = 1.0) -> MergeInput:
    """An update that says it learned something that follows from its name."""
    draws = np.random.default_rng(list(name.encode()))
    deltas = (draws.standard_t(3, size) * 1e-3).astype(np.float32)
    return MergeInput(name, blobs.write(codecs.encode(deltas, codec)), weight, encoded=True)


def next_version(
    blobs: Blobs, base: Blob, updates: list[MergeInput], codec: Codec, last: Merged | None
) -> Merged:
    velocity, owed = (last.velocity, last.residual) if last else (None, None)
    outer = MergeRule(0.7, 0.5) if len(updates) > 1 else PLAIN
    return merge_blobs(blobs, base, updates, velocity, outer, Compression(codec, owed))


@pytest.mark.parametrize("codec", [Bf16(), Int8(), Sparse(64)], ids=["bf16", "int8", "sparse"])
@pytest.mark.parametrize("shapes", [SMALL, LARGE], ids=["small", "large"])
def test_differences_lead_to_the_very_version(blobs: Blobs, codec: Codec, shapes: Shapes):
    first = base = version(blobs, shapes)
    size = numbers_of(blobs, base).size
    differences, last = [], None
    for number in range(2):
        updates = [learned(blobs, f"{number}{who}", size, codec) for who in "ab"]
        last = next_version(blobs, base, updates, codec, last)
        assert last.delta is not None
        differences.append(last.delta)
        base = last.weights
    assert follow_blobs(blobs, first, differences) == base
    assert follow_blobs(blobs, first, []) == first


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([Bf16(), Int8(), Sparse(5)]),
    st.lists(st.integers(1, 3), min_size=1, max_size=2 * AT_ONCE + 1),
    st.data(),
)
def test_every_later_version_is_reached_from_every_earlier_one(
    tmp_path_factory: pytest.TempPathFactory, codec: Codec, counts: list[int], data: st.DataObject
):
    blobs = Blobs(LocalChunks(tmp_path_factory.mktemp("chunks"), sync=False))
    versions, differences, last = [version(blobs)], [], None
    for number, count in enumerate(counts):
        updates = [learned(blobs, f"{number}{who}", 1508, codec, 1.0 + who) for who in range(count)]
        last = next_version(blobs, versions[-1], updates, codec, last)
        assert last.delta is not None
        versions.append(last.weights)
        differences.append(last.delta)
    start = data.draw(st.integers(0, len(differences)))
    end = data.draw(st.integers(start, len(differences)))
    assert follow_blobs(blobs, versions[start], differences[start:end]) == versions[end]


@pytest.mark.parametrize("codec", [Bf16(), Sparse(64)], ids=["bf16", "sparse"])
def test_a_lone_update_goes_down_as_it_came_up(blobs: Blobs, codec: Codec):
    base = version(blobs)
    update = learned(blobs, "a", 1508, codec)
    merged = next_version(blobs, base, [update], codec, None)
    assert merged.weights == merge_blobs(blobs, base, [update], None, PLAIN).weights
    if isinstance(codec, Sparse):
        assert merged.delta == update.end
    assert np.abs(numbers_of(blobs, merged.residual)).max() < 1e-6  # what rounding left


def test_what_a_version_leaves_out_comes_with_the_next(blobs: Blobs):
    """Two updates of other numbers: half of them find no room, and come when there is some."""
    base, codec = version(blobs), Sparse(64)
    exact = merge_blobs(
        blobs, base, both := [learned(blobs, who, 1508, codec) for who in "ab"], None, PLAIN
    )
    goal = numbers_of(blobs, exact.weights)
    last = merge_blobs(blobs, base, both, None, PLAIN, Compression(codec, None))
    far = np.abs(numbers_of(blobs, last.weights) - goal).max()
    assert far > 1e-4
    nothing = MergeInput(
        "c", blobs.write(codecs.encode(np.zeros(1508, np.float32), codec)), 1.0, encoded=True
    )
    for _ in range(5):
        last = merge_blobs(
            blobs, last.weights, [nothing], None, PLAIN, Compression(codec, last.residual)
        )
    assert np.abs(numbers_of(blobs, last.weights) - goal).max() < far / 100


def test_neither_order_nor_repetition_changes_a_version(blobs: Blobs):
    base, codec = version(blobs), Sparse(16)
    a, b, c = (
        learned(blobs, who, 1508, codec, weight) for who, weight in (("a", 3), ("b", 1), ("c", 2))
    )
    orders = ([a, b, c], [c, a, b], [b, c, a], [a, b, c])
    found = {astuple(next_version(blobs, base, order, codec, None)) for order in orders}
    assert len(found) == 1


def test_equal_updates_are_one_update(blobs: Blobs):
    base, codec = version(blobs), Sparse(16)
    one = learned(blobs, "a", 1508, codec, 4.0)
    twins = [
        MergeInput(who, one.end, weight, encoded=True) for who, weight in (("a", 1.0), ("b", 3.0))
    ]
    alone = merge_blobs(blobs, base, [one], None, PLAIN, Compression(codec, None))
    together = merge_blobs(blobs, base, twins, None, PLAIN, Compression(codec, None))
    assert together.weights == alone.weights and together.delta == alone.delta


def test_a_difference_of_another_count_is_refused(blobs: Blobs):
    base = version(blobs)
    longer = blobs.write(codecs.encode(np.zeros(2000, np.float32), Bf16()))
    for bad in (longer, base, blobs.write([b"nonsense"])):
        with pytest.raises(ProtocolError):
            follow_blobs(blobs, base, [bad])


def test_memory_does_not_grow_with_files_or_differences(blobs: Blobs):
    shape = {"w": (16, 1000, 1000)}
    base = version(blobs, shape)
    update = learned(blobs, "a", 16_000_000, Int8())
    compression = Compression(Int8(), base)
    tracemalloc.start()
    try:
        merged = merge_blobs(blobs, base, [update], None, PLAIN, compression)
        assert tracemalloc.get_traced_memory()[1] < 75e6
        assert merged.delta is not None
        tracemalloc.reset_peak()
        follow_blobs(blobs, base, [merged.delta] * AT_ONCE)
        assert tracemalloc.get_traced_memory()[1] < 75e6
    finally:
        tracemalloc.stop()
