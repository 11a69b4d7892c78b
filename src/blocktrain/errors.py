"""All exceptions of the project, each with the exit code of the command line.

docs/REFERENCE.md lists them with their docstrings. A message is one line. It says what is wrong
and, if possible, what to do next.
"""

import difflib
from collections.abc import Iterable


def closest_match(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that a mistyped word resembles most; None if none is close."""
    nearest = difflib.get_close_matches(word, list(candidates), n=1)
    return nearest[0] if nearest else None


class BlocktrainError(Exception):
    """The base of all errors below. Raised as such for an error that none of them covers."""

    exit_code = 1

    @classmethod
    def of_exit_code(cls, code: int) -> type["BlocktrainError"]:
        """The class with this exit code, to raise a child process's error in its parent."""
        return next((kind for kind in cls.__subclasses__() if kind.exit_code == code), cls)


class ConfigError(BlocktrainError):
    """A setting is unknown, malformed or contradicts another."""

    exit_code = 2


class InviteError(ConfigError):
    """An invite is mistyped, truncated or from a newer release."""


class RequestError(ConfigError):
    """A field of a request is wrong or not supported."""

    def __init__(self, reason: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(reason)
        self.field, self.code = field, code  # the code is machine-readable


class DataError(BlocktrainError):
    """A corpus is missing, too short or unreadable."""

    exit_code = 3


class DownloadError(DataError):
    """A download from a hub failed; the same command continues it."""


class RunError(BlocktrainError):
    """A run folder is missing, incomplete or in another format."""

    exit_code = 4


class CorruptFileError(RunError):
    """A stored file is truncated or altered; the message names it."""


class DivergedError(BlocktrainError):
    """Training kept producing non-finite losses or gradients, or a merge produced non-finite
    weights."""

    exit_code = 5


class DeviceError(BlocktrainError):
    """The requested device or precision is not available on this machine."""

    exit_code = 6


class UnreachableError(BlocktrainError):
    """Another machine cannot be reached; the message names its address."""

    exit_code = 7


class StalledError(UnreachableError):
    """The other machine is connected but does not read what it is sent."""


class RefusedError(BlocktrainError):
    """The other machine refused a request; `code`, one of `messages.Refusal`, says why."""

    exit_code = 8

    def __init__(self, code: str, reason: str = "") -> None:
        super().__init__(code, reason)
        self.code, self.reason = code, reason

    def __str__(self) -> str:
        return self.reason or self.code


class ProtocolError(BlocktrainError):
    """The other machine sent something that violates the protocol."""

    exit_code = 9


class UntrustedError(ProtocolError):
    """The other machine has the wrong key or the wrong role."""


class FrameError(ProtocolError):
    """The other machine sent bytes that are not a frame, or a frame that is too large."""


class NotFoundError(BlocktrainError):
    """The store has no such blob or chunk, or the ledger no such run, block or version."""

    exit_code = 10


class MissingChunkError(NotFoundError):
    """The store has no such chunk. The message names the store, which other machines need not
    know."""

    def __init__(self, chunk: str, reason: str) -> None:
        super().__init__(reason)
        self.chunk = chunk


class OverloadedError(BlocktrainError):
    """Too many requests at once; try again after `seconds`."""

    exit_code = 11

    def __init__(self, reason: str, seconds: float = 1.0) -> None:
        super().__init__(reason)
        self.seconds = seconds


class UnavailableError(BlocktrainError):
    """No working stage is left for a part of the model."""

    exit_code = 12


class CacheError(BlocktrainError):
    """A stage cannot continue the generation requests in `requests`."""

    exit_code = 13

    def __init__(self, message: str, requests: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.requests = requests


class CacheFullError(CacheError):
    """The stage's cache has no room for the requests now."""


class MissingPrefixError(CacheError):
    """The stage's cache lacks the requests' beginning; send them again from position 0."""
