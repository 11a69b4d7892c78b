"""A client for commands that only ask a run something: nothing is said while it answers."""

import math
from typing import TYPE_CHECKING

import click

from blocktrain.cli.plain import plain

if TYPE_CHECKING:
    from blocktrain.worker.client import Client


def caller(invite: str) -> "Client":
    from blocktrain.protocol.identity import WorkerKey
    from blocktrain.protocol.invite import Invite
    from blocktrain.worker.client import Client

    client = Client(Invite.decode(invite), WorkerKey.create())
    client.connection.on_silence = _tell
    return client


def _tell(reason: str, seconds: float) -> None:
    how_long = "" if math.isinf(seconds) else f" for {seconds:.0f} s"
    click.echo(f"{plain(reason)}; trying again{how_long}", err=True)
