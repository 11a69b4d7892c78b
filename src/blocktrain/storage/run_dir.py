"""A run as a directory: the resolved config, and per block its versions with their hashes.

    RUN/config.toml                      its hash is in every manifest
    RUN/block-0/manifest.json            the commit point: names every file with its sha256
    RUN/block-0/v000500.safetensors      weights after 500 steps
    RUN/block-0/state-000500.safetensors what training needs to go on (optimizer)
    RUN/block-0/metrics.jsonl

A file is written whole, flushed to disk and renamed before a manifest names it, and a manifest
is replaced by rename, so that a run survives being killed at any instant. Hashes are checked on
load. Tensors are numpy arrays in safetensors; nothing is ever unpickled. Knows no torch.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import filelock
from safetensors import SafetensorError, safe_open

from blocktrain.config import Config, load_stored_config
from blocktrain.errors import CorruptFileError, RunError
from blocktrain.files import UNFINISHED, atomic_write, file_sha256, write_bytes
from blocktrain.storage.tensor_file import Array, Tensors, encode

FORMAT = 1
KEPT_VERSIONS = 2
EXPORTED = "model.safetensors"
LOCK = ".lock"
LOCAL_SETTINGS = ("device", "tensorboard")  # of [train]; they change nothing that is computed


@dataclass(frozen=True)
class StoredFile:
    name: str
    sha256: str
    size: int


@dataclass(frozen=True)
class SavedVersion:
    step: int
    bytes_seen: int
    valid_ce: float | None
    weights: StoredFile


@dataclass(frozen=True)
class Snapshot:
    """All that a checkpoint holds of one block."""

    step: int
    bytes_seen: int
    valid_ce: float | None
    weights: Tensors
    state: Tensors  # what only training needs: the optimizer's moments
    counters: Mapping[str, Any]
    data: str = ""  # digest of the text it was trained on
    chosen: int | None = None  # the step of the version to use, where it is not the newest
    finished: bool = False


class RunDir:
    """One run on disk."""

    def __init__(self, path: Path, config: Config) -> None:
        self.path = path
        self.config = config

    @classmethod
    def create(cls, path: Path, config: Config) -> "RunDir":
        """Start a run, or open it again if it was started with the same settings."""
        if cls.resumes(path, config):
            run = cls.open(path)
            if differing := _differing(run.config, config):
                raise RunError(
                    f"{path} was started with other settings ({', '.join(differing)});"
                    " use another --out, or the same settings to resume"
                )
            return cls(path, _with_local_settings(run.config, config))
        is_run = (path / "config.toml").exists()
        if path.is_dir() and not is_run and not all(map(_is_leftover, path.iterdir())):
            raise RunError(f"{path} is not empty and is not a run")
        path.mkdir(parents=True, exist_ok=True)
        write_bytes(path / "config.toml", config.to_toml().encode())
        return cls(path, config)

    @classmethod
    def create_exported(cls, path: Path, config: Config) -> "RunDir":
        """Start a run that `write_exported` will fill, in a folder without another model."""
        if any(path.glob("block-*")):
            raise RunError(f"{path} holds a run's blocks; use another directory")
        if (path / EXPORTED).exists():
            raise RunError(f"{path / EXPORTED} is there already; use another directory")
        return cls.create(path, config)

    @classmethod
    def resumes(cls, path: Path, config: Config) -> bool:
        """Whether `create` would resume a run. One that failed before it saved anything does not
        count: it may be started again with other settings."""
        if not (path / "config.toml").exists():
            return False
        run = cls.open(path)
        return run.begun() or not _differing(run.config, config)

    @classmethod
    def open(cls, path: Path) -> "RunDir":
        if not path.is_dir():
            raise RunError(f"there is no run at {path}")
        if not (path / "config.toml").exists():
            raise RunError(f"{path} is not a run: it has no config.toml")
        return cls(path, load_stored_config(path / "config.toml"))

    @property
    def exported(self) -> bool:
        """One assembled file, to be used but not trained."""
        return (self.path / EXPORTED).exists()

    @property
    def fetched(self) -> bool:
        """Settings and weights come from another machine: file names in them mean nothing."""
        return self.exported and self._exported_manifest().get("fetched", False)

    def begun(self) -> bool:
        """Whether something was trained here, or is being trained now."""
        return self.exported or any(
            self.block(index).begun() for index in range(self.config.block_count)
        )

    def lock(self) -> filelock.BaseFileLock:
        """Held while a run is started, so that processes starting it together agree."""
        self.path.mkdir(parents=True, exist_ok=True)
        return filelock.FileLock(self.path / LOCK)

    def block(self, index: int) -> "BlockDir":
        return BlockDir(self.path / f"block-{index}", index, self._config_digest())

    def block_weights(self, index: int) -> Tensors:
        return self.weights([index])[0]

    def weights(self, blocks: Sequence[int] | None = None) -> list[Tensors]:
        """The current weights of some blocks, or of every one; also from an exported file."""
        chosen = range(self.config.block_count) if blocks is None else blocks
        if self.exported:
            exported = self._exported_weights()
            return [exported[index] for index in chosen]
        return [self.block(index).load_weights() for index in chosen]

    def read_block(self, index: int) -> Iterator[tuple[str, Array]]:
        """A block's current weights, one tensor after another by name."""
        if not self.exported:
            return self.block(index).read_weights()
        return read_tensors(self.path, self._exported_file(), f"block.{index}.")

    def export(self, out: Path) -> Path:
        """Write all blocks as one safetensors file, with the config and its hash beside it."""
        run = RunDir.create_exported(out, self.config)
        return run.write_exported(self.weights(), self.fetched)

    def write_exported(self, blocks: Sequence[Tensors], fetched: bool = False) -> Path:
        """All blocks as one file, in a run that has no blocks of its own."""
        tensors = {
            f"block.{index}.{name}": tensor
            for index, weights in enumerate(blocks)
            for name, tensor in weights.items()
        }
        stored = store_tensors(self.path / EXPORTED, tensors)
        manifest = {
            "format": FORMAT,
            "config": self._config_digest(),
            "model": asdict(stored),
            "fetched": fetched,
        }
        write_bytes(self.path / "manifest.json", json.dumps(manifest, indent=1).encode())
        return self.path / EXPORTED

    def _exported_weights(self) -> list[Tensors]:
        tensors = load_tensors(self.path, self._exported_file())
        blocks: list[Tensors] = [{} for _ in range(self.config.block_count)]
        for name, tensor in tensors.items():
            _, index, rest = name.split(".", 2)
            blocks[int(index)][rest] = tensor
        return blocks

    def _exported_file(self) -> StoredFile:
        return StoredFile(**self._exported_manifest()["model"])

    def _exported_manifest(self) -> dict[str, Any]:
        return read_manifest(self.path / "manifest.json", self._config_digest())

    def _config_digest(self) -> str:
        return hashlib.sha256((self.path / "config.toml").read_bytes()).hexdigest()


class BlockDir:
    """One block's versions, training state and metrics."""

    def __init__(self, path: Path, index: int, config_digest: str) -> None:
        self.path = path
        self.index = index
        self.config_digest = config_digest

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    def lock(self) -> filelock.BaseFileLock:
        """Held while training, so that two processes never train one block of one run."""
        self.path.mkdir(parents=True, exist_ok=True)
        return filelock.FileLock(self.path / LOCK, timeout=0)

    def begun(self) -> bool:
        """Whether there is a version, or a process is working on one."""
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

    def finished(self) -> bool:
        return bool(self._manifest().get("finished", False))

    def current(self) -> SavedVersion:
        """The version the block stands at: the newest, or the best once one was chosen."""
        manifest = self._manifest()
        versions = [_version(entry) for entry in manifest.get("versions", [])]
        if not versions:
            raise RunError(f"block {self.index} has no version yet in {self.path.parent}")
        chosen = manifest.get("chosen")
        return next((v for v in versions if v.step == chosen), versions[-1])

    def built_on(self) -> list[int | None]:
        """The versions of the blocks before it that a block of a cascade was last trained on;
        None: as the seed gives them."""
        counters = self._manifest().get("counters", {})
        return list(counters.get("built_on", []))

    def load_weights(self) -> Tensors:
        return load_tensors(self.path, self.current().weights)

    def read_weights(self) -> Iterator[tuple[str, Array]]:
        return read_tensors(self.path, self.current().weights)

    def load_snapshot(self) -> Snapshot | None:
        """What training continues from, or None if it never began."""
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
        """Commit a version and the state to go on from; drop what is no longer needed."""
        self.path.mkdir(parents=True, exist_ok=True)
        step = snapshot.step
        weights = store_tensors(self.path / f"v{step:06d}.safetensors", snapshot.weights)
        state = store_tensors(self.path / f"state-{step:06d}.safetensors", snapshot.state)
        earlier = [v for v in self.versions() if v.step < step]
        kept = [*earlier, SavedVersion(step, snapshot.bytes_seen, snapshot.valid_ce, weights)]
        kept = [v for v in kept if v in kept[-KEPT_VERSIONS:] or v.step == snapshot.chosen]
        manifest = {
            "format": FORMAT,
            "config": self.config_digest,
            "data": snapshot.data,
            "finished": snapshot.finished,
            "chosen": snapshot.chosen,
            "counters": dict(snapshot.counters),
            "versions": [asdict(v) for v in kept],
            "state": asdict(state),
        }
        write_bytes(self.path / "manifest.json", json.dumps(manifest, indent=1).encode())
        self._remove_all_but({state.name, *(v.weights.name for v in kept)})

    def clear(self) -> None:
        """Forget everything: the next training starts from the beginning."""
        (self.path / "manifest.json").unlink(missing_ok=True)  # first: it names the others
        for path in self.path.glob("*"):
            if path.name != LOCK:
                path.unlink()

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        with self.metrics_path.open("a") as out:
            out.write(json.dumps(record) + "\n")

    def forget_metrics_after(self, step: int) -> None:
        """Drop what was logged after the last checkpoint: it will be logged again."""
        if not self.metrics_path.exists():
            return
        kept = [line for line in _whole_lines(self.metrics_path) if line["step"] <= step]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        write_bytes(self.metrics_path, text.encode())

    def _manifest(self) -> dict[str, Any]:
        path = self.path / "manifest.json"
        return read_manifest(path, self.config_digest) if path.exists() else {}

    def _remove_all_but(self, names: set[str]) -> None:
        for path in self.path.glob("*.safetensors*"):
            if path.name not in names:
                path.unlink(missing_ok=True)


def store_tensors(path: Path, tensors: Tensors) -> StoredFile:
    """Written piece by piece, so that they are not in memory a second time."""
    digest, size = hashlib.sha256(), 0
    with atomic_write(path) as out:
        for piece in encode(tensors):
            out.write(piece)
            digest.update(piece)
            size += len(piece)
    return StoredFile(path.name, digest.hexdigest(), size)


def load_tensors(folder: Path, stored: StoredFile) -> Tensors:
    return dict(read_tensors(folder, stored))


def read_tensors(folder: Path, stored: StoredFile, prefix: str = "") -> Iterator[tuple[str, Array]]:
    """Tensors whose names begin with the prefix, by name without it. The file's hash is checked
    first; then each tensor is read when it is taken."""
    path = folder / stored.name
    _check_file(path, stored)
    try:
        with safe_open(path, framework="numpy") as file:
            for name in sorted(file.keys()):
                if name.startswith(prefix):
                    yield name.removeprefix(prefix), file.get_tensor(name)
    except SafetensorError as error:
        raise CorruptFileError(f"{path} is not a safetensors file: {error}") from None


def _check_file(path: Path, stored: StoredFile) -> None:
    try:
        digest, size = file_sha256(path), path.stat().st_size
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from None
    if size != stored.size:
        raise CorruptFileError(f"{path} has {size} bytes, its manifest says {stored.size}")
    if digest != stored.sha256:
        raise CorruptFileError(f"{path} was altered: its hash is not the manifest's")


def read_manifest(path: Path, config_digest: str) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise CorruptFileError(f"{path} is not valid JSON") from None
    if manifest.get("format") != FORMAT:
        raise RunError(
            f"{path} has format {manifest.get('format')}, this release reads format {FORMAT}"
        )
    if manifest["config"] != config_digest:
        raise CorruptFileError(f"config.toml was altered: its hash is not the one in {path}")
    return manifest


def _version(entry: dict[str, Any]) -> SavedVersion:
    return SavedVersion(**{**entry, "weights": StoredFile(**entry["weights"])})


def _whole_lines(path: Path) -> Iterable[dict[str, Any]]:
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue  # cut short when the process was killed


def _is_leftover(path: Path) -> bool:
    """Files that a killed start may leave behind."""
    return path.name == LOCK or path.name.endswith(UNFINISHED)


def _with_local_settings(stored: Config, given: Config) -> Config:
    """The run's own settings, except those about this process."""
    local = {f"train__{name}": getattr(given.train, name) for name in LOCAL_SETTINGS}
    return stored.with_settings(**local)


def _differing(old: Config, new: Config) -> list[str]:
    """Settings that change what is computed: they may not change inside a run."""
    before, after = old.to_dict(), new.to_dict()
    fitted = before["objective"]["bounds"]
    if after["objective"]["partition"] == "adaptive" and not after["objective"]["bounds"]:
        after["objective"]["bounds"] = fitted
    return [
        f"{section}.{key}"
        for section, values in before.items()
        for key, value in values.items()
        if after[section][key] != value and key not in LOCAL_SETTINGS
    ]
