"""blocktrain demo: train blocks with workers on this machine and compare them with end-to-end."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blocktrain.cli import options
from blocktrain.cli.terminal import stop_on_signal

if TYPE_CHECKING:
    from rich.console import Console

    from blocktrain.cli.local_swarm import LocalSwarm
    from blocktrain.config import Config
    from blocktrain.storage.run_dir import RunDir

EXPORTED = "model.safetensors"
SHALLOW = "end-to-end, one worker's layers"
POLL_SECONDS = 0.5
SCORED_WINDOWS = 256
PROMPT = "The function returns "
SAMPLE_BYTES = 240


@click.command("demo")
@options.config_option(default=Path("demo"), show_default=True)
@options.overrides
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs/demo"),
    show_default=True,
    help="Folder for the runs; the same folder resumes them.",
)
@options.thread_count
@options.log_options("warning")
@options.as_json
def demo_command(config_path: Path, overrides: tuple[str, ...], out: Path, as_json: bool) -> None:
    """Start a coordinator and workers on this machine, train blocks that never exchange a gradient,
    score the assembled model next to the same model trained end to end, and generate text."""
    from rich.console import Console

    from blocktrain.config import load_config
    from blocktrain.errors import ConfigError

    started = time.perf_counter()
    console = Console(stderr=as_json, highlight=False)
    config = load_config(config_path, overrides)
    if config.block_count == 1:
        raise ConfigError(
            "the demo compares blocks with an end-to-end model: set model.blocks to 2 or more"
        )
    runs = _train_all(config, out, console)
    scores = {name: _score(run) for name, run in runs.items()}
    assert len({score["digest"] for score in scores.values()}) == 1  # all on the same windows
    sample = _sample(runs["blocks"])
    seconds = time.perf_counter() - started
    if as_json:
        click.echo(json.dumps({"scores": scores, "sample": sample, "seconds": seconds}))
        return
    _show(console, config, scores, sample, out, seconds)


def _train_all(config: "Config", out: Path, console: "Console") -> dict[str, "RunDir"]:
    """The runs to compare: the blocks, trained by workers of a real run; the whole model, trained
    end to end; and a model with only the layers that one worker trains, end to end."""
    twin = config.end_to_end()
    shallow = twin.with_settings(
        model__layers=config.trained_layers, model__blocks=1, model__depths=()
    )
    return {
        "blocks": _train_in_swarm(config, out / "blocks", out / "swarm", console),
        "end-to-end": _train_alone("end-to-end", twin, out / "end-to-end", console),
        SHALLOW: _train_alone(SHALLOW, shallow, out / "end-to-end-shallow", console),
    }


def _train_in_swarm(config: "Config", out: Path, folder: Path, console: "Console") -> "RunDir":
    import os

    from blocktrain.cli.local_swarm import LocalSwarm
    from blocktrain.storage.run_dir import RunDir
    from blocktrain.worker.versions import fetch_model

    if (out / EXPORTED).exists():
        return RunDir.open(out)
    workers = max(2, min(config.block_count, os.cpu_count() or 1))
    console.print(f"[bold]blocks[/bold]: one coordinator, {workers} workers, over HTTPS")
    with stop_on_signal() as stop, LocalSwarm(config, folder, workers) as swarm:
        if not _wait_until_finished(swarm, console, stop):
            _exit_stopped(console)
        fetched = fetch_model(swarm.client, out)
    console.print(
        f"fetched and assembled: versions {', '.join(map(str, fetched.versions))},"
        f" {fetched.bytes_moved / 1e6:.1f} MB"
    )
    return fetched.run


def _wait_until_finished(swarm: "LocalSwarm", console: "Console", stop: Callable[[], bool]) -> bool:
    """Show the blocks' progress until the run is finished. False: it was stopped before that."""
    from rich import progress as bars

    steps = swarm.config.train.steps
    columns = [
        bars.TextColumn("  block {task.description}"),
        bars.BarColumn(bar_width=24),
        bars.TextColumn("{task.completed:>5.0f}/{task.total:.0f}"),
        bars.TextColumn("{task.fields[state]}"),
    ]
    with bars.Progress(*columns, console=console, disable=not console.is_terminal) as display:
        tasks = [
            display.add_task(str(block), total=steps, state="")
            for block in range(swarm.config.block_count)
        ]
        while not stop():
            status = swarm.status()
            for task, block in zip(tasks, status.blocks, strict=True):
                state = f"version {block.version}" + ", training" * bool(block.replicas)
                display.update(task, completed=block.progress * steps, state=state)
            if status.state == "finished":
                return True
            time.sleep(POLL_SECONDS)
    return False


def _train_alone(name: str, config: "Config", folder: Path, console: "Console") -> "RunDir":
    from blocktrain.cli.options import PROGRAM
    from blocktrain.cli.progress import training_progress
    from blocktrain.train.run_session import open_session

    console.print(f"[bold]{name}[/bold]")
    session = open_session(config, folder)
    with stop_on_signal() as stop, training_progress("  model", err=console.stderr) as on_progress:
        if not session.train_side_by_side([0], 1, on_progress, stop, PROGRAM):
            _exit_stopped(console)
    return session.run


def _exit_stopped(console: "Console") -> None:
    console.print("stopped; the same command resumes")
    raise SystemExit(130)


def _score(run: "RunDir") -> dict[str, Any]:
    from blocktrain.data.corpus import load_corpus
    from blocktrain.data.windows import evaluation_windows
    from blocktrain.train.device import resolve
    from blocktrain.train.evaluate import evaluate
    from blocktrain.train.loading import load_stack

    stack = load_stack(run, resolve(run.config.train.device, run.config.train.precision))
    window = run.config.model.window
    test = load_corpus(run.config.data).split("test", window)
    evaluation = evaluate(stack, evaluation_windows(test, window, SCORED_WINDOWS), draws=1)
    readings = {f"{s.start} start, {s.readout}": s.ce for s in evaluation.scores}
    return {
        "parameters": evaluation.parameters,
        "ce": evaluation.default.ce,
        "readings": readings,
        "windows": evaluation.windows,
        "digest": evaluation.digest,
    }


def _sample(run: "RunDir") -> str:
    from blocktrain.numerics.sampling import Sampling
    from blocktrain.serve.router.local import generate
    from blocktrain.train.device import resolve
    from blocktrain.train.loading import load_stack

    stack = load_stack(run, resolve(run.config.train.device, "fp32"))
    text = bytes(generate(stack, PROMPT.encode(), SAMPLE_BYTES, Sampling(temperature=0.6)))
    return PROMPT + text.decode("utf-8", errors="replace")


def _division(config: "Config") -> str:
    """How the layers are divided: 4 blocks x 2 layers, or blocks of 2+1+1+4 layers."""
    if len(set(config.depths)) == 1:
        return f"{config.block_count} blocks x {config.depths[0]} layers"
    return f"blocks of {'+'.join(map(str, config.depths))} layers"


def _show(
    console: "Console",
    config: "Config",
    scores: dict[str, dict[str, Any]],
    sample: str,
    out: Path,
    seconds: float,
) -> None:
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    blocks, twin = scores["blocks"], scores["end-to-end"]
    shallow = scores[SHALLOW]
    rows = [
        (f"end-to-end, {config.model.layers} layers", twin["parameters"], twin["ce"]),
        (
            f"end-to-end, {config.trained_layers} layers (one worker's)",
            shallow["parameters"],
            shallow["ce"],
        ),
        *(
            (f"{_division(config)}, {name}", blocks["parameters"], blocks["readings"][reading])
            for name, reading in config.kind.demo_readings.items()
        ),
    ]
    table = Table(title="Cross entropy on held-out text", title_justify="left")
    for column in ("model", "parameters", "CE (nats/byte)", "gap"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, parameters, ce in rows:
        gap = "" if name == rows[0][0] else f"{ce - twin['ce']:+.3f}"
        table.add_row(name, f"{parameters / 1e6:.2f}M", f"{ce:.4f}", gap)
    console.print()
    console.print(table)
    console.print(
        f"{twin['windows']} windows of {config.model.window} bytes, digest {twin['digest']},"
        f" the same for every row; {seconds:.0f} s in total"
    )
    console.print(
        Panel(Text(sample), title="generated by the assembled blocks", title_align="left")
    )
    console.print(f"next: blocktrain generate {out}/blocks --prompt 'Return the '")
