"""Terminal output: sanitized text, sizes, training progress and logging."""

import json
import logging
import math
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click
from rich import filesize

from blocktrain.api.display import Bar, bars

if TYPE_CHECKING:
    from blocktrain.config import Config
    from blocktrain.training.checkpoints import Progress

SECONDS_BETWEEN_LINES = 10.0
WIDE = 140  # columns of a terminal with room for all units beside a bar
LOG_LEVELS = ("debug", "info", "warning", "error")
# Attributes of every record; uvicorn adds the last one.
NO_FIELDS = {*vars(logging.makeLogRecord({})), "message", "asctime", "color_message"}


def plain(text: str) -> str:
    """One line of text from another machine, without terminal control characters."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def command(*words: object) -> str:
    """A command line of blocktrain that works in the user's shell: with the path by which this
    process was started, unless the shell finds the same program by its name."""
    return " ".join([_program(), *(shlex.quote(str(word)) for word in words)])


def _program() -> str:
    script, found = Path(sys.argv[0]), shutil.which("blocktrain")
    if not script.exists() or (found and script.samefile(found)):
        return "blocktrain"
    if script.suffix != ".py":
        return shlex.quote(str(script))
    return f"{shlex.quote(sys.executable)} -m blocktrain"


def echo_words(text: str, indent: int = 0) -> None:
    """Print a line. On a terminal it is broken between words, and continues after an indent."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    lines = textwrap.wrap(text, width, subsequent_indent=" " * indent, break_on_hyphens=False)
    click.echo("\n".join(lines) or text)


def open_page(address: str) -> None:
    """Open a page in the user's browser; without a browser, print its address."""
    import webbrowser

    if not webbrowser.open(address):
        click.echo(f"found no browser; open {address}", err=True)


def size(count: float) -> str:
    """Bytes with about three digits and a unit: 1.2 kB, 99.9 MB, 123 GB."""
    text = filesize.decimal(round(count), precision=1)
    has_four_digits = len(text.split()[0]) > len("99.9")
    return filesize.decimal(round(count), precision=0) if has_four_digits else text


def duration(seconds: float) -> str:
    if math.isinf(seconds):
        return "never"
    if seconds < 1:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def compute(config: "Config", steps: Sequence[int] | None = None) -> str:
    """The arithmetic of all workers together, beside that of end-to-end training. `steps`: those
    that each block has made so far."""
    from blocktrain.config.compute import end_to_end_steps, total_flops

    planned = total_flops(config)
    like = end_to_end_steps(config)
    relative = like / config.train.steps
    so_far = f"{total_flops(config, steps):.3g} of " if steps is not None else ""
    return f"{so_far}{planned:.3g} FLOP, as much as {like:,.0f} steps end to end ({relative:.2f} x)"


def show_retry(reason: str, seconds: float) -> None:
    """Tell the user that a request failed, and for how long it is retried."""
    how_long = "" if math.isinf(seconds) else f" for {seconds:.0f} s"
    click.echo(f"{plain(reason)}; retrying{how_long}", err=True)


@contextmanager
def training_progress(
    title: str, *, as_json: bool = False, err: bool = False
) -> Iterator[Callable[["Progress"], None]]:
    """A function that shows training progress, with `err` on standard error, which keeps standard
    output for the result."""
    if as_json:
        yield lambda progress: click.echo(json.dumps(asdict(progress)))
    elif (sys.stderr if err else sys.stdout).isatty():
        with _bars(title, err) as show:
            yield show
    else:
        yield _lines(title, err)


@contextmanager
def tokenising_progress(*, hidden: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A function that shows how many bytes of a source's files were read and tokenised, on standard
    error: a bar, which disappears at the end, or without a terminal a line every ten seconds."""
    if hidden or not sys.stderr.isatty():
        yield _tokenising_lines(hidden)
        return
    from rich import progress
    from rich.console import Console

    columns = [*progress.Progress.get_default_columns(), progress.DownloadColumn()]
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as display:
        task = display.add_task("tokenising", total=None, visible=False)
        yield lambda done, total: display.update(task, completed=done, total=total, visible=True)


def _tokenising_lines(hidden: bool) -> Callable[[int, int], None]:
    last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        if not hidden and time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            click.echo(f"tokenising: {size(done)} of {size(total)}", err=True)

    return show


@contextmanager
def _bars(title: str, err: bool) -> Iterator[Callable[["Progress"], None]]:
    from rich.console import Console

    console = Console(stderr=err)
    with bars(console) as show:

        def show_progress(progress: "Progress") -> None:
            numbers = _numbers(progress, in_all_units=console.width >= WIDE)
            show(f"{title} {progress.block}", Bar(progress.step, progress.steps, numbers))

        yield show_progress


def _lines(title: str, err: bool) -> Callable[["Progress"], None]:
    """One line per block every ten seconds, and when it is done."""
    last: dict[int, float] = {}

    def show(progress: "Progress") -> None:
        now = time.monotonic()
        is_recent = now - last.get(progress.block, -SECONDS_BETWEEN_LINES) < SECONDS_BETWEEN_LINES
        if is_recent and progress.step < progress.steps:
            return
        last[progress.block] = now
        line = f"{title} {progress.block}  {progress.step}/{progress.steps}"
        click.echo(f"{line}  {_numbers(progress, in_all_units=True)}", err=err)

    return show


def score(ce: float, bytes_per_token: float) -> str:
    """A cross entropy per byte, and in other units. Those per token are approximate: the average
    length of the run's tokens stands for that of the text that was scored."""
    tokens = f", about {ce * bytes_per_token:.3f} nats/token" if bytes_per_token != 1.0 else ""
    return f"{ce:.4f} nats/byte ({ce / math.log(2):.4f} bits/byte{tokens})"


def _numbers(progress: "Progress", *, in_all_units: bool) -> str:
    left = timedelta(seconds=int(progress.seconds_left))

    def shown(ce: float) -> str:
        return score(ce, progress.bytes_per_token) if in_all_units else f"{ce:.3f}/byte"

    parts = [] if progress.loss is None else [f"loss {progress.loss:.3f}"]
    parts += [] if progress.ce is None else [f"ce {shown(progress.ce)}"]
    parts.append(f"{progress.bytes_per_s / 1e3:,.0f} kB/s")
    parts.append("done" if progress.step == progress.steps else f"{left} left")
    if progress.valid_ce is not None:
        parts.append(f"valid {shown(progress.valid_ce)}")
    if progress.skipped:
        parts.append(f"{progress.skipped} steps skipped")
    return "  ".join(parts)


def configure_logging(level: str, format: str) -> None:
    """Log records of blocktrain at this level and above, one line each, as text (shorter on a
    terminal, except at level debug) or as JSON.

    A module passes a lease or a request as a field: `log.info("...", extra={"lease": lease})`.
    Libraries log routine work at info, such as uvicorn every request, so their info records are
    shown only at level debug.
    """
    handler = StderrHandler()
    is_watched = format == "text" and sys.stderr.isatty() and level != "debug"
    handler.setFormatter(TerminalFormatter() if is_watched else LOG_FORMATTERS[format]())
    others = logging.INFO if level == "debug" else logging.WARNING
    logging.basicConfig(level=others, handlers=[handler], force=True)
    logging.getLogger("blocktrain").setLevel(level.upper())


class TextFormatter(logging.Formatter):
    """Formats records like this one:

    2026-01-31T12:00:00.000Z INFO blocktrain.serve.http.http_server: GET /: 200 request=r-1
    """

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        message = f"{record.levelname} {record.name}: {record.getMessage()}{fields}"
        lines = [f"{_time(record)} {message}".strip(), *_traceback(self, record)]
        return "\n".join(map(plain, lines))


class TerminalFormatter(logging.Formatter):
    """Formats records for somebody who watches: the local time, and fields only of warnings:

    12:00:00 worker ann joined
    """

    def format(self, record: logging.LogRecord) -> str:
        time, message = datetime.fromtimestamp(record.created), record.getMessage()
        if record.levelno > logging.INFO:
            fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
            message = f"{record.levelname.lower()}: {message}{fields}"
        return "\n".join(map(plain, [f"{time:%H:%M:%S} {message}", *_traceback(self, record)]))


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        level, message = record.levelname.lower(), record.getMessage()
        line = {"time": _time(record), "level": level, "logger": record.name, "message": message}
        line = {**line, **_fields(record), **line}  # a field cannot override these
        if traceback := _traceback(self, record):
            line["traceback"] = "\n".join(traceback)
        return json.dumps(line, default=str)


LOG_FORMATTERS = {"text": TextFormatter, "json": JsonFormatter}


class StderrHandler(logging.Handler):
    """Writes to the current `sys.stderr`. While rich shows a bar or a status, rich replaces that
    stream, so that log lines appear above the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            stream = self._stream()
            stream.write(self.format(record) + "\n")
            stream.flush()
        except Exception:
            self.handleError(record)

    def _stream(self) -> TextIO:
        replaced: TextIO | None = getattr(sys.stderr, "rich_proxied_file", None)
        # rich's bar may be on standard output while standard error goes to a file.
        return replaced if replaced and not replaced.isatty() else sys.stderr


def _time(record: logging.LogRecord) -> str:
    time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    return time.replace("+00:00", "Z")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """The fields passed as `extra`."""
    return {name: value for name, value in vars(record).items() if name not in NO_FIELDS}


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    return formatter.formatException(record.exc_info).splitlines() if record.exc_info else []
