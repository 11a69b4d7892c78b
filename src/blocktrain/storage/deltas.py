"""A version's file from an older one and the differences between them, chunk by chunk.

What is added to what is the business of `core.following`; whoever asks knows the name that the
result must have. Memory holds a chunk of the version and one of each difference that is added in
the same pass.
"""

from collections.abc import Iterable, Iterator, Sequence

from blocktrain.codec.delta import apply_delta
from blocktrain.codec.frames import UpdateDecoder
from blocktrain.numerics.merge import Floats
from blocktrain.protocol.messages import Blob
from blocktrain.storage.blobs import Blobs
from blocktrain.storage.tensor_file import canonical
from blocktrain.storage.weights_file import all_numbers, number_count, weights_form

AT_ONCE = 4  # differences in one pass: more passes write more, fewer hold more


def follow_blobs(
    blobs: Blobs, base: Blob, differences: Sequence[Blob], into: memoryview | None = None
) -> Blob:
    """The version that the differences lead to, in their order, from `base`; in memory too where
    there is room of its size."""
    for start in range(0, len(differences), AT_ONCE):
        parts = _followed(blobs, base, differences[start : start + AT_ONCE])
        base = blobs.write(parts if into is None else _copied(parts, into))
    return base


def _copied(parts: Iterable[bytes | memoryview], into: memoryview) -> Iterator[bytes | memoryview]:
    for part in parts:
        view = memoryview(part).cast("B")
        into[: len(view)] = view
        into = into[len(view) :]
        yield view


def _followed(
    blobs: Blobs, base: Blob, differences: Sequence[Blob]
) -> Iterator[bytes | memoryview]:
    reader = blobs.reader(base)
    form = weights_form(reader)
    header = canonical(form)
    decoders = [_decoder(blobs, blob, number_count(form)) for blob in differences]
    yield header
    first = 0
    for numbers in all_numbers(reader, len(header)):
        yield _frame(numbers, first, decoders).data
        first += numbers.size


def _frame(numbers: Floats, first: int, decoders: Sequence[UpdateDecoder]) -> Floats:
    for decoder in decoders:
        numbers = apply_delta(numbers, decoder.numbers(first, numbers.size))
    return numbers


def _decoder(blobs: Blobs, blob: Blob, count: int) -> UpdateDecoder:
    reader = blobs.reader(blob)
    return UpdateDecoder(reader.read, reader.size, count)
