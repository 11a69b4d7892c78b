"""Log lines of long-running commands: one line each on standard error, as text or as JSON.

A module logs with `logging.getLogger(__name__)`, and passes a lease or a request as a field:
`log.info("...", extra={"lease": lease})`. Which level and format a command has is decided here.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

from blocktrain.cli.terminal import plain

LEVELS = ("debug", "info", "warning", "error")
# The last one is what uvicorn adds.
NO_FIELDS = {*vars(logging.makeLogRecord({})), "message", "asctime", "color_message"}


def configure(level: str, format: str) -> None:
    """Log the records of blocktrain from this level on.

    Libraries log what they do at info, so theirs are shown at info only when blocktrain's are shown
    at debug. One of those is uvicorn's line for each request."""
    handler = StderrHandler()
    handler.setFormatter(FORMATTERS[format]())
    others = logging.INFO if level == "debug" else logging.WARNING
    logging.basicConfig(level=others, handlers=[handler], force=True)
    logging.getLogger("blocktrain").setLevel(level.upper())


class TextFormatter(logging.Formatter):
    """2026-01-31T12:00:00.000Z INFO blocktrain.serve.http.app: GET /health: 200 request=r-1"""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        message = f"{record.levelname} {record.name}: {record.getMessage()}{fields}"
        lines = [f"{_time(record)} {message}".strip(), *_traceback(self, record)]
        return "\n".join(map(plain, lines))


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line = {**line, **_fields(record), **line}  # a field cannot replace one of these
        if traceback := _traceback(self, record):
            line["traceback"] = "\n".join(traceback)
        return json.dumps(line, default=str)


FORMATTERS = {"text": TextFormatter, "json": JsonFormatter}


class StderrHandler(logging.Handler):
    """Writes to standard error as it is now: while rich shows a bar or a status on this terminal,
    it has replaced `sys.stderr` such that lines appear above them."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            stream = self._stream()
            stream.write(self.format(record) + "\n")
            stream.flush()
        except Exception:
            self.handleError(record)

    def _stream(self) -> TextIO:
        replaced: TextIO | None = getattr(sys.stderr, "rich_proxied_file", None)
        # rich's bar is on standard output; standard error may go to a file all the same.
        return replaced if replaced and not replaced.isatty() else sys.stderr


def _time(record: logging.LogRecord) -> str:
    time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    return time.replace("+00:00", "Z")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """What the caller passed as `extra`."""
    return {name: value for name, value in vars(record).items() if name not in NO_FIELDS}


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    parts = [formatter.formatException(record.exc_info)] if record.exc_info else []
    parts += [record.stack_info] if record.stack_info else []
    return [line for part in parts for line in part.splitlines()]
