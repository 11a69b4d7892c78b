"""What a terminal shows: text from elsewhere made harmless, sizes, Ctrl-C, training progress."""

import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING

import click
from rich import filesize

if TYPE_CHECKING:
    from blocktrain.train.checkpoints import Progress


def plain(text: str) -> str:
    """One line of text from another machine, without characters that control a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def size(count: float) -> str:
    """Bytes with about three digits and a unit: 1.2 kB, 99.9 MB, 123 GB."""
    text = filesize.decimal(round(count), precision=1)
    return (
        text if len(text.split()[0]) <= len("99.9") else filesize.decimal(round(count), precision=0)
    )


def duration(seconds: float) -> str:
    if math.isinf(seconds):
        return "never"
    if seconds < 1:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def show_retry(reason: str, seconds: float) -> None:
    """Tell the user that a request failed and will be repeated for this long."""
    how_long = "" if math.isinf(seconds) else f" for {seconds:.0f} s"
    click.echo(f"{plain(reason)}; trying again{how_long}", err=True)


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C or SIGTERM asked the command to stop. A second Ctrl-C stops it at once."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in received:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def training_progress(
    title: str, *, as_json: bool = False, err: bool = False
) -> Iterator[Callable[["Progress"], None]]:
    """A function that shows the progress of training. With `err` it writes to standard error,
    because standard output is for a result."""
    if as_json:
        yield lambda progress: click.echo(json.dumps(asdict(progress)))
    elif (sys.stderr if err else sys.stdout).isatty():
        with _bars(title, err) as show:
            yield show
    else:
        yield _lines(title, err)


@contextmanager
def progress_bar(
    title: str, total: int, *, hidden: bool = False
) -> Iterator[Callable[[int], None]]:
    """A function that advances a bar. The bar is on standard error, if that is a terminal, and
    disappears at the end."""
    from rich import progress as bars
    from rich.console import Console

    columns = [*bars.Progress.get_default_columns(), bars.MofNCompleteColumn()]
    with bars.Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        disable=hidden or not sys.stderr.isatty(),
    ) as display:
        task = display.add_task(title, total=total)
        yield lambda more: display.advance(task, more)


@contextmanager
def _bars(title: str, err: bool) -> Iterator[Callable[["Progress"], None]]:
    from rich import progress as bars
    from rich.console import Console

    columns = [
        bars.TextColumn("{task.description}"),
        bars.BarColumn(bar_width=24),
        bars.TextColumn("{task.completed:>5.0f}/{task.total:.0f}"),
        bars.TextColumn("{task.fields[numbers]}"),
    ]
    with bars.Progress(*columns, console=Console(stderr=err)) as display:
        tasks: dict[int, bars.TaskID] = {}

        def show(progress: "Progress") -> None:
            if progress.block not in tasks:
                tasks[progress.block] = display.add_task(
                    f"{title} {progress.block}", total=progress.steps, numbers=""
                )
            display.update(
                tasks[progress.block], completed=progress.step, numbers=_numbers(progress)
            )

        yield show


def _lines(title: str, err: bool) -> Callable[["Progress"], None]:
    """A line for each block every ten seconds, and one when the block is done."""
    last: dict[int, float] = {}

    def show(progress: "Progress") -> None:
        now = time.monotonic()
        is_recent = now - last.get(progress.block, -SECONDS_BETWEEN_LINES) < SECONDS_BETWEEN_LINES
        if is_recent and progress.step < progress.steps:
            return
        last[progress.block] = now
        line = f"{title} {progress.block}  {progress.step}/{progress.steps}"
        click.echo(f"{line}  {_numbers(progress)}", err=err)

    return show


def _numbers(progress: "Progress") -> str:
    left = timedelta(seconds=int(progress.seconds_left))
    parts = [
        "loss -" if progress.loss is None else f"loss {progress.loss:.3f}",
        "ce -" if progress.ce is None else f"ce {progress.ce:.3f}",
        f"{progress.bytes_per_s / 1e3:,.0f} kB/s",
        "done" if progress.step == progress.steps else f"{left} left",
    ]
    if progress.valid_ce is not None:
        parts.append(f"valid {progress.valid_ce:.3f}")
    if progress.skipped:
        parts.append(f"{progress.skipped} skipped")
    return "  ".join(parts)
