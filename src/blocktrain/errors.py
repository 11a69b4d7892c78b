"""Every exception of the project, each with the exit code the command line leaves with.

    BlocktrainError            1
    ├── ConfigError            2   a setting is unknown, malformed or contradicts another
    │   ├── InviteError        2   an invite is mistyped, cut off or of a newer version
    │   └── RequestError       2   a field of a request is wrong or cannot be honoured
    ├── DataError              3   a corpus is missing, too short or unreadable
    ├── RunError               4   a run directory is missing, incomplete or of another format
    │   └── CorruptFileError   4   a stored file is truncated or altered; the message names it
    ├── DivergedError          5   training kept producing non-finite losses or gradients
    ├── DeviceError            6   the requested device or precision is not available here
    ├── UnreachableError       7   no connection; the message names the address and what to try
    │   └── StalledError       7   the other side is connected but takes nothing
    ├── RefusedError           8   the other side refused; `code` is its word for programs
    ├── ProtocolError          9   the other side sent what the protocol does not allow
    │   ├── UntrustedError     9   the other side is not who it should be: another key, another role
    │   └── FrameError         9   bytes that are no frame, or a frame that is too large
    ├── NotFoundError         10   a blob or a chunk that the store does not hold
    ├── OverloadedError       11   more is asked for than can be answered now; try again
    ├── UnavailableError      12   a part of the model has no stage left that could compute it
    └── CacheError            13   a stage cannot go on with some requests; `requests` names them
        ├── CacheFullError    13   no room for more of them now
        └── MissingPrefixError 13  what comes before is not held (any more): replay from 0

A message is one line, says what is wrong and, where there is one, what to do about it.
"""


class BlocktrainError(Exception):
    exit_code = 1

    @classmethod
    def of_exit_code(cls, code: int) -> type["BlocktrainError"]:
        """The class that leaves with this code: how a child process's error becomes ours."""
        return next((kind for kind in cls.__subclasses__() if kind.exit_code == code), cls)


class ConfigError(BlocktrainError):
    exit_code = 2


class InviteError(ConfigError):
    pass


class RequestError(ConfigError):
    """`field` is the request's field that is wrong, `code` the word for programs."""

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
    """`code` is one of `messages.Refusal`'s errors, `reason` the sentence that goes with it."""

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
    """`seconds` is how long to wait before trying again."""

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
