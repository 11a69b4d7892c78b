"""blocktrain status: how far a run is, whether it learns, and who does what; once or live."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from blocktrain.cli import options
from blocktrain.cli.status_tables import Screen, render
from blocktrain.cli.terminal import plain
from blocktrain.config import Config, from_toml
from blocktrain.errors import UnreachableError
from blocktrain.protocol.page_messages import Overview
from blocktrain.protocol.status_messages import Status
from blocktrain.worker.client import Client

REFRESH_SECONDS = 2.0
ANSWER_SECONDS = 5.0  # then the screen says that there is no connection, and tries again


class State(NamedTuple):
    status: Status
    overview: Overview | None  # None: an older coordinator


@click.command("status")
@options.invite
@options.at
@click.option("--watch", is_flag=True, help="Refresh until Ctrl-C.")
@click.option("--all", "show_all", is_flag=True, help="Also list workers that have left.")
@options.as_json
def status_command(
    invite: str, at: tuple[str, ...], watch: bool, show_all: bool, as_json: bool
) -> None:
    """Show how far the run that INVITE names is, its blocks and its workers. Its web page shows
    more: open the coordinator's address in a browser."""
    client, console = options.client_of(invite, at), Console()
    config = None if as_json else from_toml(client.run().config)
    state = _ask(client)  # an error ends the command, unlike a later one
    if not watch:
        if config:
            console.print(render(*state, config, Screen(console, None, show_all)))
        else:
            _print_json(state)
        return
    client.http.on_unreachable = lambda reason, seconds: None  # `_follow` says it
    try:
        if config:
            _watch(client, state, config, console, show_all)
        else:
            _follow(client, state, _print_json)
    except KeyboardInterrupt:
        return


def _watch(client: Client, state: State, config: Config, console: Console, show_all: bool) -> None:
    """Fill the screen until Ctrl-C, and leave the last state on the terminal."""
    last: list[RenderableType] = []
    planned = _planned(state)
    try:
        with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:

            def show(state: State, problem: str) -> None:
                nonlocal config, planned
                if not problem and _planned(state) != planned:  # the run was extended
                    with suppress(UnreachableError):
                        config = from_toml(client.run(client.deadline(ANSWER_SECONDS)).config)
                        planned = _planned(state)
                note = Text(problem, style="bold red")
                rows = console.height - 1 - (len(note.wrap(console, console.width)) if note else 0)
                tables = render(*state, config, Screen(console, rows, show_all))
                parts = [note, tables] if note else [tables]
                last[:] = [tables]
                live.update(Group(*parts), refresh=True)

            _follow(client, state, show)
    finally:
        if console.is_terminal and last:
            console.print(*last)


def _planned(state: State) -> int | None:
    return state.overview.tokens_total if state.overview else None


def _follow(client: Client, state: State, show: Callable[[State, str], None]) -> None:
    """Show the state again and again. While no coordinator answers, show the last one with the
    reason, and go on trying: the coordinator may be restarted hours later."""
    problem, answered = "", time.monotonic()
    while True:
        show(state, problem)
        time.sleep(REFRESH_SECONDS)
        try:
            state = _ask(client, ANSWER_SECONDS)
            problem, answered = "", time.monotonic()
        except UnreachableError as error:
            silent = time.monotonic() - answered
            problem = f"no answer for {silent:.0f} s, trying again: {plain(str(error))}"


def _ask(client: Client, seconds: float | None = None) -> State:
    deadline = client.deadline(seconds) if seconds else None
    return State(client.status(deadline), client.overview(deadline))


def _print_json(state: State, problem: str = "") -> None:
    if not problem:
        click.echo(state.status.model_dump_json())
