"""Whole blobs as bytes."""

from blocktrain.protocol.messages import Blob
from blocktrain.storage.blobs import Blobs


def whole(blobs: Blobs, blob: Blob) -> bytes:
    reader = blobs.reader(blob)
    return reader.read(0, reader.size)
