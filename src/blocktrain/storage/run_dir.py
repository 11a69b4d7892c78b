"""A run as a folder: its config and, for each block, a folder of versions.

    RUN/config.toml                      its hash is in every manifest
    RUN/extensions.json                  later numbers of steps, if the run was extended
    RUN/block-0/                         versions of a block, see block_dir.py
    RUN/tokenizer/tokenizer.json         and the files that go with it, unless tokens are bytes

An assembled or imported run has no such versions: RUN/manifest.json names one file with all blocks
(model.safetensors), or a file for each (block-0.safetensors).

Imports no torch.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import filelock

from blocktrain.config import Config, load_stored_config
from blocktrain.config.extensions import add_extension
from blocktrain.errors import RunError
from blocktrain.files import UNFINISHED, StoredFile, check_stored, write_bytes
from blocktrain.storage.block_dir import (
    LOCK,
    MANIFEST,
    BlockDir,
    read_manifest,
    read_tensors,
    store_tensors,
    write_manifest,
)
from blocktrain.storage.tensor_file import Array, Tensors

EXPORTED = "model.safetensors"
TOKENIZER = "tokenizer"
TEXT = "text"  # folder of the splits that a fetched run brings along
LOCAL_SETTINGS = ("device", "log_to")  # of [train]; they do not change what is computed


@dataclass(frozen=True)
class TrainingRecord:
    """How far the model in an exported or fetched run was trained. `versions` are a coordinator's;
    `ces`: cross entropies of the blocks on valid; `ce`: that of the whole model."""

    steps: Sequence[int]
    bytes_seen: Sequence[int]
    ces: Sequence[float | None]
    ce: float | None = None
    versions: Sequence[int] | None = None


class RunDir:
    """One run on disk."""

    def __init__(self, path: Path, config: Config) -> None:
        self.path = path
        self.config = config

    @classmethod
    def create(cls, path: Path, config: Config) -> "RunDir":
        """Create a run, or open it again if it has the same settings."""
        if run := cls.resumable(path, config):
            if differing := _differing(run.config, config):
                raise RunError(
                    f"{path} has other settings ({', '.join(differing)});"
                    f" {_remedy(path, differing, run.config, config)}"
                )
            return cls(path, _with_local_settings(run.config, config))
        cls.refuse_other_folder(path)
        path.mkdir(parents=True, exist_ok=True)
        write_bytes(path / "config.toml", config.to_toml().encode())
        return cls(path, config)

    def extend(self, steps: int) -> "RunDir":
        """Plan the run for more steps per block. A process that trains it now ends as before."""
        if self.exported:
            raise RunError(
                f"{self.path} is an exported model and cannot be trained further; start another run"
                f" with train.warm_start={self.path}"
            )
        with self.lock():
            current = RunDir.open(self.path)
            extended = current.config.extended_to(steps)
            add_extension(self.path, steps)
        return RunDir(self.path, extended)

    @staticmethod
    def refuse_other_folder(path: Path) -> None:
        """Raise RunError if a folder contains something else than a run."""
        is_run = (path / "config.toml").exists()
        if path.is_dir() and not is_run and not all(map(_is_leftover, path.iterdir())):
            raise RunError(f"{path} is not empty and not a run; use another folder")

    @classmethod
    def create_exported(cls, path: Path, config: Config) -> "RunDir":
        """Create a run for `write_exported` or `commit_imported`, in a folder without a model."""
        if any(path.glob("block-*/")):
            raise RunError(f"{path} contains a run's blocks; use another folder")
        if (path / MANIFEST).exists():
            raise RunError(f"{path} contains a model already; use another folder")
        return cls.create(path, config)

    @classmethod
    def create_fetched(cls, path: Path, config: Config, run: str) -> "RunDir":
        """Create a run for a model that is downloaded, or open the folder that it was downloaded to
        before. `run`: its id."""
        if not (path / MANIFEST).exists():
            return cls.create_exported(path, config)
        stored = cls.open(path)
        if not stored.fetched or stored.origin or stored.fetched_from != run:
            raise RunError(f"{path} contains another model; use another folder")
        if stored.config != config:  # the run was extended meanwhile
            write_bytes(path / "config.toml", config.to_toml().encode())
        return cls(path, config)

    @property
    def text_folder(self) -> Path:
        """The folder of a fetched run's text: valid.bin and test.bin, as arrays of tokens."""
        return self.path / TEXT

    def commit_imported(self, blocks: Sequence[StoredFile], origin: Mapping[str, Any]) -> None:
        """Write the manifest of a run with one file for each block. `origin`: their source."""
        listed = [asdict(block) for block in blocks]
        self._write_manifest({"blocks": listed, "fetched": True, "origin": dict(origin)})

    @classmethod
    def resumable(cls, path: Path, config: Config) -> "RunDir | None":
        """The run that `create` would resume, or None. A run that failed before it saved anything
        does not count, so that it can be started again with other settings."""
        if not (path / "config.toml").exists():
            return None
        run = cls.open(path)
        return run if run.begun() or not _differing(run.config, config) else None

    @classmethod
    def open(cls, path: Path) -> "RunDir":
        if not path.is_dir():
            raise RunError(f"the folder {path} does not exist; use the folder of a run")
        if not (path / "config.toml").exists():
            raise RunError(f"{path} is not a run: it has no config.toml; use the folder of a run")
        return cls(path, load_stored_config(path / "config.toml"))

    @property
    def exported(self) -> bool:
        """Whether this is a model without training state, for use or for a warm start."""
        return (self.path / MANIFEST).exists()

    @property
    def fetched(self) -> bool:
        """Whether the run comes from another machine; paths in its settings are not valid here."""
        return self.exported and self._exported_manifest().get("fetched", False)

    @property
    def fetched_from(self) -> str | None:
        """The id of the run that a model was fetched from, if it is known."""
        return self._exported_manifest().get("run") if self.exported else None

    @property
    def origin(self) -> Mapping[str, Any] | None:
        """The source of an imported model; None for any other run."""
        return self._exported_manifest().get("origin") if self.exported else None

    @property
    def trained(self) -> TrainingRecord | None:
        """How far an exported run's model was trained; None if unknown, and for any other run."""
        stored = self._exported_manifest().get("trained") if self.exported else None
        return TrainingRecord(**stored) if stored else None

    def begun(self) -> bool:
        """Whether a block was trained or is being trained."""
        return self.exported or any(block.begun() for block in self.blocks())

    def lock(self) -> filelock.BaseFileLock:
        """A lock to hold while creating a run, so that only one of several processes creates it."""
        self.path.mkdir(parents=True, exist_ok=True)
        return filelock.FileLock(self.path / LOCK)

    def block(self, index: int) -> BlockDir:
        steps = self.config.train.steps
        return BlockDir(self.path / f"block-{index}", index, self._config_digest(), steps)

    def blocks(self) -> list[BlockDir]:
        """All blocks of a run that is not exported."""
        return [self.block(index) for index in range(self.config.block_count)]

    def block_weights(self, index: int) -> Tensors:
        return dict(self.read_block(index))

    def weights(self, blocks: Sequence[int] | None = None) -> list[Tensors]:
        """The current weights of some blocks, by default all; exported runs work too."""
        chosen = range(self.config.block_count) if blocks is None else blocks
        if not self.exported:
            return [self.block(index).load_weights() for index in chosen]
        if "blocks" in self._exported_manifest():
            return [self.block_weights(index) for index in chosen]
        parts: list[Tensors] = [{} for _ in range(self.config.block_count)]
        for name, tensor in read_tensors(self.path, self._weights_file(0), "block."):
            index, _, rest = name.partition(".")
            parts[int(index)][rest] = tensor
        return [parts[index] for index in chosen]

    def read_block(self, index: int, *, bf16_as_bits: bool = False) -> Iterator[tuple[str, Array]]:
        """A block's current weights, tensor by tensor. Those in BF16 become float32, or uint16 with
        `bf16_as_bits`."""
        return read_tensors(*self.stored_weights(index), bf16_as_bits=bf16_as_bits)

    def stored_weights(self, index: int) -> tuple[Path, StoredFile, str]:
        """The folder and the file of a block's current weights, and the prefix of their names in
        it."""
        if self.exported:
            return self.path, self._weights_file(index), self._prefix(index)
        block = self.block(index)
        return block.path, block.current().weights, ""

    def weights_file(self, index: int) -> tuple[Path, str]:
        """The file of a block's current weights, whose hash is checked, and the prefix of their
        names in it."""
        folder, stored, prefix = self.stored_weights(index)
        check_stored(folder / stored.name, stored)
        return folder / stored.name, prefix

    def tokenizer_files(self) -> dict[str, bytes]:
        """The files of the run's tokenizer, by name; empty if tokens are bytes."""
        folder = self.path / TOKENIZER
        paths = (path for path in sorted(folder.glob("*")) if not path.name.endswith(UNFINISHED))
        return {path.name: path.read_bytes() for path in paths}

    def store_tokenizer(self, files: Mapping[str, bytes]) -> None:
        """Store the tokenizer's files. Settings that contain its hash must be stored after this."""
        folder = self.path / TOKENIZER
        for path in folder.glob("*"):
            if path.name not in files:  # left by a failed start with another tokenizer
                path.unlink()
        for name, data in files.items():
            folder.mkdir(parents=True, exist_ok=True)
            write_bytes(folder / name, data)

    def export(self, out: Path) -> Path:
        """Write all blocks to one safetensors file, with the config and a manifest beside it."""
        if self.origin:
            raise RunError(f"{self.path} is an imported model and needs no export; copy its folder")
        run = RunDir.create_exported(out, self.config)
        run.store_tokenizer(self.tokenizer_files())
        return run.write_exported(self.weights(), self.fetched, self._progress())

    def _progress(self) -> TrainingRecord | None:
        if self.exported:
            return self.trained
        current = [block.current() for block in self.blocks()]
        steps, sizes = [each.step for each in current], [each.bytes_seen for each in current]
        return TrainingRecord(steps, sizes, [each.valid_ce for each in current])

    def write_exported(
        self,
        blocks: Sequence[Tensors],
        fetched: bool = False,
        trained: TrainingRecord | None = None,
        run: str | None = None,
    ) -> Path:
        """Write all blocks to one file, in a run from `create_exported` or `create_fetched`, whose
        id is then `run`."""
        tensors = {
            f"block.{index}.{name}": tensor
            for index, weights in enumerate(blocks)
            for name, tensor in weights.items()
        }
        stored = store_tensors(self.path / EXPORTED, tensors)
        more = ({"trained": asdict(trained)} if trained else {}) | ({"run": run} if run else {})
        self._write_manifest({"model": asdict(stored), "fetched": fetched, **more})
        return self.path / EXPORTED

    def _write_manifest(self, values: Mapping[str, Any]) -> None:
        write_manifest(self.path / MANIFEST, self._config_digest(), values)

    def _weights_file(self, index: int) -> StoredFile:
        """The file that contains a block, in an assembled or imported run."""
        manifest = self._exported_manifest()
        return StoredFile(
            **manifest["blocks"][index] if "blocks" in manifest else manifest["model"]
        )

    def _prefix(self, index: int) -> str:
        return "" if "blocks" in self._exported_manifest() else f"block.{index}."

    def _exported_manifest(self) -> dict[str, Any]:
        return read_manifest(self.path / MANIFEST, self._config_digest())

    def _config_digest(self) -> str:
        return hashlib.sha256((self.path / "config.toml").read_bytes()).hexdigest()


def _is_leftover(path: Path) -> bool:
    """Whether a file may be left over from a process that was killed while it created a run."""
    return path.name in (LOCK, TOKENIZER) or path.name.endswith(UNFINISHED)


def _with_local_settings(stored: Config, requested: Config) -> Config:
    """The run's stored settings, except those that concern this machine only, which are taken from
    `requested`."""
    local = {f"train__{name}": getattr(requested.train, name) for name in LOCAL_SETTINGS}
    return stored.with_settings(**local)


def _remedy(path: Path, differing: Sequence[str], stored: Config, requested: Config) -> str:
    steps = requested.train.steps
    if differing == ["train.steps"] and steps > stored.train.steps:
        return f"`blocktrain extend {path} --steps {steps}` extends the run"
    return "use another --out, or the same settings to resume"


def _differing(old: Config, new: Config) -> list[str]:
    """Names of the settings that differ although they must be equal, since they change what is
    computed. The settings of an extended run before its extension are equal to it."""
    before, after = old.planned_for(new.train.steps).to_dict(), new.to_dict()
    fitted = before["objective"]["bounds"]
    if after["objective"]["partition"] == "adaptive" and not after["objective"]["bounds"]:
        after["objective"]["bounds"] = fitted
    if not after["vocab"]["sha256"]:  # not resolved yet; data.tokenizer is compared
        after["vocab"] = before["vocab"]
    return [
        f"{section}.{key}"
        for section, values in before.items()
        for key, value in values.items()
        if after[section][key] != value and key not in LOCAL_SETTINGS
    ]
