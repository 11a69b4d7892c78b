"""blocktrain status: how a run stands, once or live."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import click

from blocktrain.cli import options
from blocktrain.cli.display import plain, size
from blocktrain.cli.options import caller

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

    from blocktrain.protocol.messages import Status

SECONDS_BETWEEN = 2.0
FRAME_ROWS = 5  # of a table: title, header, borders
LEAST_ROWS = 3  # of a table that is not shown whole
BORDER, BORDER_OF_COLUMN = 1, 3
LEAST_NAME = 8
# Whoever is there comes first: a short screen shows no more.
STATES = ("training", "waiting", "lost", "away", "banned")


@click.command("status")
@options.invite
@click.option("--watch", is_flag=True, help="Go on showing it until Ctrl-C.")
@options.as_json
def status_command(invite: str, watch: bool, as_json: bool) -> None:
    """Show the blocks and workers of the run that INVITE belongs to."""
    from rich.console import Console
    from rich.live import Live

    client, console = caller(invite), Console()
    if as_json:
        while True:
            click.echo(client.status().model_dump_json())
            if not watch:
                return
            time.sleep(SECONDS_BETWEEN)
    if not watch:
        console.print(_shown(client.status(), console, rows=None))
        return
    try:
        status = client.status()
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(_shown(status, console, console.height - 1), refresh=True)
                time.sleep(SECONDS_BETWEEN)
                status = client.status()
    except KeyboardInterrupt:
        return


@dataclass(frozen=True)
class _Columns:
    """A table's content. Where it is too wide, columns in `spared` go, in that order; none of the
    others is ever cut, but for a name."""

    title: str
    names: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    left: tuple[str, ...] = ()  # aligned so; the others are numbers
    spared: tuple[str, ...] = ()

    def table(self, console: "Console", most_rows: int | None) -> "Table":
        shown, more = self.rows, 0
        if most_rows is not None and len(shown) > most_rows:
            shown = shown[: max(most_rows - 1, 0)]
            more = len(self.rows) - len(shown)
        return self._table(shown, more, self._fitting(console.width))

    def _fitting(self, width: int) -> list[str]:
        kept, spared = list(self.names), list(self.spared)
        while spared and BORDER + sum(BORDER_OF_COLUMN + self._least(n) for n in kept) > width:
            kept.remove(spared.pop(0))
        return kept

    def _least(self, name: str) -> int:
        index = self.names.index(name)
        widest = max((len(row[index]) for row in self.rows), default=0)
        return max(len(name), min(widest, LEAST_NAME) if name == "name" else widest)

    def _table(self, rows: Sequence[tuple[str, ...]], more: int, kept: list[str]) -> "Table":
        from rich.table import Table

        caption = f"and {more} more" if more else None
        table = Table(title=self.title, title_justify="left", caption=caption)
        for name in kept:
            justify: Literal["left", "right"] = "left" if name in self.left else "right"
            width = None if name == "name" else self._least(name)
            table.add_column(name, justify=justify, no_wrap=name != "name", min_width=width)
        for row in rows:
            cells = dict(zip(self.names, row, strict=True))
            table.add_row(*(_cell(cells[name]) for name in kept))
        return table


def _shown(status: "Status", console: "Console", rows: int | None) -> "Group":
    """All of it, or as many whole tables and rows as there is room for."""
    from rich.console import Group
    from rich.text import Text

    score = f"CE {status.ce:.4f}" if status.ce is not None else f"CE: {plain(status.ce_note)}"
    how_long = "after" if status.state == "finished" else "for"
    head = Text(f"run {status.run}: {status.state} {how_long} {_duration(status.seconds)}; {score}")
    parts: list[Text | Table] = [head]
    left = None if rows is None else rows - len(head.wrap(console, console.width))
    for columns in (_blocks(status), _workers(status), _moved(status)):
        room = None if left is None else left - FRAME_ROWS
        if room is not None and room < min(len(columns.rows), LEAST_ROWS):
            break
        table = columns.table(console, room)
        parts.append(table)
        if left is not None:
            left -= FRAME_ROWS + table.row_count + bool(table.caption)
    return Group(*parts)


def _blocks(status: "Status") -> _Columns:
    rows = [
        (
            str(block.index),
            str(block.version),
            "-" if block.ce is None else f"{block.ce:.4f}",
            size(block.bytes_trained),
            f"{100 * block.progress:.1f}%",
            str(block.replicas),
            "-" if block.participation is None else f"{100 * block.participation:.0f}%",
        )
        for block in status.blocks
    ]
    names = ("block", "version", "CE", "trained", "done", "workers", "in time")
    return _Columns("blocks", names, rows, spared=("in time", "trained"))


def _workers(status: "Status") -> _Columns:
    rows = [
        (
            worker.worker,
            worker.name,
            worker.device,
            worker.state,
            "-" if worker.block is None else str(worker.block),
            str(worker.updates),
            size(worker.bytes_trained),
            f"{_age(worker.seconds_since_seen)} ago",
        )
        for worker in sorted(status.workers, key=lambda worker: STATES.index(worker.state))
    ]
    names = ("worker", "name", "device", "state", "block", "updates", "trained", "seen")
    return _Columns(
        "workers",
        names,
        rows,
        left=("worker", "name", "device", "state", "block", "seen"),
        spared=("device", "trained", "updates", "seen", "block"),
    )


def _moved(status: "Status") -> _Columns:
    """Bytes, and how many times as much they would have been whole, in fp32."""
    names = [worker.name for worker in status.workers]
    named = [(f"block {block.index}", block.moved) for block in status.blocks]
    named += [
        (worker.name if names.count(worker.name) == 1 else worker.worker, worker.moved)
        for worker in status.workers
    ]
    rows = []
    for name, moved in named:
        ways = (moved.up, moved.down_whole, moved.down_differences)
        smaller = (moved.up_raw + moved.down_raw) / max(sum(ways), 1)
        rows.append((name, *map(size, ways), f"{smaller:.1f}" if sum(ways) else "-"))
    columns = ("name", "up", "down whole", "as differences", "smaller by")
    title = f"moved, codec {status.codec}"
    return _Columns(title, columns, rows, left=("name",), spared=("smaller by",))


def _cell(text: str) -> "Text":
    """Nothing that others call themselves counts as markup."""
    from rich.text import Text

    return Text(plain(text), overflow="ellipsis", no_wrap=True)


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
