"""Chunks as objects of S3-compatible storage. Credentials come from the usual AWS_* variables.

Workers put and get objects themselves, by presigned URLs. If workers reach the storage at another
address than the coordinator, the URLs are signed for that one (`public`).
"""

import re
import secrets
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from tempfile import SpooledTemporaryFile, TemporaryFile, gettempdir
from typing import IO, TYPE_CHECKING, Literal, Self
from urllib.parse import parse_qs, urlsplit

from blocktrain.errors import (
    ConfigError,
    CorruptFileError,
    NotFoundError,
    ProtocolError,
    RunError,
    UnreachableError,
)
from blocktrain.protocol.messages import CHUNK_BYTES
from blocktrain.storage.chunks import (
    NAME,
    Buffer,
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
REQUESTS = 16  # at a time, to look up many chunks
UPLOADS = threading.Semaphore(8)  # chunks that are in memory as a whole, to be uploaded
SPOOL_BYTES = 64 * 1024  # of an incoming chunk in memory; the rest is on disk
OPTIONS = ("endpoint", "public", "region")


def open_s3(url: str) -> "S3Chunks":
    parts = urlsplit(url)
    options = parse_qs(parts.query, keep_blank_values=True)
    if unknown := sorted(options.keys() - set(OPTIONS)):
        raise ConfigError(f"unknown in {url}: {', '.join(unknown)} (known: {', '.join(OPTIONS)})")
    if not parts.netloc or "@" in parts.netloc or parts.fragment:
        raise ConfigError(f"{url} is not s3://BUCKET/PREFIX")
    chosen = {name: values[-1] for name, values in options.items()}
    for name in ("endpoint", "public"):
        if name in chosen and not re.match(r"https?://[^/]", chosen[name]):
            raise ConfigError(f"the {name} in {url} is not http://HOST or https://HOST")
    return S3Chunks(parts.netloc, parts.path.strip("/"), **chosen)


class S3Chunks:
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
        name = name or name_of(data)
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
            raise CorruptFileError(f"chunk {name} in {self} was altered: it is longer than a chunk")
        return verified(data, name, self)

    def has(self, names: Iterable[str]) -> set[str]:
        unique = list(set(names))
        with ThreadPoolExecutor(max(1, min(REQUESTS, len(unique)))) as pool:
            sizes = pool.map(lambda name: self._size(place_of(name)), unique)
            return {name for name, size in zip(unique, sizes, strict=True) if size is not None}

    def delete(self, name: str) -> None:
        self._delete([place_of(name)])

    def stored(self) -> Iterator[tuple[str, float]]:
        for path, changed in self._list(None):
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
        # The uploader can still change the object through its URL. What is checked is a copy that
        # no URL reaches.
        copy = f"{uploaded}-{secrets.token_hex(16)}"
        try:
            return uploaded_size == size <= CHUNK_BYTES and self._admit(uploaded, copy, name, size)
        finally:
            self._delete([uploaded, copy])

    def clear_quarantine(self, upload: str) -> None:
        _check_upload(upload)
        self._delete([path for path, _ in self._list(f"quarantine/{upload}")])

    def clear_leftovers(self, before: float) -> None:
        listed = self._list("quarantine")
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
        """An object's bytes; None, without reading it, if there are more than `most`."""
        with self._errors(name):
            result = self._store.get(path)
            return bytes(result.bytes()) if result.meta["size"] <= most else None

    def _size(self, path: str) -> int | None:
        try:
            with self._errors(path):
                return self._store.head(path)["size"]
        except NotFoundError:
            return None

    def _list(self, prefix: str | None) -> Iterator[tuple[str, float]]:
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
            raise not_found(name, self) if name else ConfigError(f"no bucket {self}") from None
        except refusals:
            raise ConfigError(
                f"{self} refuses these credentials; see AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY"
            ) from None
        except exceptions.BaseError as error:
            reason = str(error).partition("\n")[0]
            raise UnreachableError(f"the chunk store {self}: {reason}") from None


class _IncomingObject:
    """On disk while it arrives, so that a slow line takes up no memory."""

    def __init__(self, store: S3Chunks) -> None:
        self.size = 0
        self._store = store
        self._arrived = SpooledTemporaryFile(SPOOL_BYTES)  # noqa: SIM115

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._arrived.close()

    def write(self, part: Buffer) -> None:
        check_size(self.size + len(part))
        self.size += len(part)
        with _disk_errors():
            self._arrived.write(part)

    def keep(self, name: str | None = None) -> str:
        with UPLOADS:
            self._arrived.seek(0)
            data = self._arrived.read()
            return self._store.put(data, checked_name(name_of(data), name))


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Chunks pass through temporary files on their way in and out."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{gettempdir()} has no room for a chunk: {error.strerror}") from None


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
