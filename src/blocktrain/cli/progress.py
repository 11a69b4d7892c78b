"""Training progress for people (live bars, or a line now and then) and for programs (JSON)."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from blocktrain.train.trainer import Progress

SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def shown(
    title: str, *, as_json: bool = False, err: bool = False
) -> Iterator[Callable[["Progress"], None]]:
    """A callback that shows progress the way the place it goes to can show it.

    `err` sends it to standard error, where standard output is kept for a result.
    """
    if as_json:
        yield lambda progress: click.echo(json.dumps(asdict(progress)))
    elif (sys.stderr if err else sys.stdout).isatty():
        with _bars(title, err) as show:
            yield show
    else:
        yield _lines(title, err)


@contextmanager
def counted(title: str, total: int, *, hidden: bool = False) -> Iterator[Callable[[int], None]]:
    """A callback that moves a bar on, where somebody at a terminal waits; gone when done."""
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
                tasks[progress.block],
                completed=progress.step,
                numbers=_numbers(progress),
            )

        yield show


def _lines(title: str, err: bool) -> Callable[["Progress"], None]:
    last: dict[int, float] = {}

    def show(progress: "Progress") -> None:
        now = time.monotonic()
        if progress.step < progress.steps and now - last.get(progress.block, 0.0) < (
            SECONDS_BETWEEN_LINES
        ):
            return
        last[progress.block] = now
        line = f"{title} {progress.block}  {progress.step}/{progress.steps}"
        click.echo(f"{line}  {_numbers(progress)}", err=err)

    return show


def _numbers(progress: "Progress") -> str:
    left = int(progress.seconds_left)
    parts = [
        "loss -" if progress.loss is None else f"loss {progress.loss:.3f}",
        "ce -" if progress.ce is None else f"ce {progress.ce:.3f}",
        f"{progress.bytes_per_s / 1e3:,.0f} kB/s",
        "done" if progress.step == progress.steps else f"{left // 60}:{left % 60:02d} left",
    ]
    if progress.valid_ce is not None:
        parts.append(f"valid {progress.valid_ce:.3f}")
    if progress.skipped:
        parts.append(f"{progress.skipped} skipped")
    return "  ".join(parts)
