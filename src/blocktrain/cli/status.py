"""blocktrain status: how a run stands, once or live."""

import time
from typing import TYPE_CHECKING

import click

from blocktrain.cli import options
from blocktrain.cli.sizes import size

if TYPE_CHECKING:
    from rich.console import Group

    from blocktrain.protocol.messages import Moved, Status

SECONDS_BETWEEN = 2.0
MOVED = ("up", "down", "smaller")


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
    for column in ("block", "version", "CE", "trained", "done", "workers", "in time", *MOVED):
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
            *_moved(block.moved),
        )
    workers = Table(title="workers", title_justify="left")
    numbers = ("updates", "trained", *MOVED)
    for column in ("worker", "name", "device", "state", "block", *numbers, "seen"):
        workers.add_column(column, justify="right" if column in numbers else "left")
    for worker in status.workers:
        workers.add_row(
            worker.worker,
            worker.name,
            worker.device,
            worker.state,
            "-" if worker.block is None else str(worker.block),
            str(worker.updates),
            size(worker.bytes_trained),
            *_moved(worker.moved),
            f"{worker.seconds_since_seen:.0f} s ago",
        )
    score = f"CE {status.ce:.4f}" if status.ce is not None else f"CE: {status.ce_note}"
    head = Text(f"run {status.run}: {status.state} for {_duration(status.seconds)}; {score}")
    return Group(head, blocks, workers)


def _moved(moved: "Moved") -> tuple[str, str, str]:
    """Up, down, and how many times as much both would have been whole, in fp32."""
    down = moved.down_whole + moved.down_differences
    together, raw = moved.up + down, moved.up_raw + moved.down_raw
    return size(moved.up), size(down), f"{raw / together:.1f}x" if together else "-"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
