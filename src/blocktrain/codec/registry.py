"""Every codec by its name, and which one a run uses for what.

To add a codec: write its class (see `Codec`), add it to `REGISTRY`, and if it has a parameter, add
the setting to config.py and read it in `for_update` and `for_delta`.
"""

from typing import ClassVar, Protocol, Self

from blocktrain.codec.dense import Bf16, Int8
from blocktrain.codec.sparse import Sparse, SparseSettings
from blocktrain.errors import ConfigError, ProtocolError
from blocktrain.numerics.quantization import Floats


class CodecSettings(SparseSettings, Protocol):
    """What a run says of its codec: `config.SwarmConfig`."""

    @property
    def codec(self) -> str: ...


class Codec(Protocol):
    """Encodes a frame of float32 in few bytes. Equal to any other with the same parameter."""

    name: ClassVar[str]  # in the settings
    code: ClassVar[int]  # in a file

    @property
    def parameter(self) -> int:
        """A number of 16 bits that says how much is kept: more keeps more; 0 if there is none."""
        ...

    @classmethod
    def for_update(cls, settings: CodecSettings, *, final: bool) -> Self:
        """For a worker's updates; `final`: for the last one of a block, which may be larger."""
        ...

    @classmethod
    def for_delta(cls, settings: CodecSettings, updates: int, *, final: bool) -> Self:
        """For the delta to a version made of this many updates; `final`: of final ones."""
        ...

    @classmethod
    def from_parameter(cls, parameter: int) -> Self:
        """As a file says; a ProtocolError if there is no such codec."""
        ...

    def largest_frame(self, count: int) -> int:
        """The most bytes that this many numbers need."""
        ...

    def encode(self, numbers: Floats) -> bytes: ...

    def decode(self, data: bytes, count: int) -> Floats:
        """Exactly `count` finite numbers, or a ProtocolError; `data` may be anything."""
        ...


REGISTRY: dict[str, type[Codec]] = {codec.name: codec for codec in (Bf16, Int8, Sparse)}
CODECS = ("none", *REGISTRY)  # with `none`, numbers are sent as they are


def codec_named(name: str) -> type[Codec] | None:
    if name not in CODECS:
        raise ConfigError(f"no codec is named {name!r}; choose one of {', '.join(CODECS)}")
    return REGISTRY.get(name)


def update_codec(settings: CodecSettings, *, final: bool = False) -> Codec | None:
    """None: updates are not encoded."""
    codec = codec_named(settings.codec)
    return codec.for_update(settings, final=final) if codec else None


def delta_codec(settings: CodecSettings, updates: int, *, final: bool = False) -> Codec | None:
    """None: versions are sent whole, not as deltas."""
    codec = codec_named(settings.codec)
    return codec.for_delta(settings, updates, final=final) if codec else None


def codec_of(code: int, parameter: int) -> Codec:
    """The codec that a file names."""
    for codec in REGISTRY.values():
        if codec.code == code:
            return codec.from_parameter(parameter)
    raise ProtocolError(f"no codec has the number {code}; update blocktrain to read this file")
