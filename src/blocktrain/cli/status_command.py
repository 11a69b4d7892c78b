"""blocktrain status: the blocks and workers of a run, once or live."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import click

from blocktrain.cli import options
from blocktrain.cli.options import client_of
from blocktrain.cli.terminal import plain, size

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

    from blocktrain.protocol.messages import Status

REFRESH_SECONDS = 2.0
FRAME_ROWS = 5  # of a table: its title, header and borders
LEAST_ROWS = 3  # of a table that does not fit whole; with room for fewer it is left out
BORDER, COLUMN_BORDER = 1, 3
LEAST_NAME = 8  # letters of a worker's name
# Active workers first, because a short screen shows only those.
STATES = ("training", "waiting", "lost", "away", "banned")


@click.command("status")
@options.invite
@click.option("--watch", is_flag=True, help="Refresh until Ctrl-C.")
@options.as_json
def status_command(invite: str, watch: bool, as_json: bool) -> None:
    """Show the blocks and workers of the run of INVITE."""
    from rich.console import Console
    from rich.live import Live

    client, console = client_of(invite), Console()
    if as_json:
        while True:
            click.echo(client.status().model_dump_json())
            if not watch:
                return
            time.sleep(REFRESH_SECONDS)
    if not watch:
        console.print(_render(client.status(), console, rows=None))
        return
    try:
        status = client.status()
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(_render(status, console, console.height - 1), refresh=True)
                time.sleep(REFRESH_SECONDS)
                status = client.status()
    except KeyboardInterrupt:
        return


@dataclass(frozen=True)
class _Columns:
    """The content of a table. If it is too wide, the columns in `optional` are left out, in that
    order. The other columns are never cut, except for names."""

    title: str
    names: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    left: tuple[str, ...] = ()  # aligned to the left; the others are numbers
    optional: tuple[str, ...] = ()

    def table(self, console: "Console", most_rows: int | None) -> "Table":
        rows, more = self.rows, 0
        if most_rows is not None and len(rows) > most_rows:
            rows = rows[: max(most_rows - 1, 0)]
            more = len(self.rows) - len(rows)
        return self._table(rows, more, self._fitting(console.width))

    def _fitting(self, width: int) -> list[str]:
        """The columns that fit."""
        names, optional = list(self.names), list(self.optional)
        while optional and BORDER + sum(COLUMN_BORDER + self._width(n) for n in names) > width:
            names.remove(optional.pop(0))
        return names

    def _width(self, name: str) -> int:
        index = self.names.index(name)
        widest = max((len(row[index]) for row in self.rows), default=0)
        return max(len(name), min(widest, LEAST_NAME) if name == "name" else widest)

    def _table(self, rows: Sequence[tuple[str, ...]], more: int, names: list[str]) -> "Table":
        from rich.table import Table

        caption = f"and {more} more" if more else None
        table = Table(title=self.title, title_justify="left", caption=caption)
        for name in names:
            justify: Literal["left", "right"] = "left" if name in self.left else "right"
            width = None if name == "name" else self._width(name)
            table.add_column(name, justify=justify, no_wrap=name != "name", min_width=width)
        for row in rows:
            cells = dict(zip(self.names, row, strict=True))
            table.add_row(*(_cell(cells[name]) for name in names))
        return table


def _render(status: "Status", console: "Console", rows: int | None) -> "Group":
    """Everything, or the tables and rows that fit into this many terminal rows."""
    from rich.console import Group
    from rich.text import Text

    score = f"CE {status.ce:.4f}" if status.ce is not None else f"CE: {plain(status.ce_note)}"
    since = "after" if status.state == "finished" else "for"
    age = timedelta(seconds=int(status.seconds))
    head = Text(f"run {status.run}: {status.state} {since} {age}; {score}")
    parts: list[Text | Table] = [head]
    free = None if rows is None else rows - len(head.wrap(console, console.width))
    for columns in (_blocks(status), _workers(status), _traffic(status)):
        room = None if free is None else free - FRAME_ROWS
        if room is not None and room < min(len(columns.rows), LEAST_ROWS):
            break
        table = columns.table(console, room)
        parts.append(table)
        if free is not None:
            free -= FRAME_ROWS + table.row_count + bool(table.caption)
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
    return _Columns("blocks", names, rows, optional=("in time", "trained"))


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
        optional=("device", "trained", "updates", "seen", "block"),
    )


def _traffic(status: "Status") -> _Columns:
    """Bytes by block and by worker, and how many times as many whole files in fp32 would be."""
    names = [worker.name for worker in status.workers]
    moved_by = [(f"block {block.index}", block.moved) for block in status.blocks]
    moved_by += [
        (worker.name if names.count(worker.name) == 1 else worker.worker, worker.moved)
        for worker in status.workers
    ]
    rows = []
    for name, moved in moved_by:
        ways = (moved.up, moved.down_whole, moved.down_differences)
        smaller = (moved.up_raw + moved.down_raw) / max(sum(ways), 1)
        rows.append((name, *map(size, ways), f"{smaller:.1f}" if sum(ways) else "-"))
    columns = ("name", "up", "down whole", "as deltas", "smaller by")
    title = f"traffic, codec {status.codec}"
    return _Columns(title, columns, rows, left=("name",), optional=("smaller by",))


def _cell(text: str) -> "Text":
    """Text from other machines, which rich must not read as markup."""
    from rich.text import Text

    return Text(plain(text), overflow="ellipsis", no_wrap=True)


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
