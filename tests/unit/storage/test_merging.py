import itertools
import tracemalloc
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy
from tests.support.blobs import LARGE, SMALL, whole

from blocktrain.codec import Codec
from blocktrain.codec import frames as codecs
from blocktrain.codec.dense import Bf16, Int8
from blocktrain.codec.frames import FRAME_NUMBERS
from blocktrain.codec.sparse import Sparse
from blocktrain.errors import CorruptFileError, DivergedError, ProtocolError
from blocktrain.numerics.merge import Contribution, MergeRule, finite_floats
from blocktrain.protocol.messages import CHUNK_BYTES, Blob
from blocktrain.storage.blobs import Blobs
from blocktrain.storage.chunks import LocalChunks
from blocktrain.storage.merging import UPDATES_AT_ONCE, MergeInput, merge_blobs
from blocktrain.storage.tensor_file import decode, encode
from blocktrain.storage.weights_file import check_encoded, check_update, weights_form, weights_sizes

Floats = npt.NDArray[np.float32]

PLAIN = MergeRule(1.0, 0.0)
DILOCO = MergeRule(0.7, 0.9)


def weights(seed: int, shapes: Mapping[str, tuple[int, ...]] = SMALL) -> dict[str, Floats]:
    draws = np.random.default_rng(seed)
    return {
        name: np.asarray(draws.random(shape, np.float32) - np.float32(0.5))
        for name, shape in shapes.items()
    }


def loaded(blobs: Blobs, blob: Blob | None) -> dict[str, Floats]:
    assert blob is not None
    return decode(whole(blobs, blob))


@pytest.mark.parametrize(
    ("shapes", "rule"),
    [(SMALL, PLAIN), (SMALL, MergeRule(0.5, 0.0)), (SMALL, DILOCO), (LARGE, DILOCO), ({}, DILOCO)],
    ids=["mean", "rate", "small", "large", "empty"],
)
def test_a_file_is_merged_as_its_tensors_are(
    blobs: Blobs, shapes: Mapping[str, tuple[int, ...]], rule: MergeRule
):
    current, velocity, start, *ends = (weights(seed, shapes) for seed in range(6))
    files = [blobs.write(encode(file)) for file in (current, velocity, start, *ends)]
    updates = [
        MergeInput("b", files[3], 3.0),
        MergeInput("c", files[4], 1.5, start=files[2]),
        MergeInput("a", files[5], 1.0),
    ]
    merged = merge_blobs(blobs, files[0], updates, files[1], rule)
    found = loaded(blobs, merged.weights)
    speeds = loaded(blobs, merged.velocity) if rule.momentum else None
    assert (merged.velocity is None) == (rule.momentum == 0)
    assert found.keys() == shapes.keys()
    for name in shapes:
        contributions = [
            Contribution("b", ends[0][name], 3.0),
            Contribution("c", ends[1][name], 1.5, start[name]),
            Contribution("a", ends[2][name], 1.0),
        ]
        target, speed = rule.combine(current[name], contributions, velocity[name])
        assert found[name].tobytes() == finite_floats(target).tobytes()
        if speeds is not None:
            assert speed is not None and speeds[name].tobytes() == speed.tobytes()


def test_one_update_is_the_next_version_by_name(blobs: Blobs):
    """With rate 1 and no momentum nothing is computed: the version is the update, chunk by
    chunk."""
    current, end, other = (blobs.write(encode(weights(seed, LARGE))) for seed in range(3))
    assert end.size > 2 * CHUNK_BYTES
    merged = merge_blobs(blobs, current, [MergeInput("a", end, 123.0)], other, PLAIN)
    assert merged.weights == end
    alike = [MergeInput("a", end, 0.1), MergeInput("b", end, 7.0)]
    assert merge_blobs(blobs, current, alike, None, PLAIN).weights == end
    late = [MergeInput("a", end, 0.1, start=current)]
    assert merge_blobs(blobs, current, late, None, PLAIN).weights == end


def test_the_order_of_updates_does_not_matter(blobs: Blobs):
    current, *ends = (blobs.write(encode(weights(seed))) for seed in range(4))
    updates = [MergeInput(f"u{i}", end, 3.0**-i) for i, end in enumerate(ends)]
    names = {
        merge_blobs(blobs, current, list(order), None, DILOCO).weights.name
        for order in itertools.permutations(updates)
    }
    assert len(names) == 1


def test_without_a_velocity_it_starts_at_rest(blobs: Blobs):
    current, end = (blobs.write(encode(weights(seed))) for seed in range(2))
    rest = blobs.write(encode({name: np.zeros_like(t) for name, t in weights(0).items()}))
    updates = [MergeInput("a", end, 1.0)]
    first = merge_blobs(blobs, current, updates, None, DILOCO)
    assert first == merge_blobs(blobs, current, updates, rest, DILOCO)


def test_a_merge_takes_an_update_once(blobs: Blobs):
    file = blobs.write(encode(weights(0)))
    with pytest.raises(ValueError, match="once"):
        merge_blobs(
            blobs, file, [MergeInput("a", file, 1.0), MergeInput("a", file, 1.0)], None, PLAIN
        )
    with pytest.raises(ValueError, match="at least one update"):
        merge_blobs(blobs, file, [], None, PLAIN)


def test_an_altered_chunk_is_no_updates_fault(blobs: Blobs):
    """Though what it holds now cannot be merged."""
    current, end, other = (blobs.write(encode(weights(seed))) for seed in range(3))
    assert isinstance(blobs.chunks, LocalChunks)
    name = blobs.recipe(end.name).chunks[0]
    path = blobs.chunks.folder / name[:2] / name[2:]
    path.write_bytes(path.read_bytes()[:-4] + np.float32(np.nan).tobytes())
    with pytest.raises(CorruptFileError):
        merge_blobs(
            blobs, current, [MergeInput("a", end, 1.0), MergeInput("b", other, 1.0)], None, DILOCO
        )


def test_memory_does_not_grow_with_files_or_updates(blobs: Blobs):
    shape = {"w": (16, 1000, 1000)}
    current, velocity, *ends = (blobs.write(encode(weights(i, shape))) for i in range(6))
    updates = [MergeInput(str(i), end, 1.0 + i) for i, end in enumerate(ends)]
    tracemalloc.start()
    try:
        merge_blobs(blobs, current, updates, velocity, DILOCO)
        assert tracemalloc.get_traced_memory()[1] < 40e6
        tracemalloc.reset_peak()
        form = weights_form(blobs.reader(current))
        assert check_update(blobs, ends[0], current, form).rms > 0
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


def peak(blobs: Blobs, current: Blob, updates: list[MergeInput]) -> int:
    """The most memory that merging them takes at once."""
    tracemalloc.start()
    try:
        merge_blobs(blobs, current, updates, None, PLAIN)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


THREE_CHUNKS = {"w": (6 * 1024 * 1024 - 100,)}
FRAME_MEMORY = 16 * FRAME_NUMBERS  # as read, and as the doubles that are added up


def test_memory_holds_one_frame_of_each_update(blobs: Blobs):
    current, end = (blobs.write(encode(weights(i, THREE_CHUNKS))) for i in range(2))
    few, many = ([MergeInput(f"{i:02}", end, 1.0) for i in range(count)] for count in (2, 64))
    assert peak(blobs, current, many) < peak(blobs, current, few) + 64 * FRAME_MEMORY


def rms(tensor: npt.NDArray[Any]) -> float:
    return float(np.sqrt(np.mean(tensor.astype(np.float64) ** 2))) if tensor.size else 0.0


@pytest.mark.parametrize("shapes", [SMALL, LARGE], ids=["small", "large"])
def test_the_distance_from_the_base_is_known_tensor_by_tensor(
    blobs: Blobs, shapes: Mapping[str, tuple[int, ...]]
):
    before, after = weights(0, shapes), weights(1, shapes)
    base, update = blobs.write(encode(before)), blobs.write(encode(after))
    form = weights_form(blobs.reader(base))
    changes = [after[name] - before[name] for name in sorted(shapes)]
    found = check_update(blobs, update, base, form)
    assert found.rms == pytest.approx(list(map(rms, changes)), rel=1e-5)
    assert found.largest == pytest.approx([np.abs(change).max(initial=0) for change in changes])
    found = weights_sizes(blobs, base, form)
    assert found.rms == pytest.approx([rms(before[name]) for name in sorted(shapes)], rel=1e-5)


@pytest.mark.parametrize("codec", [Bf16(), Int8(), Sparse(64)], ids=["bf16", "int8", "sparse"])
def test_the_size_of_an_encoded_change_is_known_tensor_by_tensor(blobs: Blobs, codec: Codec):
    form = weights_form(blobs.reader(blobs.write(encode(weights(0, LARGE)))))
    update = learned(blobs, weights(1, LARGE), codec)
    found, its_codec = check_encoded(blobs, update, form, codec)
    assert its_codec == codec
    flat = decoded(blobs, MergeInput("a", update, 1.0, encoded=True))
    ends = np.cumsum([int(np.prod(shape)) for shape in LARGE.values()])
    parts = np.split(flat, ends[:-1])
    assert found.rms == pytest.approx(list(map(rms, parts)), rel=1e-5)
    assert found.largest == pytest.approx([np.abs(part).max() for part in parts])


@pytest.mark.parametrize(("bad", "place"), [(np.nan, 0), (np.inf, 1_000_000), (-np.inf, -1)])
def test_what_is_not_finite_is_found(blobs: Blobs, bad: float, place: int):
    shape = {"a": (1,), "w": (3_000_000,)}
    file = weights(0, shape)
    base = blobs.write(encode(file))
    form = weights_form(blobs.reader(base))
    file["w"][place] = bad
    update = blobs.write(encode(file))
    with pytest.raises(ProtocolError, match="NaN, infinite"):
        check_update(blobs, update, base, form)
    with pytest.raises(DivergedError, match="not finite"):
        merge_blobs(blobs, base, [MergeInput("a", update, 1.0)], None, PLAIN)


def altered(kind: str) -> bytes:
    file = weights(1)
    if kind == "missing":
        del file["bias"]
    elif kind == "extra":
        file["zeal"] = file["bias"]
    elif kind == "shape":
        file["weight"] = file["weight"].T
    elif kind == "dtype":
        file["weight"] = file["weight"].astype(np.float16)  # type: ignore[assignment]
    elif kind == "metadata":
        return bytes(safetensors.numpy.save(file, {"by": "me"}))
    elif kind == "padding":
        data = b"".join(encode(file))
        length = int.from_bytes(data[:8], "little")
        return (
            (length + 8).to_bytes(8, "little")
            + data[8 : 8 + length]
            + b" " * 8
            + data[8 + length :]
        )
    elif kind == "noise":
        return b"no tensors at all"
    elif kind == "cut":
        return b"".join(encode(file))[:-4]
    return b"".join(encode(file))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "'bias' is missing"),
        ("extra", "'zeal' does not belong"),
        ("shape", r"'weight' is F32\[50, 30\]"),
        ("dtype", "'weight' is F16"),
        ("metadata", "metadata"),
        ("padding", "sorted by name"),
        ("noise", "header"),
        ("cut", "the tensors end at"),
    ],
)
def test_a_file_of_another_form_is_refused(blobs: Blobs, kind: str, message: str):
    base = blobs.write(encode(weights(0)))
    form = weights_form(blobs.reader(base))
    check_update(blobs, blobs.write(encode(weights(1))), base, form)
    update = blobs.write([altered(kind)])
    with pytest.raises(ProtocolError, match=message):
        check_update(blobs, update, base, form)
    for updates, velocity in (
        ([MergeInput("a", update, 1.0)], None),
        ([MergeInput("a", base, 1.0, start=update)], None),
        ([MergeInput("a", base, 1.0)], update),
    ):
        with pytest.raises(ProtocolError, match=message):
            merge_blobs(blobs, base, updates, velocity, DILOCO)


def test_a_header_of_several_chunks_is_merged_too(blobs: Blobs):
    """Many long names: the numbers begin in the second chunk."""
    names = {f"{'😀' * 250}{i:06d}": (1,) for i in range(8_000)}
    current, end = (blobs.write(encode(weights(seed, names))) for seed in range(2))
    assert weights_form(blobs.reader(end))[0].start > CHUNK_BYTES
    assert merge_blobs(blobs, current, [MergeInput("a", end, 1.0)], None, PLAIN).weights == end


# Encoded updates


def learned(blobs: Blobs, deltas: Mapping[str, Floats], codec: Codec) -> Blob:
    """An update that says what was learned, tensor after tensor in the order of a file."""
    return blobs.write(codecs.encode([deltas[name].reshape(-1) for name in sorted(deltas)], codec))


@pytest.mark.parametrize("codec", [Bf16(), Int8(), Sparse(64)], ids=["bf16", "int8", "sparse"])
@pytest.mark.parametrize("shapes", [SMALL, LARGE], ids=["small", "large"])
def test_what_was_learned_is_added_to_the_newest_weights(
    blobs: Blobs, codec: Codec, shapes: Mapping[str, tuple[int, ...]]
):
    current, first, second = (weights(seed, shapes) for seed in range(3))
    file = blobs.write(encode(current))
    updates = [
        MergeInput("a", learned(blobs, first, codec), 3.0, encoded=True),
        MergeInput("b", learned(blobs, second, codec), 1.0, share=0.5, encoded=True),
    ]
    found = loaded(blobs, merge_blobs(blobs, file, updates, None, PLAIN).weights)
    taken = [decoded(blobs, update) for update in updates]
    flat = np.concatenate([current[name].reshape(-1) for name in sorted(shapes)])
    expected = flat + 0.75 * taken[0].astype(np.float64) + 0.125 * taken[1].astype(np.float64)
    merged = np.concatenate([found[name].reshape(-1) for name in sorted(shapes)])
    np.testing.assert_allclose(merged, expected, rtol=1e-6, atol=1e-7)


def decoded(blobs: Blobs, update: MergeInput) -> Floats:
    reader = blobs.reader(update.end)
    count = int.from_bytes(reader.read(reader.size - 8, 8), "little")
    return np.concatenate(list(codecs.UpdateDecoder(reader.read, reader.size, count).frames()))


def test_encoded_and_whole_updates_are_merged_together(blobs: Blobs):
    current, delta, end = (weights(seed) for seed in range(3))
    file, whole = blobs.write(encode(current)), blobs.write(encode(end))
    exact = {name: np.float32(2.0**-6) * np.sign(tensor) for name, tensor in delta.items()}
    updates = [
        MergeInput("a", learned(blobs, exact, Bf16()), 1.0, encoded=True),
        MergeInput("b", whole, 1.0),
    ]
    found = loaded(blobs, merge_blobs(blobs, file, updates, None, PLAIN).weights)
    for name, tensor in current.items():
        mean = (tensor.astype(np.float64) + exact[name] + end[name]) / 2
        np.testing.assert_allclose(found[name], mean, rtol=1e-6)


def test_an_encoded_update_of_another_count_is_refused(blobs: Blobs):
    base = blobs.write(encode(weights(0)))
    form = weights_form(blobs.reader(base))
    check_encoded(blobs, learned(blobs, weights(1), Bf16()), form, Bf16())
    longer = blobs.write(codecs.encode(np.zeros(2000, np.float32), Bf16()))
    for bad in (longer, base, blobs.write([b"nonsense"])):
        with pytest.raises(ProtocolError):
            check_encoded(blobs, bad, form, Bf16())
        with pytest.raises(ProtocolError):
            merge_blobs(blobs, base, [MergeInput("a", bad, 1.0, encoded=True)], None, PLAIN)


@pytest.mark.parametrize(
    ("codec", "most"),
    [(Int8(), Bf16()), (Sparse(1), Bf16()), (Bf16(), Sparse(64)), (Sparse(65), Sparse(64))],
    ids=str,
)
def test_an_encoded_update_of_another_codec_is_refused(blobs: Blobs, codec: Codec, most: Codec):
    form = weights_form(blobs.reader(blobs.write(encode(weights(0)))))
    for good in (most, Sparse(3)) if isinstance(most, Sparse) else (most,):
        check_encoded(blobs, learned(blobs, weights(1), good), form, most)
    with pytest.raises(ProtocolError, match="is encoded by"):
        check_encoded(blobs, learned(blobs, weights(1), codec), form, most)


@pytest.mark.parametrize(
    ("codec", "most"),
    [(Bf16(), 24), (Int8(), 24), (Sparse(64), 64)],
    ids=["bf16", "int8", "sparse"],
)
def test_memory_does_not_grow_with_encoded_updates(blobs: Blobs, codec: Codec, most: int):
    """Beyond a frame of each."""
    current, delta = (weights(i, {"w": (2_200_000,)}) for i in range(2))
    file, end = blobs.write(encode(current)), learned(blobs, delta, codec)
    few, many = (
        [MergeInput(f"{i:02}", end, 1.0, encoded=True) for i in range(count)] for count in (2, most)
    )
    assert peak(blobs, file, many) < peak(blobs, file, few) + most * FRAME_MEMORY


class Counting(LocalChunks):
    """Counts how often a chunk is read, which is a download in S3, and the files that are open."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync=False)
        self.loads: Counter[str] = Counter()
        self.most_open = 0
        self._files: list[IO[bytes]] = []

    def open(self, name: str) -> tuple[IO[bytes], int]:
        self.loads[name] += 1
        file, size = super().open(name)
        self._files = [file, *(file for file in self._files if not file.closed)]
        self.most_open = max(self.most_open, len(self._files))
        return file, size


@pytest.mark.parametrize("rule", [PLAIN, DILOCO], ids=["mean", "diloco"])
def test_more_updates_than_files_may_be_open_give_the_same_bits(tmp_path: Path, rule: MergeRule):
    chunks = Counting(tmp_path)
    blobs = Blobs(chunks)
    shape = {"w": (70_000,)}  # two frames
    current, start = (weights(seed, shape) for seed in range(2))
    file, late = blobs.write(encode(current)), blobs.write(encode(start))
    updates, contributions = [], []
    for number in range(2 * UPDATES_AT_ONCE + 9):
        name, weight, numbers = f"{number:03}", 1.0 + number, weights(10 + number, shape)
        base = start["w"] if number % 2 else None
        updates.append(
            MergeInput(name, blobs.write(encode(numbers)), weight, None if base is None else late)
        )
        contributions.append(Contribution(name, numbers["w"], weight, base))
    target, speed = rule.combine(current["w"], contributions, None)
    np.random.default_rng(0).shuffle(updates)
    merged = merge_blobs(blobs, file, updates, None, rule)
    assert loaded(blobs, merged.weights)["w"].tobytes() == finite_floats(target).tobytes()
    if speed is not None:
        assert loaded(blobs, merged.velocity)["w"].tobytes() == speed.tobytes()
    assert chunks.most_open < 2 * UPDATES_AT_ONCE
    assert all(chunks.loads[blobs.recipe(u.end.name).chunks[0]] == 1 for u in updates)


def test_an_update_of_one_chunk_is_read_from_the_store_once(tmp_path: Path):
    chunks = Counting(tmp_path)
    blobs = Blobs(chunks)
    current, delta = (weights(i, THREE_CHUNKS) for i in range(2))
    file, end = blobs.write(encode(current)), learned(blobs, delta, Sparse(64))
    updates = [MergeInput(f"{i}", end, 1.0, encoded=True) for i in range(6)]
    (chunk,) = blobs.recipe(end.name).chunks
    merge_blobs(blobs, file, updates, None, PLAIN)
    assert chunks.loads[chunk] == len(updates)


@pytest.mark.parametrize("place", ["start", "middle", "end"])
def test_an_encoded_update_that_was_altered_is_noticed(blobs: Blobs, place: str):
    current, delta = (weights(i, LARGE) for i in range(2))
    file, end = blobs.write(encode(current)), learned(blobs, delta, Int8())
    assert isinstance(blobs.chunks, LocalChunks)
    (name,) = blobs.recipe(end.name).chunks
    path = blobs.chunks.folder / name[:2] / name[2:]
    data = bytearray(path.read_bytes())
    data[{"start": 40, "middle": len(data) // 2, "end": -12}[place]] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptFileError):
        merge_blobs(blobs, file, [MergeInput("a", end, 1.0, encoded=True)], None, PLAIN)


@pytest.mark.parametrize("shapes", [SMALL, LARGE], ids=["small", "large"])
def test_a_clipped_update_counts_like_one_whose_tensors_are_smaller(
    blobs: Blobs, shapes: Mapping[str, tuple[int, ...]]
):
    """Whole, late and encoded; by powers of two, so that rounding is the same."""
    current, start, change = (weights(seed, shapes) for seed in range(3))
    factors = [0.25**index for index in range(len(shapes))]
    names = dict(zip(sorted(shapes), factors, strict=True))
    less = {name: np.float32(names[name]) * change[name] for name in shapes}
    file, late = blobs.write(encode(current)), blobs.write(encode(start))

    def merged(learned_: Mapping[str, Floats], clip: list[float] | None) -> Floats:
        fresh, old = (
            blobs.write(encode({name: base[name] + learned_[name] for name in shapes}))
            for base in (current, start)
        )
        encoded = learned(blobs, learned_, Bf16())
        updates = [
            MergeInput("a", fresh, 1.0, clip=clip),
            MergeInput("b", old, 2.0, late, share=0.5, clip=clip),
            MergeInput("c", encoded, 3.0, encoded=True, clip=clip),
        ]
        weights_ = loaded(blobs, merge_blobs(blobs, file, updates, None, PLAIN).weights)
        return np.concatenate([weights_[name].reshape(-1) for name in sorted(shapes)])

    np.testing.assert_allclose(merged(change, factors), merged(less, None), atol=1e-5)
    assert not np.allclose(merged(change, None), merged(less, None), atol=1e-2)
