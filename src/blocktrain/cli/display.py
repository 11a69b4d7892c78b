"""What strangers say, as text that a terminal only shows."""

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from blocktrain.train.checkpoints import Progress
if TYPE_CHECKING:
    from blocktrain.coordinator.service import Service
    from blocktrain.protocol.messages import Event


def plain(text: str) -> str:
    """One line without a character that could command a terminal, or turn what comes after it."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def size(count: float) -> str:
    for unit in UNITS:
        if count < 999.5 or unit == UNITS[-1]:
            break
        count /= 1000
    if unit == "bytes" or count >= 99.95:
        return f"{count:,.0f} {unit}"
    return f"{count:.1f} {unit}"


def duration(seconds: float) -> str:
    if math.isinf(seconds):
        return "never"
    if seconds < 1:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


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


LOOK_SECONDS = 1.0
VERSION_SECONDS = 5.0  # between two lines about versions of the same block
MOST_AT_ONCE = 1000
FINISHED = "the run is finished: blocktrain fetch INVITE --out runs/ours"


class Chronicle:
    """Reads the run's events in a thread of its own, from now on."""

    def __init__(self, service: "Service") -> None:
        self._reports = service.reports
        self._names: dict[str, str] = {}
        self._told_version: dict[int, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="chronicle", daemon=True)

    def __enter__(self) -> None:
        self._after = self._reports.last_event()
        if self._reports.status().state == "finished":
            _tell("done", FINISHED)
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        from sqlalchemy.exc import SQLAlchemyError

        while not self._ended.wait(LOOK_SECONDS):
            try:
                self._look()
            except SQLAlchemyError:
                continue  # a ledger that does not answer is told of by others

    def _look(self) -> None:
        while events := self._reports.events(self._after, MOST_AT_ONCE):
            for event in events:
                self._show(event)
            self._after = events[-1].number

    def _show(self, event: "Event") -> None:
        who, block = self._name(event.worker), f"block {event.block}"
        if event.kind == "joined":
            _tell("joined", who)
        elif event.kind == "merged" and self._is_time_for(event.block):
            _tell(block, event.detail)
        elif event.kind == "returned":
            _tell("back", f"{block} from {who}: {event.detail}")
        elif event.kind == "lost":
            _tell("lost", f"{who} was not heard of; its {event.detail} of {block} go to others")
        elif event.kind == "refused":
            _tell("refused", f"an update of {block} from {who}: {event.detail}")
        elif event.kind == "banned":
            _tell("banned", who)
        elif event.kind == "scored" and event.block is None:
            _tell("score", event.detail)
        elif event.kind == "finished":
            _tell("done", FINISHED)

    def _is_time_for(self, block: int | None) -> bool:
        assert block is not None, "every version is one of a block"
        now = time.monotonic()
        if now - self._told_version.get(block, -VERSION_SECONDS) < VERSION_SECONDS:
            return False
        self._told_version[block] = now
        return True

    def _name(self, worker: str | None) -> str:
        if worker is None:
            return ""
        if worker not in self._names:
            known = self._reports.status().workers
            self._names = {each.worker: f"{each.name} ({each.worker})" for each in known}
        return self._names.get(worker, worker)


def _tell(label: str, text: str) -> None:
    click.echo(f"{label:7s} {plain(text)}")
