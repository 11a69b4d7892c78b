"""blocktrain worker: join a run by its invite and train for it."""

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.text import Text  # plain text, not markup

from blocktrain.api.display import stop_on_signal
from blocktrain.cli import options
from blocktrain.cli.options import AMOUNT, FOLDER
from blocktrain.cli.terminal import SECONDS_BETWEEN_LINES, plain, size
from blocktrain.environment import THREADS, lower_priority

if TYPE_CHECKING:
    from blocktrain.worker.machine import WorkerEvent

MOST_WORKERS_HERE = 256
PASSING = ("training", "scoring", "checking", "waiting")  # shown until the next event
ROUTINE = ("leased", "trained", "accepted")  # not shown, because passing events imply them


@click.command("worker")
@options.invite
@options.at
@click.option(
    "--device",
    default="auto",
    help="auto, cpu, mps, cuda, cuda:N, or all: a worker on each GPU.",
)
@options.thread_count
@options.force
@options.log_options("warning")
@click.option("--blocks", type=int, multiple=True, help="Train only this block; repeatable.")
@click.option(
    "--memory",
    type=AMOUNT,
    metavar="GB",
    help="Train only blocks that need no more memory. Default: three quarters of what is free.",
)
@click.option(
    "--max-bandwidth", type=AMOUNT, metavar="MB/S", help="Network limit, both directions together."
)
@click.option("--until", metavar="HH:MM", help="Stop at this local time, or after 90m or 8h.")
@click.option(
    "--evaluate",
    is_flag=True,
    help="Score versions instead of training; needs an evaluation invite.",
)
@click.option(
    "--validate",
    is_flag=True,
    help="Check the updates of other workers instead of training; needs a validation invite.",
)
@click.option(
    "--nice",
    type=click.IntRange(0, 19),
    default=10,
    help="Priority of the process: 0 is that of other programs, 19 the lowest.",
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
    type=FOLDER,
    help="Folder for the worker's key and cache. Default: one per run in the user's cache.",
)
@click.option("--parent", type=int, hidden=True, help="End with this process.")
@options.as_json
def worker_command(
    invite: str,
    at: tuple[str, ...],
    device: str,
    blocks: tuple[int, ...],
    memory: float | None,
    max_bandwidth: float | None,
    until: str | None,
    evaluate: bool,
    validate: bool,
    nice: int,
    idle_only: bool,
    data: str | None,
    force: bool,
    name: str | None,
    folder: Path | None,
    parent: int | None,
    as_json: bool,
) -> None:
    """Join the run that INVITE names (`-`: a line of standard input) and train its blocks, one at a
    time. Makes outgoing connections only. Ctrl-C finishes a lease or an upload that takes only a
    few seconds, and otherwise gives the lease back to the coordinator."""
    lower_priority(nice)  # before torch starts threads

    from blocktrain.cli.run_progress import RunProgress
    from blocktrain.protocol.identity import WorkerKey
    from blocktrain.worker.agent import Agent, Evaluator, WorkerSettings
    from blocktrain.worker.client import Client
    from blocktrain.worker.neighbours import neighbours
    from blocktrain.worker.validator import Validator

    if evaluate and (blocks or memory or idle_only):
        raise click.UsageError("--blocks, --memory and --idle-only do not apply to --evaluate")
    if validate and (evaluate or idle_only):
        raise click.UsageError("--evaluate and --idle-only do not apply to --validate")
    worker = Evaluator if evaluate else Validator if validate else Agent
    decoded = options.decoded_invite(invite, at)
    if device == "all":
        if worker is not Agent:
            raise click.UsageError("--device all does not apply to --evaluate and --validate")
        with _own_folder(decoded.run) if folder is None else nullcontext(folder) as place:
            _work_on_all(decoded.encode(), place, as_json=as_json)
        return
    own_folder = _own_folder(decoded.run) if folder is None else nullcontext(folder)
    with own_folder as place, neighbours() as here:
        # Each role needs its own key.
        home = place if worker is Agent else place / worker.role
        settings = WorkerSettings(
            folder=home,
            device=device,
            blocks=blocks or None,
            memory_bytes=int(memory * 1e9) if memory else None,
            max_bandwidth=max_bandwidth * 1e6 if max_bandwidth else None,
            until=_stop_time(until) if until else None,
            idle_only=idle_only,
            data=data,
            checks_memory=not force,
            neighbours=None if THREADS.is_set else here,
            name=name or platform.node() or "worker",
        )
        client = Client(decoded, WorkerKey.load_or_create(home / "key.pem"), folder=home)
        with (
            stop_on_signal() as stop,
            nullcontext() if as_json else RunProgress(client) as run,
            _event_display(as_json=as_json, about_run=run.text if run else str) as show,
        ):
            finished = worker(client, settings, show).run(_or_orphaned(stop, parent))
    if not finished:
        raise SystemExit(130)


def _work_on_all(invite: str, folder: Path, *, as_json: bool) -> None:
    """Run a worker on every device, with the options of this command."""
    from blocktrain.cli.device_workers import all_devices, work_on_all

    devices = all_devices()
    given = click.get_current_context().params
    words = ["--parent", str(os.getpid()), "--nice", str(given["nice"])]
    for block in given["blocks"]:
        words += ["--blocks", str(block)]
    if given["max_bandwidth"]:
        words += ["--max-bandwidth", str(given["max_bandwidth"] / len(devices))]
    for option in ("memory", "until", "data", "name"):
        if given[option]:
            words += [f"--{option}", str(given[option])]
    words += [f"--{flag.replace('_', '-')}" for flag in ("idle_only", "force") if given[flag]]
    with stop_on_signal() as stop, _device_display(as_json=as_json) as show:
        finished = work_on_all(invite, devices, words, folder, show, stop)
    if not finished:
        raise SystemExit(130)


@contextmanager
def _device_display(*, as_json: bool) -> Iterator[Callable[[str, dict[str, Any]], None]]:
    """Show the events of several workers: what each does now, and what was done."""
    from blocktrain.worker.machine import WorkerEvent

    if as_json:
        yield lambda device, event: click.echo(json.dumps({"device": device, **event}))
        return
    doing: dict[str, str] = {}
    with Console().status("joining") as status:

        def show(device: str, fields: dict[str, Any]) -> None:
            event = WorkerEvent(**fields)
            if event.kind in PASSING:
                doing[device] = f"{device}  {_progress_line(event)}"
                status.update(Text("\n".join(doing[each] for each in sorted(doing))))
            elif event.kind not in ROUTINE:
                status.console.print(Text(f"{device}  {_event_line(event)}"))

        yield show


def _or_orphaned(stop: Callable[[], bool], parent: int | None) -> Callable[[], bool]:
    """`stop`, or whether the process that started this one has ended."""
    if parent is None:
        return stop
    return lambda: stop() or os.getppid() != parent


@contextmanager
def _own_folder(run: str) -> Iterator[Path]:
    """The first folder of this run that no other worker on this machine uses, locked meanwhile."""
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
        f"{MOST_WORKERS_HERE} workers of this run are running on this machine already;"
        " stop one first, or give --folder"
    )


def _stop_time(text: str) -> float:
    """When to stop, in seconds since 1970: at the next time of day such as 23:30, or after a
    duration such as 90m."""
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
def _event_display(
    *, as_json: bool, about_run: Callable[[], str] = str
) -> Iterator[Callable[["WorkerEvent"], None]]:
    """Show events as JSON lines, as updated lines on a terminal, otherwise as a few lines.
    `about_run`: a line about the whole run, if anything is known."""
    if as_json:
        yield lambda event: click.echo(json.dumps(asdict(event)))
    elif sys.stdout.isatty():
        console = Console()
        with console.status("joining") as status:

            def show(event: "WorkerEvent") -> None:
                if event.kind in PASSING:
                    lines = [*_progress(event), about_run()]
                    status.update(Text("\n  ".join(filter(None, lines))))
                elif event.kind not in ROUTINE:
                    console.print(Text(_event_line(event)))
                if event.kind == "unreachable":
                    status.update("waiting for the coordinator")

            yield show
    else:
        yield _lines(about_run)


def _lines(about_run: Callable[[], str]) -> Callable[["WorkerEvent"], None]:
    last_time, last_line, last_run = 0.0, "", ""

    def show(event: "WorkerEvent") -> None:
        nonlocal last_time, last_line, last_run
        if event.kind in PASSING:
            line = _progress_line(event)
            if line == last_line or time.monotonic() - last_time < SECONDS_BETWEEN_LINES:
                return
            last_time, last_line = time.monotonic(), line
            click.echo(line)
            if (run := about_run()) != last_run:
                last_run = run
                click.echo(run)
        elif event.kind not in ROUTINE:
            click.echo(_event_line(event))

    return show


def _progress_line(event: "WorkerEvent") -> str:
    return "  ".join(_progress(event))


def _progress(event: "WorkerEvent") -> list[str]:
    """What the worker is doing, and what it has moved. The last number: bytes of text in accepted
    updates."""
    if event.kind != "training":
        return [plain(event.text)]
    loss = f"loss {event.loss:.4f}  " if event.loss is not None else ""
    left = (
        f"due in {max(0.0, event.seconds_left):.0f} s  " if event.seconds_left is not None else ""
    )
    return [
        f"block {event.block}  {event.step}/{event.steps}  {left}{loss}{size(event.bytes_per_s)}/s",
        f"down {size(event.bytes_down)}  up {size(event.bytes_up)}"
        f"  trained {size(event.contribution)}",
    ]


def _event_line(event: "WorkerEvent") -> str:
    text = plain(event.text)
    if event.kind not in ("finished", "stopped") or not event.contribution:
        return text
    return f"{text}; accepted from this worker: updates for {size(event.contribution)} of text"
