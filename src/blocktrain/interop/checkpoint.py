"""A model in Hugging Face's format, from a local folder or from a repository of the hub.

Only the necessary files are downloaded. huggingface_hub is an optional extra, imported only for a
download. Tensors are copied from file to file in pieces, as ranges of bytes, so a copy has the same
bits.
"""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from blocktrain.data.documents import one_line
from blocktrain.data.hub import hub_errors
from blocktrain.data.tokenizer import MERGES_FILE, SIDE_FILES, TOKENIZER_FILE, SubwordTokenizer
from blocktrain.errors import DataError, ProtocolError, RunError
from blocktrain.files import StoredFile, store
from blocktrain.interop.architecture import Json
from blocktrain.storage.tensor_file import DTYPES, header_bytes, read_specs

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
SMALL_FILES = (CONFIG, TOKENIZER_FILE, *SIDE_FILES, "vocab.json", MERGES_FILE, INDEX)
NEEDED = f"{CONFIG}, {TOKENIZER_FILE} and {SINGLE} (or {INDEX} and the files it names)"
COPY_BYTES = 8 << 20
ITEM_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
OnCopied = Callable[[int], None]


@dataclass(frozen=True)
class TensorRange:
    """A tensor, or some of its rows, as a range of bytes in a file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int

    def rows(self, first: int, count: int) -> "TensorRange":
        row = self.size // self.shape[0]
        shape = (count, *self.shape[1:])
        return TensorRange(self.path, self.dtype, shape, self.start + first * row, count * row)

    def pieces(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            file.seek(self.start)
            left = self.size
            while left:
                piece = file.read(min(COPY_BYTES, left))
                if not piece:
                    raise RunError(f"{self.path} ends inside a tensor; copy or download it again")
                left -= len(piece)
                yield piece


@dataclass(frozen=True)
class TensorOut:
    """A tensor to write: ranges end to end, and a conversion that is applied to every piece."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    ranges: tuple[TensorRange, ...]
    converted: Callable[[bytes], bytes] | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def pieces(self) -> Iterator[bytes]:
        for part in self.ranges:
            pieces = part.pieces()
            yield from map(self.converted, pieces) if self.converted else pieces


@dataclass(frozen=True)
class Checkpoint:
    """A model's configuration and tensors, before its weights are read."""

    folder: Path
    source: str  # the user's name for it
    revision: str  # commit of the hub's repository; empty for a folder
    config: Json
    tensors: dict[str, TensorRange]

    def tokenizer(self, size: int) -> SubwordTokenizer:
        """The checkpoint's tokenizer. `size`: rows of the model's embedding."""
        if not any((self.folder / name).is_file() for name in (TOKENIZER_FILE, MERGES_FILE)):
            raise DataError(
                f"{self.folder} has no {TOKENIZER_FILE}; make one from its older files with"
                " transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
        return SubwordTokenizer.open(self.folder, size)

    @property
    def tokenizer_name(self) -> str:
        """The value of `data.tokenizer` that names the checkpoint's tokenizer."""
        return f"hf:{self.source}" if self.revision else str(self.folder.absolute())

    def json(self, name: str) -> Json:
        """One of the checkpoint's JSON files; empty if it is missing."""
        path = self.folder / name
        return _read_json(path) if path.is_file() else {}


def open_checkpoint(source: str, endpoint: str | None = None) -> Checkpoint:
    """Open a folder or, if there is none, the repository OWNER/NAME of the hub."""
    folder, revision = Path(source).expanduser(), ""
    if not folder.is_dir():
        if not HUB_NAME.fullmatch(source):
            raise RunError(f"the folder {source} does not exist; use a folder or OWNER/NAME")
        folder, revision = _download(source, endpoint)
    if not (folder / CONFIG).is_file():
        raise RunError(f"{folder} has no {CONFIG}; a model consists of {NEEDED}")
    config, tensors = _read_json(folder / CONFIG), folder_tensors(folder)
    return Checkpoint(folder, source, revision, config, tensors)


def _download(name: str, endpoint: str | None) -> tuple[Path, str]:
    """Download a model, or continue its download. Returns its folder in the hub's cache and its
    commit."""
    by_hand = f"put {NEEDED} of https://huggingface.co/{name} into a folder and import that"
    with hub_errors(name, by_hand, ["huggingface_hub"]):
        from huggingface_hub import snapshot_download

        download = partial(snapshot_download, name, endpoint=endpoint)
        folder = Path(download(allow_patterns=[*SMALL_FILES]))
        # Some repositories have the same weights in other formats too.
        weights = sorted(index_files(folder)) if (folder / INDEX).is_file() else [SINGLE]
        download(revision=folder.name, allow_patterns=weights)
    return folder, folder.name


def _read_json(path: Path) -> Json:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path}: {one_line(error)}; download it again") from None
    if not isinstance(value, dict):
        raise RunError(f"{path} is not a JSON object; download it again")
    return value


def file_tensors(path: Path) -> dict[str, TensorRange]:
    """The tensors of one file."""
    try:
        with path.open("rb") as file:
            specs = read_specs(file, path.stat().st_size)
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}; check the file") from None
    except ProtocolError as error:
        raise RunError(
            f"{path} is not a safetensors file ({error}); copy or download it again"
        ) from None
    return {
        spec.name: TensorRange(path, spec.dtype, spec.shape, spec.start, spec.end - spec.start)
        for spec in specs
    }


def folder_tensors(folder: Path) -> dict[str, TensorRange]:
    """The tensors of a checkpoint, which is one file, or several files with an index."""
    index = folder / INDEX
    if not index.exists():
        if (folder / SINGLE).exists():
            return file_tensors(folder / SINGLE)
        raise RunError(_no_weights(folder))
    tensors: dict[str, TensorRange] = {}
    for name in sorted(index_files(folder)):
        tensors |= file_tensors(folder / name)
    return tensors


def index_files(folder: Path) -> set[str]:
    """The names of the files with the weights, from the index of a checkpoint."""
    index = folder / INDEX
    try:
        names = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise RunError(f"cannot read {index}: {error}; copy or download it again") from None
    if outside := [name for name in names if "/" in name or "\\" in name]:
        raise RunError(
            f"{index} names a file outside its folder, {outside[0]!r}; use another checkpoint"
        )
    return names


def write_tensors(
    path: Path,
    tensors: Iterable[TensorOut],
    on_copied: OnCopied = lambda count: None,
    metadata: Mapping[str, str] | None = None,
) -> StoredFile:
    """Write a file of these tensors, in canonical form unless there is `metadata`. `on_copied` gets
    the size of every piece."""
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    header = header_bytes(((each.name, each.dtype, each.shape) for each in ordered), metadata)
    pieces = chain([header], *(tensor.pieces() for tensor in ordered))
    return store(path, pieces, on_copied)


def check_space(folder: Path, size: int) -> None:
    """Raise RunError if a folder's disk has no room for this many bytes."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if size > free:
        raise RunError(
            f"{folder} needs {size / 1e9:.1f} GB, but only {free / 1e9:.1f} GB are free there; free"
            " space or use another --out"
        )


def split_into_shards(tensors: Iterable[TensorOut], most: int) -> Mapping[str, list[TensorOut]]:
    """Tensors by the file that they go to: one file, or several of at most `most` bytes each."""
    shards: list[list[TensorOut]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.size > most:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    count = len(shards)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": shard
        for number, shard in enumerate(shards, 1)
    }


def _no_weights(folder: Path) -> str:
    hint = ""
    for path in folder.glob("*.bin"):
        hint = f" ({path.name} is pickled and cannot be used; convert it to safetensors first)"
    return f"{folder} has neither {SINGLE} nor {INDEX}{hint}; a model consists of {NEEDED}"
