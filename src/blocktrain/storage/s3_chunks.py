"""Chunks as objects in S3-compatible storage. Credentials come from the usual AWS_* variables.

Workers put and get objects directly, by presigned URLs. If workers reach the storage at another
address than the coordinator does, URLs are signed for that one (`public`).
"""

import re
import secrets
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from tempfile import SpooledTemporaryFile, TemporaryFile, gettempdir
from typing import IO, TYPE_CHECKING, Literal
from urllib.parse import parse_qs, urlsplit

from blocktrain.errors import (
    ConfigError,
    NotFoundError,
    ProtocolError,
    RunError,
    UnreachableError,
)
from blocktrain.protocol.messages import CHUNK_BYTES
from blocktrain.storage.chunks import (
    NAME,
    Buffer,
    ChunkStore,
    IncomingChunk,
    altered,
    check_size,
    checked_name,
    name_of,
    not_found,
    place_of,
    verified,
)

if TYPE_CHECKING:
    from obstore.store import S3Config, S3Store

UPLOAD = re.compile(r"[0-9A-Za-z_-]{1,128}")
REQUESTS = 16  # parallel requests when looking up many chunks
UPLOADS = threading.Semaphore(8)  # limits the whole chunks in memory during uploads
SPOOL_BYTES = 64 * 1024  # size up to which an incoming chunk stays in memory instead of on disk
OPTIONS = ("endpoint", "public", "region")


def open_s3(url: str) -> "S3Chunks":
    parts = urlsplit(url)
    options = parse_qs(parts.query, keep_blank_values=True)
    if unknown := sorted(options.keys() - set(OPTIONS)):
        raise ConfigError(
            f"unknown option {', '.join(unknown)} in {url}; use one of {', '.join(OPTIONS)}"
        )
    if not parts.netloc or "@" in parts.netloc or parts.fragment:
        raise ConfigError(f"{url} is not of the form s3://BUCKET/PREFIX?endpoint=URL&region=NAME")
    chosen = {name: values[-1] for name, values in options.items()}
    for name in ("endpoint", "public"):
        if name in chosen and not re.match(r"https?://[^/]", chosen[name]):
            raise ConfigError(f"the {name} in {url} must be http://HOST or https://HOST")
    return S3Chunks(parts.netloc, parts.path.strip("/"), **chosen)


class S3Chunks(ChunkStore):
    has_presigned_urls = True

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        endpoint: str | None = None,
        region: str | None = None,
        public: str | None = None,
    ) -> None:
        self._name = f"s3://{bucket}/{prefix}".rstrip("/")
        self._store = _store(bucket, prefix, endpoint, region)
        self._signing = _store(bucket, prefix, public, region) if public else self._store

    def __str__(self) -> str:
        return self._name

    def put(self, data: Buffer, name: str | None = None) -> str:
        check_size(len(data))
        name = checked_name(name_of(data), name)
        with self._errors():
            self._store.put(place_of(name), data, use_multipart=False)
        return name

    def incoming(self) -> "_IncomingObject":
        return _IncomingObject(self)

    def open(self, name: str) -> tuple[IO[bytes], int]:
        data = self.get(name)
        file = TemporaryFile()  # noqa: SIM115  the caller closes it
        with _disk_errors():
            file.write(data)
            file.seek(0)
        return file, len(data)

    def get(self, name: str) -> bytes:
        data = self._read(place_of(name), name, CHUNK_BYTES)
        if data is None:
            raise altered(name, self)
        return verified(data, name, self)

    def has(self, names: Iterable[str]) -> set[str]:
        unique = list(set(names))
        with ThreadPoolExecutor(max(1, min(REQUESTS, len(unique)))) as pool:
            sizes = pool.map(lambda name: self._size(place_of(name)), unique)
            return {name for name, size in zip(unique, sizes, strict=True) if size is not None}

    def delete(self, name: str) -> None:
        self._delete([place_of(name)])

    def stored(self) -> Iterator[tuple[str, float]]:
        for path, changed in self.objects():
            name = path.replace("/", "", 1)
            if NAME.fullmatch(name):
                yield name, changed

    def get_url(self, name: str, seconds: int) -> str | None:
        return self._sign("GET", place_of(name), seconds)

    def put_url(self, upload: str, name: str, seconds: int) -> str | None:
        return self._sign("PUT", _quarantined(upload, name), seconds)

    def admit(self, upload: str, name: str, size: int) -> bool:
        uploaded = _quarantined(upload, name)
        uploaded_size = self._size(uploaded)
        if uploaded_size is None:
            return name in self.has([name])
        # The uploader can still change the object through its URL, so check a copy that no URL
        # reaches.
        copy = f"{uploaded}-{secrets.token_hex(16)}"
        try:
            return uploaded_size == size <= CHUNK_BYTES and self._admit(uploaded, copy, name, size)
        finally:
            self._delete([uploaded, copy])

    def clear_quarantine(self, upload: str) -> None:
        _check_upload(upload)
        self._delete([path for path, _ in self.objects(f"quarantine/{upload}")])

    def clear_leftovers(self, before: float) -> None:
        listed = self.objects("quarantine")
        self._delete([path for path, changed in listed if changed < before])

    def _admit(self, uploaded: str, copy: str, name: str, size: int) -> bool:
        try:
            with self._errors(name):
                self._store.copy(uploaded, copy)
            data = self._read(copy, name, size)
            if data is None or name_of(data) != name:
                return False
            with self._errors(name):
                self._store.copy(copy, place_of(name))
        except NotFoundError:  # another request admitted or removed it meanwhile
            return name in self.has([name])
        return True

    def _read(self, path: str, name: str, most: int) -> bytes | None:
        """Read an object; None, without reading it, if it is larger than `most` bytes."""
        with self._errors(name):
            result = self._store.get(path)
            return bytes(result.bytes()) if result.meta["size"] <= most else None

    def _size(self, path: str) -> int | None:
        try:
            with self._errors(path):
                return self._store.head(path)["size"]
        except NotFoundError:
            return None

    def objects(self, prefix: str | None = None) -> Iterator[tuple[str, float]]:
        """The paths of the objects below a prefix, and when they changed."""
        with self._errors():
            for batch in self._store.list(prefix, chunk_size=1000):
                for entry in batch:
                    yield entry["path"], entry["last_modified"].timestamp()

    def _delete(self, paths: list[str]) -> None:
        if paths:
            with self._errors():
                self._store.delete(paths)

    def _sign(self, method: Literal["GET", "PUT"], path: str, seconds: int) -> str:
        import obstore

        with self._errors():
            url: str = obstore.sign(self._signing, method, path, timedelta(seconds=seconds))
        return url

    @contextmanager
    def _errors(self, name: str | None = None) -> Iterator[None]:
        from obstore import exceptions

        refusals = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
        try:
            yield
        except FileNotFoundError:
            raise (
                not_found(name, self)
                if name
                else ConfigError(
                    f"the bucket of {self} does not exist; create it, or correct its name"
                )
            ) from None
        except refusals:
            raise ConfigError(
                f"{self} refuses the credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            ) from None
        except exceptions.BaseError as error:
            reason = str(error).partition("\n")[0]
            raise UnreachableError(
                f"the chunk store {self} failed: {reason}; check its address and that it runs"
            ) from None


class _IncomingObject(IncomingChunk):
    """A chunk that is on disk while it arrives, so that slow connections take no memory."""

    def __init__(self, store: S3Chunks) -> None:
        self._store = store
        self._file = SpooledTemporaryFile(SPOOL_BYTES)  # noqa: SIM115

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def _append(self, part: Buffer) -> None:
        with _disk_errors():
            self._file.write(part)

    def keep(self, name: str | None = None) -> str:
        with UPLOADS:
            self._file.seek(0)
            data = self._file.read()
            return self._store.put(data, name)


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Turn a full or unwritable folder for temporary files into a RunError: chunks pass through
    such files on their way in and out."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"cannot write a chunk to {gettempdir()}: {error.strerror}; free space or set TMPDIR"
        ) from None


def _store(bucket: str, prefix: str, endpoint: str | None, region: str | None) -> "S3Store":
    try:
        from obstore.store import S3Store
    except ImportError:
        raise ConfigError(
            "an s3:// chunk store needs obstore: pip install 'blocktrain[s3]'"
        ) from None
    options: S3Config = {}
    if endpoint:
        options["endpoint"] = endpoint
    if region:
        options["region"] = region
    return S3Store(
        bucket,
        prefix=prefix or None,
        config=options,
        client_options={"allow_http": bool(endpoint and endpoint.startswith("http://"))},
        retry_config={"max_retries": 5, "retry_timeout": timedelta(seconds=30)},
    )


def _quarantined(upload: str, name: str) -> str:
    _check_upload(upload)
    place_of(name)
    return f"quarantine/{upload}/{name}"


def _check_upload(upload: str) -> None:
    if not UPLOAD.fullmatch(upload):
        raise ProtocolError(f"{upload[:80]!r} is not the name of an upload")
