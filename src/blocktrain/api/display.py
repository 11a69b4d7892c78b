"""Progress bars, in a notebook or on a terminal, and Ctrl-C as a request to stop.

Without either, bars show nothing. Notebooks need no widgets: a table is drawn again.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

SECONDS_BETWEEN_DRAWINGS = 0.25  # in a notebook
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP")
                if hasattr(signal, name)]  # fmt: skip


class Bar(NamedTuple):
    done: float
    total: float
    note: str


Show = Callable[[str, Bar], None]  # the bar's title, and what it shows now


@contextmanager
def bars(console: "Console | None" = None, *, hidden: bool = False) -> Iterator[Show]:
    """A function that shows one bar per title."""
    if hidden:
        yield lambda title, bar: None
    elif notebook := _notebook():
        table = _Table(notebook)
        try:
            yield table.show
        finally:
            table.draw()
    else:
        with _terminal_bars(console) as show:
            yield show


@contextmanager
def progress_bar(
    title: str, total: int, *, hidden: bool = False, of_bytes: bool = False
) -> Iterator[Callable[[int], None]]:
    """A function that advances one bar, in a notebook or on standard error; on a terminal it
    disappears at the end."""
    if not hidden and (notebook := _notebook()):
        table, done = _Table(notebook), 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            table.show(title, Bar(done, total, "bytes" if of_bytes else ""))

        yield advance
        table.draw()
        return
    from rich import progress
    from rich.console import Console

    count = progress.DownloadColumn() if of_bytes else progress.MofNCompleteColumn()
    columns = [*progress.Progress.get_default_columns(), count]
    with progress.Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        disable=hidden or not sys.stderr.isatty(),
    ) as display:
        task = display.add_task(title, total=total)
        yield lambda more: display.advance(task, more)


def _notebook() -> Any:
    """IPython's display function; None outside a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if not hasattr(shell, "kernel"):
        return None
    from IPython.display import display

    return display


class _Table:
    """Bars as an HTML table in a notebook, drawn a few times a second at most."""

    def __init__(self, display: Any) -> None:
        self._bars: dict[str, Bar] = {}
        self._drawn_at = time.monotonic()
        self._handle = display(self._drawing(), raw=True, display_id=True)

    def show(self, title: str, bar: Bar) -> None:
        self._bars[title] = bar
        if time.monotonic() - self._drawn_at >= SECONDS_BETWEEN_DRAWINGS:
            self.draw()

    def draw(self) -> None:
        self._drawn_at = time.monotonic()
        self._handle.update(self._drawing(), raw=True)

    def _drawing(self) -> dict[str, str]:
        rows = [
            f"<tr><td>{escape(title)}</td><td><progress value='{bar.done:g}' max='{bar.total:g}'>"
            f"</progress></td><td>{bar.done:.0f}/{bar.total:.0f}</td><td>{escape(bar.note)}</td></tr>"
            for title, bar in self._bars.items()
        ]
        lines = [
            f"{title}  {b.done:.0f}/{b.total:.0f}  {b.note}" for title, b in self._bars.items()
        ]
        return {"text/html": f"<table>{''.join(rows)}</table>", "text/plain": "\n".join(lines)}


@contextmanager
def _terminal_bars(console: "Console | None") -> Iterator[Show]:
    from rich import progress
    from rich.console import Console

    console = console or Console()
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=24),
        progress.TextColumn("{task.completed:>5.0f}/{task.total:.0f}"),
        progress.TextColumn("{task.fields[note]}"),
    )
    with progress.Progress(*columns, console=console, disable=not console.is_terminal) as display:
        tasks: dict[str, TaskID] = {}

        def show(title: str, bar: Bar) -> None:
            if title not in tasks:
                tasks[title] = display.add_task(title, total=bar.total, note="")
            display.update(tasks[title], completed=bar.done, note=bar.note)

        yield show


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """A function that tells whether Ctrl-C, SIGTERM or SIGHUP was received. A second Ctrl-C stops
    the program at once. Signals that are ignored, as under nohup, stay ignored."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # which alone handles signals
        yield lambda: False
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in received:
            raise KeyboardInterrupt
        received.append(number)

    heeded = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in heeded}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
