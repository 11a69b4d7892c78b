"""blocktrain status: how a run stands, once or live."""

import time
from typing import TYPE_CHECKING

import click

from blocktrain.cli import options
from blocktrain.cli.sizes import size

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from blocktrain.protocol.messages import Status

SECONDS_BETWEEN = 2.0


@click.command("status")
@options.invite
@click.option("--watch", is_flag=True, help="Go on showing it until Ctrl-C.")
@options.as_json
def command(invite: str, watch: bool, as_json: bool) -> None:
    """Show the blocks and workers of the run that INVITE belongs to."""
    from rich.console import Console
    from rich.live import Live

    from blocktrain.protocol.identity import WorkerKey
    from blocktrain.protocol.invite import Invite
    from blocktrain.worker.client import Client

    client = Client(Invite.decode(invite), WorkerKey.create())
    if as_json:
        while True:
            click.echo(client.status().model_dump_json())
            if not watch:
                return
            time.sleep(SECONDS_BETWEEN)
    if not watch:
        Console().print(_tables(client.status()))
        return
    try:
        with Live(_tables(client.status()), auto_refresh=False) as live:
            while True:
                time.sleep(SECONDS_BETWEEN)
                live.update(_tables(client.status()), refresh=True)
    except KeyboardInterrupt:
        return


def _tables(status: "Status") -> "Group":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    blocks = Table(title="blocks", title_justify="left")
    for column in ("block", "version", "CE", "trained", "done", "workers", "in time"):
        blocks.add_column(column, justify="right")
    for block in status.blocks:
        blocks.add_row(
            str(block.index),
            str(block.version),
            "-" if block.ce is None else f"{block.ce:.4f}",
            size(block.bytes_trained),
            f"{100 * block.progress:.1f}%",
            str(block.replicas),
            "-" if block.participation is None else f"{100 * block.participation:.0f}%",
        )
    workers = Table(title="workers", title_justify="left")
    for column in ("worker", "name", "device", "state", "block", "updates", "trained", "seen"):
        workers.add_column(column, justify="right" if column in ("updates", "trained") else "left")
    for worker in status.workers:
        workers.add_row(
            worker.worker,
            worker.name,
            worker.device,
            worker.state,
            "-" if worker.block is None else str(worker.block),
            str(worker.updates),
            size(worker.bytes_trained),
            f"{worker.seconds_since_seen:.0f} s ago",
        )
    score = f"CE {status.ce:.4f}" if status.ce is not None else f"CE: {status.ce_note}"
    head = Text(f"run {status.run}: {status.state} for {_duration(status.seconds)}; {score}")
    return Group(head, blocks, workers, _moved_table(status))


def _moved_table(status: "Status") -> "Table":
    """Bytes, and how many times as much they would have been whole, in fp32."""
    from rich.table import Table

    table = Table(title="moved", title_justify="left")
    for column in ("of", "up", "down whole", "as differences", "smaller by"):
        table.add_column(column, justify="left" if column == "of" else "right")
    named = [(f"block {block.index}", block.moved) for block in status.blocks]
    named += [(f"{worker.name}, {worker.worker}", worker.moved) for worker in status.workers]
    for name, moved in named:
        ways = (moved.up, moved.down_whole, moved.down_differences)
        smaller = (moved.up_raw + moved.down_raw) / max(sum(ways), 1)
        table.add_row(name, *map(size, ways), f"{smaller:.1f}" if sum(ways) else "-")
    return table


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
