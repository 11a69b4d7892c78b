"""The progress of a command: bars on a terminal, lines in a log file, JSON for programs."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from blocktrain.train.checkpoints import Progress

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
