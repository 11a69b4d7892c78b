"""blocktrain worker: join a run by its invite and train for it."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click

from blocktrain.cli import options
from blocktrain.cli.terminal import plain, size, stop_on_signal

if TYPE_CHECKING:
    from blocktrain.worker.events import WorkerEvent

MOST_WORKERS_HERE = 256
SECONDS_BETWEEN_LINES = 10.0
PASSING = ("training", "scoring", "waiting")  # shown until the next event
ROUTINE = ("leased", "trained", "accepted")  # not shown: the passing ones imply them


@click.command("worker")
@options.invite
@options.device
@options.thread_count
@options.log_options("warning")
@click.option("--blocks", type=int, multiple=True, help="Train only this block; may be repeated.")
@click.option(
    "--memory", type=click.FloatRange(min=0.001), metavar="GB", help="Use at most this much."
)
@click.option(
    "--max-bandwidth",
    type=click.FloatRange(min=0.001),
    metavar="MB/S",
    help="Network limit, both directions together.",
)
@click.option("--until", metavar="HH:MM", help="Stop at this local time, or after 90m or 8h.")
@click.option(
    "--evaluate",
    is_flag=True,
    help="Score versions instead of training; needs an evaluation invite.",
)
@click.option("--idle-only", is_flag=True, help="Pause while others use this machine.")
@click.option(
    "--data",
    metavar="SOURCE",
    help="This machine's copy of the run's text, written as data.source; used if it is identical.",
)
@click.option("--name", help="The worker's name in the run's status. Default: the machine's name.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="For its key and its cache. Default: a folder in the cache, per run.",
)
@options.as_json
def worker_command(
    invite: str,
    device: str,
    blocks: tuple[int, ...],
    memory: float | None,
    max_bandwidth: float | None,
    until: str | None,
    evaluate: bool,
    idle_only: bool,
    data: str | None,
    name: str | None,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Join the run of INVITE and train its blocks, one at a time. Makes outgoing connections only.
    Ctrl-C finishes what takes a few seconds and gives the rest back."""
    import platform

    from blocktrain.protocol.identity import WorkerKey
    from blocktrain.protocol.invite import Invite
    from blocktrain.worker.agent import Agent
    from blocktrain.worker.client import Client
    from blocktrain.worker.evaluator import Evaluator
    from blocktrain.worker.machine import WorkerSettings

    if evaluate and (blocks or memory or idle_only):
        raise click.UsageError("--blocks, --memory and --idle-only do not apply to --evaluate")
    decoded = Invite.decode(invite)
    with _own_folder(decoded.run) if folder is None else nullcontext(folder) as place:
        home = place / "evaluate" if evaluate else place  # a key keeps the role it joined with
        settings = WorkerSettings(
            folder=home,
            device=device,
            blocks=blocks or None,
            memory_bytes=int(memory * 1e9) if memory else None,
            max_bandwidth=max_bandwidth * 1e6 if max_bandwidth else None,
            until=_stop_time(until) if until else None,
            idle_only=idle_only,
            data=data,
            name=name or platform.node() or "worker",
        )
        client = Client(decoded, WorkerKey.load_or_create(home / "key.pem"))
        with stop_on_signal() as stop, _shown(as_json=as_json) as show:
            worker = Evaluator if evaluate else Agent
            finished = worker(client, settings, show).run(stop)
    if not finished:
        raise SystemExit(130)


@contextmanager
def _own_folder(run: str) -> Iterator[Path]:
    """The first folder of this run that no worker on this machine uses; locked until the end."""
    import filelock

    from blocktrain.data.corpus import cache_dir

    for number in range(MOST_WORKERS_HERE):
        folder = cache_dir() / "workers" / run / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        claim = filelock.FileLock(folder / ".claim", timeout=0)
        try:
            claim.acquire()
        except filelock.Timeout:
            continue
        try:
            yield folder
        finally:
            claim.release()
        return
    raise click.UsageError(
        f"{MOST_WORKERS_HERE} workers of this run are running on this machine already"
    )


def _stop_time(text: str) -> float:
    """Seconds since 1970 of the next such time of day, or after a duration from now."""
    spans = {"m": 60.0, "h": 3600.0}
    if text[-1:] in spans and text[:-1].replace(".", "", 1).isdigit():
        return time.time() + float(text[:-1]) * spans[text[-1]]
    try:
        time_of_day = datetime.strptime(text, "%H:%M").time()
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not a time like 23:30, or a duration like 90m or 8h", param_hint="--until"
        ) from None
    today = datetime.combine(datetime.now().date(), time_of_day)
    return (today if today > datetime.now() else today + timedelta(days=1)).timestamp()


@contextmanager
def _shown(*, as_json: bool) -> Iterator[Callable[["WorkerEvent"], None]]:
    """Events as JSON lines, on a terminal as one line that is updated, else as a few lines."""
    if as_json:
        yield lambda event: click.echo(json.dumps(asdict(event)))
    elif sys.stdout.isatty():
        from rich.console import Console
        from rich.text import Text  # which has no markup

        console = Console()
        with console.status("joining") as status:

            def show(event: "WorkerEvent") -> None:
                if event.kind in PASSING:
                    status.update(Text(_progress_line(event)))
                elif event.kind not in ROUTINE:
                    console.print(Text(_event_line(event)))
                if event.kind == "unreachable":
                    status.update("waiting for the coordinator")

            yield show
    else:
        yield _lines()


def _lines() -> Callable[["WorkerEvent"], None]:
    last_time, last_line = 0.0, ""

    def show(event: "WorkerEvent") -> None:
        nonlocal last_time, last_line
        if event.kind in PASSING:
            line = _progress_line(event)
            if line == last_line or time.monotonic() - last_time < SECONDS_BETWEEN_LINES:
                return
            last_time, last_line = time.monotonic(), line
            click.echo(line)
        elif event.kind not in ROUTINE:
            click.echo(_event_line(event))

    return show


def _progress_line(event: "WorkerEvent") -> str:
    """What the worker does now; the last number is text in updates that were accepted."""
    if event.kind != "training":
        return plain(event.text)
    loss = f"loss {event.loss:.4f}  " if event.loss is not None else ""
    return (
        f"block {event.block}  {event.step}/{event.steps}  {loss}"
        f"{size(event.bytes_per_s)}/s  down {size(event.bytes_down)}"
        f"  up {size(event.bytes_up)}  trained {size(event.contribution)}"
    )


def _event_line(event: "WorkerEvent") -> str:
    text = plain(event.text)
    if event.kind not in ("finished", "stopped") or not event.contribution:
        return text
    return f"{text}; {size(event.contribution)} of text trained here is in the run"
