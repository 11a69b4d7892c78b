"""The chunk store: bytes named by their BLAKE3 hash, on a disk or in S3-compatible storage.

    ab/cdef...                       a chunk, by the first two and the other 62 digits of its name
    partial/RANDOM                   a chunk that is being written (disk)
    quarantine/UPLOAD/NAME           what came through a presigned URL and nobody has checked (S3)

A chunk is written whole before it has its name, so a store survives being killed at any instant;
putting a chunk again changes nothing but its age. Every read is checked against the name. All
methods may be called from several threads at once. Knows nothing of what the chunks mean or who
still needs them: that is the business of blobs and of the ledger.
"""

import os
import re
import secrets
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import TYPE_CHECKING, BinaryIO, Literal, Protocol, Self
from urllib.parse import parse_qs, urlsplit
from urllib.request import url2pathname

from blake3 import blake3

from blocktrain.errors import (
    ConfigError,
    CorruptFileError,
    NotFoundError,
    ProtocolError,
    RunError,
    UnreachableError,
)
from blocktrain.protocol.messages import CHUNK_BYTES

if TYPE_CHECKING:
    from obstore.store import S3Config

Buffer = bytes | bytearray | memoryview

NAME = re.compile(r"[0-9a-f]{64}")
UPLOAD = re.compile(r"[0-9A-Za-z_-]{1,128}")
COMPARED_BYTES = 1024 * 1024  # at a time
S3_REQUESTS = 16  # at a time, for one question about many chunks
S3_OPTIONS = ("endpoint", "region")
S3_UPLOADS = threading.Semaphore(8)  # chunks whole in memory on their way to the store
SPOOL_BYTES = 64 * 1024  # of a chunk on its way in; more of it is on disk


class ChunkStore(Protocol):
    def put(self, data: Buffer, name: str | None = None) -> str:
        """Store a chunk, whole or not at all, and return its name; `name` where the caller has
        hashed it already."""
        ...

    def incoming(self) -> "Incoming":
        """A chunk that comes in parts; in memory is only the part at hand."""
        ...

    def get(self, name: str) -> bytes:
        """The chunk, checked. NotFoundError, or CorruptFileError where it was altered."""
        ...

    def open(self, name: str) -> tuple[BinaryIO, int]:
        """The chunk to be read in parts, and its size. Unchecked, for those who check it
        themselves."""
        ...

    def has(self, names: Iterable[str]) -> set[str]:
        """Those of the names that are stored."""
        ...

    def delete(self, name: str) -> None:
        """Whether or not it is there."""
        ...

    def stored(self) -> Iterator[tuple[str, float]]:
        """Every chunk's name and when it was last put, in seconds since 1970."""
        ...

    def get_url(self, name: str, seconds: int) -> str | None:
        """Where anybody may GET the chunk for so long; None where the store has no such thing."""
        ...

    def put_url(self, upload: str, name: str, seconds: int) -> str | None:
        """Where anybody may PUT what will be checked by `admit`; None as above."""
        ...

    def admit(self, upload: str, name: str, size: int) -> bool:
        """Check what was put into quarantine and make it a chunk; whether it is one now.
        Anything else than these bytes of this size is removed."""
        ...

    def clear_quarantine(self, upload: str) -> None:
        """Remove what an upload left in quarantine."""
        ...

    def clear_leftovers(self, before: float) -> None:
        """Remove what was begun before this time (seconds since 1970) and became no chunk."""
        ...


class Incoming(Protocol):
    """Ends as a chunk if it was kept, and otherwise as nothing."""

    size: int

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...

    def write(self, part: Buffer) -> None: ...

    def keep(self, name: str) -> None:
        """Make it the chunk of this name; a ProtocolError where it is not."""
        ...


def name_of(data: Buffer) -> str:
    return blake3(data).hexdigest()


def open_chunks(url: str) -> ChunkStore:
    """The store at a path, a file:// URL, or s3://BUCKET/PREFIX?endpoint=URL&region=NAME."""
    scheme, separator, _ = url.partition("://")
    if not url:
        raise ConfigError("the chunk store needs a path or an s3:// address")
    if not separator:
        return LocalChunks(Path(url).expanduser())
    if scheme == "file":
        return LocalChunks(_path_of_file_url(url))
    if scheme == "s3":
        return _open_s3(url)
    raise ConfigError(f"a chunk store is a path, file:// or s3://, not {scheme}://")


class LocalChunks:
    """Chunks as files. `sync`: a chunk that was put survives a power cut too."""

    def __init__(self, folder: Path, sync: bool = True) -> None:
        self.folder = folder
        self._sync = sync
        self._partial = folder / "partial"
        with self._translated():
            self._partial.mkdir(parents=True, exist_ok=True)

    def __str__(self) -> str:
        return str(self.folder)

    def put(self, data: Buffer, name: str | None = None) -> str:
        name = _checked_name_of(data, name)
        with self._translated():
            if not _refreshed(self._path(name), data):
                self._write(name, data)
        return name

    def incoming(self) -> "_IncomingFile":
        with self._translated():
            return _IncomingFile(self)

    def get(self, name: str) -> bytes:
        with self._translated(name):
            data = self._path(name).read_bytes()
        return _verified(data, name, self)

    def open(self, name: str) -> tuple[BinaryIO, int]:
        with self._translated(name):
            file = self._path(name).open("rb", buffering=0)
            return file, os.fstat(file.fileno()).st_size

    def has(self, names: Iterable[str]) -> set[str]:
        return {name for name in names if self._path(name).is_file()}

    def delete(self, name: str) -> None:
        with self._translated():
            self._path(name).unlink(missing_ok=True)

    def stored(self) -> Iterator[tuple[str, float]]:
        with self._translated():
            for folder in self.folder.glob("[0-9a-f][0-9a-f]/"):
                for entry, changed in _files(folder):
                    if NAME.fullmatch(folder.name + entry.name):
                        yield folder.name + entry.name, changed

    def get_url(self, name: str, seconds: int) -> str | None:
        return None

    def put_url(self, upload: str, name: str, seconds: int) -> str | None:
        return None

    def admit(self, upload: str, name: str, size: int) -> bool:
        return name in self.has([name])

    def clear_quarantine(self, upload: str) -> None:
        return None

    def clear_leftovers(self, before: float) -> None:
        with self._translated():
            for entry, changed in _files(self._partial):
                if changed < before:
                    entry.unlink(missing_ok=True)

    def _write(self, name: str, data: Buffer) -> None:
        scratch = self._scratch()
        try:
            with scratch.open("xb", buffering=0) as file:
                _write_all(file, data)
                self._take(file, scratch, name)
        finally:
            scratch.unlink(missing_ok=True)

    def _scratch(self) -> Path:
        return self._partial / secrets.token_hex(16)

    def _take(self, file: BinaryIO, scratch: Path, name: str) -> None:
        """Give a file that was written whole its name."""
        path = self._path(name)
        with self._translated():
            if self._sync:
                os.fsync(file.fileno())
            file.close()
            self._make_folder(path.parent)
            try:
                scratch.replace(path)
            except PermissionError:
                # Windows refuses to replace a chunk that somebody reads: then it is there.
                if not path.is_file():
                    raise
            if self._sync:
                _sync_folder(path.parent)

    def _make_folder(self, folder: Path) -> None:
        if not folder.is_dir():
            folder.mkdir(exist_ok=True)
            if self._sync:
                _sync_folder(self.folder)

    def _path(self, name: str) -> Path:
        return self.folder / _place(name)

    @contextmanager
    def _translated(self, wanted: str | None = None) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if wanted and isinstance(error, FileNotFoundError):
                raise _not_found(wanted, self) from None
            raise RunError(f"the chunk store {self}: {error.strerror}") from None


class _IncomingFile:
    """Hashed as it comes."""

    def __init__(self, store: LocalChunks) -> None:
        self.size = 0
        self._store = store
        self._hash = blake3()
        self._scratch = store._scratch()
        self._file = self._scratch.open("xb", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        self._scratch.unlink(missing_ok=True)

    def write(self, part: Buffer) -> None:
        self.size += len(part)
        self._hash.update(part)
        with self._store._translated():
            _write_all(self._file, part)

    def keep(self, name: str) -> None:
        _check_incoming(name, self._hash.hexdigest())
        self._store._take(self._file, self._scratch, name)


class S3Chunks:
    """Chunks as objects. Credentials come from the usual AWS_* environment variables."""

    def __init__(
        self, bucket: str, prefix: str = "", endpoint: str | None = None, region: str | None = None
    ) -> None:
        try:
            from obstore.store import S3Store
        except ImportError:
            raise ConfigError("an s3:// chunk store needs the package obstore") from None
        self._name = f"s3://{bucket}/{prefix}".rstrip("/")
        options: S3Config = {}
        if endpoint:
            options["endpoint"] = endpoint
        if region:
            options["region"] = region
        self._store = S3Store(
            bucket,
            prefix=prefix or None,
            config=options,
            client_options={"allow_http": bool(endpoint and endpoint.startswith("http://"))},
            retry_config={"max_retries": 5, "retry_timeout": timedelta(seconds=30)},
        )

    def __str__(self) -> str:
        return self._name

    def put(self, data: Buffer, name: str | None = None) -> str:
        name = _checked_name_of(data, name)
        with self._translated():
            self._store.put(_place(name), data, use_multipart=False)
        return name

    def incoming(self) -> "_IncomingObject":
        return _IncomingObject(self)

    def open(self, name: str) -> tuple[BinaryIO, int]:
        data = self.get(name)
        return BytesIO(data), len(data)

    def get(self, name: str) -> bytes:
        data = self._read(_place(name), name, CHUNK_BYTES)
        if data is None:
            raise CorruptFileError(f"chunk {name} in {self} was altered: it is too long")
        return _verified(data, name, self)

    def has(self, names: Iterable[str]) -> set[str]:
        asked = list(set(names))
        with ThreadPoolExecutor(max(1, min(S3_REQUESTS, len(asked)))) as pool:
            there = pool.map(lambda name: self._size(_place(name)) is not None, asked)
            return {name for name, found in zip(asked, there, strict=True) if found}

    def delete(self, name: str) -> None:
        self._delete([_place(name)])

    def stored(self) -> Iterator[tuple[str, float]]:
        for path, changed in self._list(None):
            name = path.replace("/", "", 1)
            if NAME.fullmatch(name):
                yield name, changed

    def get_url(self, name: str, seconds: int) -> str | None:
        return self._sign("GET", _place(name), seconds)

    def put_url(self, upload: str, name: str, seconds: int) -> str | None:
        return self._sign("PUT", _quarantined(upload, name), seconds)

    def admit(self, upload: str, name: str, size: int) -> bool:
        waiting = _quarantined(upload, name)
        found = self._size(waiting)
        if found is None:
            return name in self.has([name])
        # Whoever has the URL can still change what waits there. What is checked is a copy that
        # no URL reaches.
        held = f"{waiting}-{secrets.token_hex(16)}"
        try:
            return found == size <= CHUNK_BYTES and self._admit(waiting, held, name, size)
        finally:
            self._delete([waiting, held])

    def clear_quarantine(self, upload: str) -> None:
        _check_upload(upload)
        self._delete([path for path, _ in self._list(f"quarantine/{upload}")])

    def clear_leftovers(self, before: float) -> None:
        listed = self._list("quarantine")
        self._delete([path for path, changed in listed if changed < before])

    def _admit(self, waiting: str, held: str, name: str, size: int) -> bool:
        try:
            with self._translated(name):
                self._store.copy(waiting, held)
            data = self._read(held, name, size)
            if data is None or name_of(data) != name:
                return False
            with self._translated(name):
                self._store.copy(held, _place(name))
        except NotFoundError:  # somebody else admitted or removed it meanwhile
            return name in self.has([name])
        return True

    def _read(self, path: str, name: str, most: int) -> bytes | None:
        """An object's bytes; None, unread, where there are more than that."""
        with self._translated(name):
            result = self._store.get(path)
            return bytes(result.bytes()) if result.meta["size"] <= most else None

    def _size(self, path: str) -> int | None:
        try:
            with self._translated(path):
                return self._store.head(path)["size"]
        except NotFoundError:
            return None

    def _list(self, prefix: str | None) -> Iterator[tuple[str, float]]:
        with self._translated():
            for batch in self._store.list(prefix, chunk_size=1000):
                for entry in batch:
                    yield entry["path"], entry["last_modified"].timestamp()

    def _delete(self, paths: list[str]) -> None:
        if paths:
            with self._translated():
                self._store.delete(paths)

    def _sign(self, method: Literal["GET", "PUT"], path: str, seconds: int) -> str:
        import obstore

        with self._translated():
            url: str = obstore.sign(self._store, method, path, timedelta(seconds=seconds))
        return url

    @contextmanager
    def _translated(self, wanted: str | None = None) -> Iterator[None]:
        from obstore import exceptions

        refusals = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
        try:
            yield
        except FileNotFoundError:
            raise _not_found(wanted, self) if wanted else ConfigError(f"no bucket {self}") from None
        except refusals:
            raise ConfigError(
                f"{self} refuses these credentials; see AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY"
            ) from None
        except exceptions.BaseError as error:
            reason = str(error).partition("\n")[0]
            raise UnreachableError(f"the chunk store {self}: {reason}") from None


class _IncomingObject:
    """On disk while it comes: a slow line takes up no memory."""

    def __init__(self, store: S3Chunks) -> None:
        self.size = 0
        self._store = store
        self._arrived = SpooledTemporaryFile(SPOOL_BYTES)  # noqa: SIM115

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._arrived.close()

    def write(self, part: Buffer) -> None:
        self.size += len(part)
        try:
            self._arrived.write(part)
        except OSError as error:
            raise RunError(f"no room for a chunk on its way in: {error.strerror}") from None

    def keep(self, name: str) -> None:
        with S3_UPLOADS:
            self._arrived.seek(0)
            data = self._arrived.read()
            _check_incoming(name, name_of(data))
            self._store.put(data, name)


def _check_incoming(name: str, found: str) -> None:
    if name != found:
        raise ProtocolError("these bytes do not have the hash they are sent as")


def _write_all(file: BinaryIO, part: Buffer) -> None:
    view = memoryview(part)
    while view:
        view = view[file.write(view) :]


def _checked_name_of(data: Buffer, known: str | None) -> str:
    if len(data) > CHUNK_BYTES:
        raise ProtocolError(f"a chunk has at most {CHUNK_BYTES} bytes, not {len(data)}")
    return known or name_of(data)


def _verified(data: bytes, name: str, store: object) -> bytes:
    if name_of(data) != name:
        raise CorruptFileError(f"chunk {name} in {store} was altered: its hash is another")
    return data


def _not_found(name: str, store: object) -> NotFoundError:
    return NotFoundError(f"chunk {name} is not in {store}")


def _place(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ProtocolError(f"{name[:80]!r} is not the name of a chunk")
    return f"{name[:2]}/{name[2:]}"


def _quarantined(upload: str, name: str) -> str:
    _check_upload(upload)
    _place(name)
    return f"quarantine/{upload}/{name}"


def _check_upload(upload: str) -> None:
    if not UPLOAD.fullmatch(upload):
        raise ProtocolError(f"{upload[:80]!r} is not the name of an upload")


def _refreshed(path: Path, data: Buffer) -> bool:
    """Whether the file holds these bytes already; then it counts as written now."""
    try:
        if path.stat().st_size != len(data):
            return False
        with path.open("rb") as file:
            for start in range(0, len(data), COMPARED_BYTES):
                if file.read(COMPARED_BYTES) != data[start : start + COMPARED_BYTES]:
                    return False
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def _files(folder: Path) -> Iterator[tuple[Path, float]]:
    """Files and when they were last changed, without those that vanish meanwhile."""
    for entry in folder.iterdir():
        try:
            yield entry, entry.stat().st_mtime
        except FileNotFoundError:
            continue


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # where a folder cannot be opened, and a rename is journalled
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _path_of_file_url(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.strip("/"):
        raise ConfigError(f"{url} names no folder of this machine; write file:///PATH")
    return Path(url2pathname(parts.path))


def _open_s3(url: str) -> S3Chunks:
    parts = urlsplit(url)
    options = parse_qs(parts.query, keep_blank_values=True)
    if unknown := sorted(options.keys() - set(S3_OPTIONS)):
        raise ConfigError(
            f"unknown in {url}: {', '.join(unknown)} (known: {', '.join(S3_OPTIONS)})"
        )
    if not parts.netloc or "@" in parts.netloc or parts.fragment:
        raise ConfigError(f"{url} is not s3://BUCKET/PREFIX")
    endpoint = options.get("endpoint", [None])[-1]
    if endpoint is not None and not re.match(r"https?://[^/]", endpoint):
        raise ConfigError(f"the endpoint in {url} is not http://HOST or https://HOST")
    return S3Chunks(
        parts.netloc, parts.path.strip("/"), endpoint, options.get("region", [None])[-1]
    )
