"""One block of a run as a folder: versions of its weights, and the state to continue training.

    block-0/manifest.json            the commit point: names every file with its sha256
    block-0/v000500.safetensors      weights after 500 steps
    block-0/state-000500.safetensors optimizer state
    block-0/metrics.jsonl

A file is written whole, flushed to disk and renamed before a manifest names it, and a manifest
is replaced by rename, so that a block survives being killed at any instant. Hashes are checked on
load. Tensors are numpy arrays in safetensors files; nothing is ever unpickled. Imports no torch.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import filelock

from blocktrain.errors import CorruptFileError, ProtocolError, RunError
from blocktrain.files import RESTORE, StoredFile, check_stored, errors_naming, store, write_bytes
from blocktrain.storage.tensor_file import Array, Tensors, encode, read_specs, read_tensor

FORMAT = 1
KEPT_VERSIONS = 2
MANIFEST = "manifest.json"
LOCK = ".lock"


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
        if (self.path / MANIFEST).exists():
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
        return load_tensors(self.path, self.current().weights)

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
            "data": snapshot.data,
            "finished": snapshot.finished,
            "chosen": snapshot.chosen,
            "counters": dict(snapshot.counters),
            "versions": [asdict(v) for v in versions],
            "state": asdict(state),
        }
        write_manifest(self.path / MANIFEST, self.config_digest, manifest)
        named = {state.name, *(v.weights.name for v in versions)}
        for path in self.path.glob("*.safetensors*"):
            if path.name not in named:
                path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Delete everything, so that training starts from the beginning."""
        (self.path / MANIFEST).unlink(missing_ok=True)  # first, since it names the others
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
        path = self.path / MANIFEST
        return read_manifest(path, self.config_digest) if path.exists() else {}


def store_tensors(path: Path, tensors: Tensors) -> StoredFile:
    """Write tensors piece by piece, without a second copy in memory."""
    return store(path, encode(tensors))


def load_tensors(folder: Path, stored: StoredFile) -> Tensors:
    return dict(read_tensors(folder, stored))


def read_tensors(
    folder: Path, stored: StoredFile, prefix: str = "", *, bf16_as_bits: bool = False
) -> Iterator[tuple[str, Array]]:
    """Tensors whose names begin with `prefix`, which is removed. The file's hash is checked first;
    then each tensor is read when it is requested."""
    path = folder / stored.name
    check_stored(path, stored)
    try:
        with path.open("rb") as file:
            for spec in sorted(read_specs(file, stored.size), key=lambda spec: spec.name):
                if spec.name.startswith(prefix):
                    tensor = read_tensor(file, spec, bf16_as_bits=bf16_as_bits)
                    yield spec.name.removeprefix(prefix), tensor
    except ProtocolError as error:
        raise CorruptFileError(f"{path} is not a safetensors file ({error}); {RESTORE}") from None


def write_manifest(path: Path, config_digest: str, values: Mapping[str, Any]) -> None:
    manifest = {"format": FORMAT, "config": config_digest, **values}
    write_bytes(path, json.dumps(manifest, indent=1).encode())


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
