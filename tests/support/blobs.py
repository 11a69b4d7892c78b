"""Blobs of tests: shapes of small and large ones, and whole blobs as bytes."""

from blocktrain.protocol.messages import Blob
from blocktrain.storage.blobs import Blobs

SMALL = {"bias": (7,), "empty": (0, 3), "scale": (), "weight": (30, 50)}
LARGE = {"a": (3,), "b": (2100, 1001), "c": (3, 800, 900), "d": (1,)}  # two borders of chunks


def whole(blobs: Blobs, blob: Blob) -> bytes:
    reader = blobs.reader(blob)
    return reader.read(0, reader.size)
