"""Every exception of the project, each with the exit code of the command line.

    BlocktrainError            1
    ├── ConfigError            2   a setting is unknown, malformed or contradicts another
    │   ├── InviteError        2   an invite is mistyped, truncated or of a newer version
    │   └── RequestError       2   a field of a request is wrong or not supported
    ├── DataError              3   a corpus is missing, too short or unreadable
    ├── RunError               4   a run folder is missing, incomplete or of another format
    │   └── CorruptFileError   4   a stored file is truncated or altered; the message names it
    ├── DivergedError          5   training kept producing non-finite losses or gradients
    ├── DeviceError            6   the requested device or precision is not available here
    ├── UnreachableError       7   no connection to another machine; the message names its address
    │   └── StalledError       7   the other machine is connected but does not read
    ├── RefusedError           8   the other machine refused a request; `code` is for programs
    ├── ProtocolError          9   the other machine sent something that violates the protocol
    │   ├── UntrustedError     9   the other machine has the wrong key or the wrong role
    │   └── FrameError         9   bytes that are not a frame, or a frame that is too large
    ├── NotFoundError         10   the store has no such blob or chunk
    ├── OverloadedError       11   too many requests at once; try again
    ├── UnavailableError      12   no stage is left that computes a part of the model
    └── CacheError            13   a stage cannot continue some requests; `requests` names them
        ├── CacheFullError    13   its cache has no room for them now
        └── MissingPrefixError 13  its cache lacks their beginning: send them from position 0

A message is one line. It says what is wrong and, if possible, what to do next.
"""


class BlocktrainError(Exception):
    exit_code = 1

    @classmethod
    def of_exit_code(cls, code: int) -> type["BlocktrainError"]:
        """The class with this exit code, to raise the error of a child process in this one."""
        return next((kind for kind in cls.__subclasses__() if kind.exit_code == code), cls)


class ConfigError(BlocktrainError):
    exit_code = 2


class InviteError(ConfigError):
    pass


class RequestError(ConfigError):
    """`field` is the request's field that is wrong, `code` the reason for programs."""

    def __init__(self, reason: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(reason)
        self.field = field
        self.code = code


class DataError(BlocktrainError):
    exit_code = 3


class RunError(BlocktrainError):
    exit_code = 4


class CorruptFileError(RunError):
    pass


class DivergedError(BlocktrainError):
    exit_code = 5


class DeviceError(BlocktrainError):
    exit_code = 6


class UnreachableError(BlocktrainError):
    exit_code = 7


class StalledError(UnreachableError):
    pass


class RefusedError(BlocktrainError):
    """`code` is one of the errors of `messages.Refusal`, `reason` a sentence about it."""

    exit_code = 8

    def __init__(self, code: str, reason: str = "") -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason

    def __str__(self) -> str:
        return self.reason or self.code


class ProtocolError(BlocktrainError):
    exit_code = 9


class UntrustedError(ProtocolError):
    pass


class FrameError(ProtocolError):
    pass


class NotFoundError(BlocktrainError):
    exit_code = 10


class OverloadedError(BlocktrainError):
    """`seconds` is the time to wait before the next attempt."""

    exit_code = 11

    def __init__(self, reason: str, seconds: float = 1.0) -> None:
        super().__init__(reason)
        self.seconds = seconds


class UnavailableError(BlocktrainError):
    exit_code = 12


class CacheError(BlocktrainError):
    exit_code = 13

    def __init__(self, message: str, requests: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.requests = requests


class CacheFullError(CacheError):
    pass


class MissingPrefixError(CacheError):
    pass
