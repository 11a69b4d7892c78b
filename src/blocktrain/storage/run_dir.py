"""A run as a folder: its config and, for each block, versions with their hashes.

    RUN/config.toml                      its hash is in every manifest
    RUN/extensions.json                  later numbers of steps, if the run was extended
    RUN/block-0/manifest.json            the commit point: names every file with its sha256
    RUN/block-0/v000500.safetensors      weights after 500 steps
    RUN/block-0/state-000500.safetensors optimizer state, to continue training
    RUN/block-0/metrics.jsonl
    RUN/tokenizer/tokenizer.json         and the files that go with it, unless tokens are bytes

An assembled or imported run has no such versions: RUN/manifest.json names one file with all blocks
(model.safetensors), or a file for each (block-0.safetensors).

A file is written whole, flushed to disk and renamed before a manifest names it, and a manifest
is replaced by rename, so that a run survives being killed at any instant. Hashes are checked on
load. Tensors are numpy arrays in safetensors files; nothing is ever unpickled. Imports no torch.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import filelock

from blocktrain.config import Config, load_stored_config
from blocktrain.config.extensions import add_extension
from blocktrain.errors import CorruptFileError, ProtocolError, RunError
from blocktrain.files import (
    RESTORE,
    UNFINISHED,
    StoredFile,
    check_stored,
    errors_naming,
    store,
    write_bytes,
)
from blocktrain.storage.tensor_file import Array, Tensors, encode, read_specs, read_tensor

FORMAT = 1
KEPT_VERSIONS = 2
EXPORTED = "model.safetensors"
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
TEXT = "text"  # folder of the splits that a fetched run brings along
LOCK = ".lock"
LOCAL_SETTINGS = ("device", "log_to")  # of [train]; they do not change what is computed


@dataclass(frozen=True)
class SavedVersion:
    step: int
    bytes_seen: int
    valid_ce: float | None
    weights: StoredFile


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint of one block."""

    step: int
    bytes_seen: int
    valid_ce: float | None
    weights: Tensors
    state: Tensors  # the optimizer's moments
    counters: Mapping[str, Any]
    data: str = ""  # digest of the training text
    chosen: int | None = None  # the step of the version to use, if it is not the newest
    finished: bool = False


@dataclass(frozen=True)
class Trained:
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
    def trained(self) -> Trained | None:
        """How far an exported run's model was trained; None if unknown, and for any other run."""
        stored = self._exported_manifest().get("trained") if self.exported else None
        return Trained(**stored) if stored else None

    def begun(self) -> bool:
        """Whether a block was trained or is being trained."""
        return self.exported or any(block.begun() for block in self.blocks())

    def lock(self) -> filelock.BaseFileLock:
        """A lock to hold while creating a run, so that only one of several processes creates it."""
        self.path.mkdir(parents=True, exist_ok=True)
        return filelock.FileLock(self.path / LOCK)

    def block(self, index: int) -> "BlockDir":
        steps = self.config.train.steps
        return BlockDir(self.path / f"block-{index}", index, self._config_digest(), steps)

    def blocks(self) -> "list[BlockDir]":
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

    def read_block(self, index: int) -> Iterator[tuple[str, Array]]:
        """A block's current weights, tensor by tensor."""
        if not self.exported:
            return self.block(index).read_weights()
        return read_tensors(self.path, self._weights_file(index), self._prefix(index))

    def weights_file(self, index: int) -> tuple[Path, str]:
        """The file of a block's current weights, whose hash is checked, and the prefix of their
        names in it."""
        if self.exported:
            folder, stored, prefix = self.path, self._weights_file(index), self._prefix(index)
        else:
            block = self.block(index)
            folder, stored, prefix = block.path, block.current().weights, ""
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

    def _progress(self) -> Trained | None:
        if self.exported:
            return self.trained
        current = [block.current() for block in self.blocks()]
        steps, sizes = [each.step for each in current], [each.bytes_seen for each in current]
        return Trained(steps, sizes, [each.valid_ce for each in current])

    def write_exported(
        self,
        blocks: Sequence[Tensors],
        fetched: bool = False,
        trained: Trained | None = None,
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
        manifest = {"format": FORMAT, "config": self._config_digest(), **values}
        write_bytes(self.path / MANIFEST, json.dumps(manifest, indent=1).encode())

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


class BlockDir:
    """One block's versions, training state and metrics."""

    def __init__(self, path: Path, index: int, config_digest: str, steps: int) -> None:
        """`steps`: after which the block is finished."""
        self.path, self.index = path, index
        self.config_digest, self.steps = config_digest, steps

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    def lock(self) -> filelock.BaseFileLock:
        """A lock to hold while training, so that no two processes train the same block."""
        self.path.mkdir(parents=True, exist_ok=True)
        return filelock.FileLock(self.path / LOCK, timeout=0)

    def begun(self) -> bool:
        """Whether the block has a version or is being trained."""
        if (self.path / "manifest.json").exists():
            return True
        if not self.path.exists():
            return False
        try:
            with self.lock():
                return False
        except filelock.Timeout:
            return True

    def versions(self) -> list[SavedVersion]:
        return [_version(entry) for entry in self._manifest().get("versions", [])]

    def reached(self) -> int:
        """The steps of the newest version; 0 if there is none."""
        return max((version.step for version in self.versions()), default=0)

    def finished(self) -> bool:
        return self.reached() >= self.steps

    def current(self) -> SavedVersion:
        """The version to use: the newest, or the best if train.keep chose one."""
        manifest = self._manifest()
        versions = [_version(entry) for entry in manifest.get("versions", [])]
        if not versions:
            raise RunError(
                f"block {self.index} has no version yet in {self.path.parent}; train it first"
            )
        chosen = manifest.get("chosen")
        return next((v for v in versions if v.step == chosen), versions[-1])

    def built_on(self) -> list[int | None]:
        """The predecessors' versions that a block of a cascade was last trained on; None: still
        untrained."""
        return list(self._manifest().get("counters", {}).get("built_on", []))

    def load_weights(self) -> Tensors:
        return dict(self.read_weights())

    def read_weights(self) -> Iterator[tuple[str, Array]]:
        return read_tensors(self.path, self.current().weights)

    def load_snapshot(self) -> Snapshot | None:
        """The last checkpoint; None if there is none."""
        manifest = self._manifest()
        if not manifest:
            return None
        newest = self.versions()[-1]
        return Snapshot(
            newest.step,
            newest.bytes_seen,
            newest.valid_ce,
            load_tensors(self.path, newest.weights),
            load_tensors(self.path, StoredFile(**manifest["state"])),
            manifest["counters"],
            manifest["data"],
            manifest["chosen"],
            manifest["finished"],
        )

    def save(self, snapshot: Snapshot) -> None:
        """Commit a version and the training state, then delete files that are no longer needed."""
        self.path.mkdir(parents=True, exist_ok=True)
        step = snapshot.step
        weights = store_tensors(self.path / f"v{step:06d}.safetensors", snapshot.weights)
        state = store_tensors(self.path / f"state-{step:06d}.safetensors", snapshot.state)
        earlier = [v for v in self.versions() if v.step < step]
        versions = [*earlier, SavedVersion(step, snapshot.bytes_seen, snapshot.valid_ce, weights)]
        versions = [
            v for v in versions if v in versions[-KEPT_VERSIONS:] or v.step == snapshot.chosen
        ]
        manifest = {
            "format": FORMAT,
            "config": self.config_digest,
            "data": snapshot.data,
            "finished": snapshot.finished,
            "chosen": snapshot.chosen,
            "counters": dict(snapshot.counters),
            "versions": [asdict(v) for v in versions],
            "state": asdict(state),
        }
        write_bytes(self.path / "manifest.json", json.dumps(manifest, indent=1).encode())
        named = {state.name, *(v.weights.name for v in versions)}
        for path in self.path.glob("*.safetensors*"):
            if path.name not in named:
                path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Delete everything, so that training starts from the beginning."""
        (self.path / "manifest.json").unlink(missing_ok=True)  # first, since it names the others
        for path in self.path.glob("*"):
            if path.name != LOCK:
                path.unlink()

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        with errors_naming(self.metrics_path), self.metrics_path.open("a") as out:
            out.write(json.dumps(record) + "\n")

    def metrics(self) -> Iterator[dict[str, Any]]:
        """The records of the training, oldest first."""
        text = self.metrics_path.read_text() if self.metrics_path.exists() else ""
        for line in text.splitlines():
            with suppress(ValueError):  # truncated when the process was killed
                yield json.loads(line)

    def forget_metrics_after(self, step: int) -> None:
        """Delete records after the last checkpoint, since they will be written again."""
        if self.metrics_path.exists():
            kept = [json.dumps(record) for record in self.metrics() if record["step"] <= step]
            write_bytes(self.metrics_path, "".join(f"{line}\n" for line in kept).encode())

    def _manifest(self) -> dict[str, Any]:
        path = self.path / "manifest.json"
        return read_manifest(path, self.config_digest) if path.exists() else {}


def store_tensors(path: Path, tensors: Tensors) -> StoredFile:
    """Write tensors piece by piece, without a second copy in memory."""
    return store(path, encode(tensors))


def load_tensors(folder: Path, stored: StoredFile) -> Tensors:
    return dict(read_tensors(folder, stored))


def read_tensors(folder: Path, stored: StoredFile, prefix: str = "") -> Iterator[tuple[str, Array]]:
    """Tensors whose names begin with `prefix`, which is removed. The file's hash is checked first;
    then each tensor is read when it is requested."""
    path = folder / stored.name
    check_stored(path, stored)
    try:
        with path.open("rb") as file:
            for spec in sorted(read_specs(file, stored.size), key=lambda spec: spec.name):
                if spec.name.startswith(prefix):
                    yield spec.name.removeprefix(prefix), read_tensor(file, spec)
    except ProtocolError as error:
        raise CorruptFileError(f"{path} is not a safetensors file ({error}); {RESTORE}") from None


def read_manifest(path: Path, config_digest: str) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}; {RESTORE}") from None
    except ValueError:
        raise CorruptFileError(f"{path} is not valid JSON; {RESTORE}") from None
    if manifest.get("format") != FORMAT:
        raise RunError(
            f"{path} has format {manifest.get('format')}, but this release reads only {FORMAT};"
            " use the release that wrote it"
        )
    if manifest["config"] != config_digest:
        raise CorruptFileError(
            f"config.toml was altered: its hash differs from the one in {path}; {RESTORE}"
        )
    return manifest


def _version(entry: dict[str, Any]) -> SavedVersion:
    return SavedVersion(**{**entry, "weights": StoredFile(**entry["weights"])})


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
