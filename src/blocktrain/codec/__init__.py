"""All codecs by name, and the choice of a run's codecs for updates and for deltas.

To add a codec, write its class (see `Codec`) and add it to `REGISTRY`. If it has a parameter, add a
setting to config and to `CodecSettings`, and read it in `for_update` and `for_delta`.
"""

from typing import ClassVar, Protocol, Self

from blocktrain.codec.dense import Bf16, Int8
from blocktrain.codec.sparse import CodecSettings, Sparse
from blocktrain.errors import ProtocolError
from blocktrain.numerics import Floats


class Codec(Protocol):
    """Encodes frames of float32 numbers. Codecs of one class with equal parameters are equal."""

    name: ClassVar[str]  # in the settings
    code: ClassVar[int]  # in a file
    # The most that the residual keeps of a number, relative to the largest one in its frame.
    left_out: ClassVar[float]

    @property
    def parameter(self) -> int:
        """A 16-bit number: a larger one keeps more of the numbers. 0 if there is no parameter."""
        ...

    @classmethod
    def for_update(cls, settings: CodecSettings, *, final: bool) -> Self:
        """The codec of a worker's updates; `final`: of its last update, which may be larger."""
        ...

    @classmethod
    def for_delta(cls, settings: CodecSettings, updates: int, *, final: bool) -> Self:
        """The codec of the delta to a version that merges this many updates. `final`: these are
        final updates."""
        ...

    @classmethod
    def from_parameter(cls, parameter: int) -> Self:
        """The codec with this parameter, from a file; ProtocolError if the parameter is invalid."""
        ...

    def largest_frame(self, count: int) -> int:
        """The largest size in bytes of a frame of this many numbers."""
        ...

    def encode(self, numbers: Floats) -> bytes: ...

    def decode(self, data: bytes, count: int) -> Floats:
        """Returns exactly `count` finite numbers, or raises ProtocolError. `data` is untrusted."""
        ...


REGISTRY: dict[str, type[Codec]] = {codec.name: codec for codec in (Bf16, Int8, Sparse)}
CODECS = ("none", *REGISTRY)  # with `none`, numbers are sent as they are


def update_codec(settings: CodecSettings, *, final: bool = False) -> Codec | None:
    """The codec of a run's updates; None: they are sent whole."""
    codec = REGISTRY.get(settings.codec)
    return codec.for_update(settings, final=final) if codec else None


def delta_codec(settings: CodecSettings, updates: int, *, final: bool = False) -> Codec | None:
    """The codec of a run's deltas; None: versions are sent whole."""
    codec = REGISTRY.get(settings.codec)
    return codec.for_delta(settings, updates, final=final) if codec else None


def codec_of(code: int, parameter: int) -> Codec:
    """The codec that a file names."""
    for codec in REGISTRY.values():
        if codec.code == code:
            return codec.from_parameter(parameter)
    raise ProtocolError(f"unknown codec number {code}; update blocktrain to read this file")
