"""Every exception of the project, each with the exit code the command line leaves with.

    BlocktrainError            1
    ├── ConfigError            2   a setting is unknown, malformed or contradicts another
    ├── DataError              3   a corpus is missing, too short or unreadable
    ├── RunError               4   a run directory is missing, incomplete or of another format
    │   └── CorruptFileError   4   a stored file is truncated or altered; the message names it
    ├── DivergedError          5   training kept producing non-finite losses or gradients
    └── DeviceError            6   the requested device or precision is not available here

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
