"""What commands share at a terminal: harmless text, sizes and durations, and Ctrl-C."""

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import click
from rich import filesize


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
