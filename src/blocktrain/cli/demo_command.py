"""blocktrain demo: train blocks with local workers, and compare them with end-to-end training."""

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from blocktrain.api.display import stop_on_signal
from blocktrain.cli import options
from blocktrain.cli.options import FOLDER
from blocktrain.cli.serve_commands import serve_command
from blocktrain.cli.terminal import command, open_page, training_progress
from blocktrain.environment import PROGRAM
from blocktrain.errors import ConfigError

if TYPE_CHECKING:
    from blocktrain.config import Config
    from blocktrain.storage.run_dir import RunDir

EXPORTED = "model.safetensors"
SHALLOW = "end-to-end, one worker's layers"
SCORED_WINDOWS = 256
PROMPT = "The function returns "
SAMPLE_BYTES = 240


@click.command("demo")
@options.config_option(default=Path("demo"))
@options.overrides
@click.option(
    "--out",
    type=FOLDER,
    default=Path("runs/demo"),
    help="Folder of the runs. An existing folder is resumed.",
)
@click.option(
    "--blocks-only", is_flag=True, help="Leave out the end-to-end models to compare with."
)
@click.option(
    "--open",
    "opens",
    is_flag=True,
    help="Open the run page in a browser, and at the end serve the model and open its chat page.",
)
@options.thread_count
@options.force
@options.log_options("warning")
@options.as_json
def demo_command(
    config_path: Path,
    overrides: tuple[str, ...],
    out: Path,
    blocks_only: bool,
    opens: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Start a coordinator and workers on this machine, train blocks without exchanging gradients
    between them, score the assembled model beside the same model trained end to end, and generate
    text."""
    from blocktrain.config import load_config
    from blocktrain.training.memory_check import check_training

    started = time.perf_counter()
    console = Console(stderr=as_json, highlight=False)
    config = load_config(config_path, overrides)
    if config.block_count == 1:
        raise ConfigError(
            "the demo compares several blocks with an end-to-end model; set model.blocks to at"
            " least 2"
        )
    if not force:
        check_training(config, config.train.device, processes=_worker_count(config))
        if not blocks_only:
            check_training(config.end_to_end(), config.train.device)
    runs = {"blocks": _train_in_swarm(config, out, console, opens=opens)}
    if not blocks_only:
        runs |= _train_twins(config, out, console)
    scores = {name: _score(run) for name, run in runs.items()}
    assert len({score["digest"] for score in scores.values()}) == 1  # all on the same windows
    sample = _sample(runs["blocks"])
    seconds = time.perf_counter() - started
    if as_json:
        click.echo(json.dumps({"scores": scores, "sample": sample, "seconds": seconds}))
        return
    _show(console, config, scores, sample, out, seconds)
    if opens:
        serve_command.main([str(out / "blocks"), "--open"], standalone_mode=False)


def _train_twins(config: "Config", out: Path, console: Console) -> dict[str, "RunDir"]:
    """The runs to compare with: the whole model, and a model with only one worker's layers, both
    trained end to end."""
    twin = config.end_to_end()
    shallow = twin.with_settings(
        model__layers=config.trained_layers, model__blocks=1, model__depths=()
    )
    return {
        "end-to-end": _train_alone("end-to-end", twin, out / "end-to-end", console),
        SHALLOW: _train_alone(SHALLOW, shallow, out / "end-to-end-shallow", console),
    }


def _train_in_swarm(config: "Config", folder: Path, console: Console, *, opens: bool) -> "RunDir":
    from blocktrain.api.swarm import Swarm
    from blocktrain.storage.run_dir import RunDir

    out = folder / "blocks"
    if (out / EXPORTED).exists():
        return RunDir.open(out)
    workers = _worker_count(config)
    console.print(f"[bold]blocks[/bold]: one coordinator, {workers} workers, over HTTPS")
    with stop_on_signal() as stop, Swarm.start(config, folder / "swarm") as swarm:
        console.print(f"run page: {swarm.page}", soft_wrap=True)
        if opens and swarm.page:
            open_page(swarm.page)
        swarm.join(workers, device=config.train.device, data=config.data.source)
        if not swarm.watch(console=console, should_stop=stop):
            _exit_stopped(console)
        run = RunDir.open(swarm.fetch(out))
    console.print(f"downloaded and assembled: {out}")
    return run


def _worker_count(config: "Config") -> int:
    return max(2, min(config.block_count, os.cpu_count() or 1))


def _train_alone(name: str, config: "Config", folder: Path, console: Console) -> "RunDir":
    from blocktrain.training.run_session import open_session

    console.print(f"[bold]{name}[/bold]")
    session = open_session(config, folder)
    with stop_on_signal() as stop, training_progress("  model", err=console.stderr) as on_progress:
        if not session.train_side_by_side([0], 1, on_progress, stop, PROGRAM):
            _exit_stopped(console)
    return session.run


def _exit_stopped(console: Console) -> None:
    console.print("stopped; the same command resumes")
    raise SystemExit(130)


def _score(run: "RunDir") -> dict[str, Any]:
    from blocktrain.api.models import load

    train = run.config.train
    model = load(run.path, device=train.device, precision=train.precision)
    own = run.config.data.source  # of this machine, even if the run was fetched
    evaluation = model.evaluate(own, split="test", windows=SCORED_WINDOWS, draws=1, progress=False)
    readings = {f"{s.start} start, {s.readout}": s.ce for s in evaluation.scores}
    return {
        "parameters": evaluation.parameters,
        "ce": evaluation.ce,
        "readings": readings,
        "windows": evaluation.windows,
        "digest": evaluation.digest,
    }


def _sample(run: "RunDir") -> str:
    from blocktrain.api.models import load

    model = load(run.path, device=run.config.train.device, precision="fp32")
    return PROMPT + model.generate(PROMPT, SAMPLE_BYTES, temperature=0.6)


def _division(config: "Config") -> str:
    """The layers by block: 4 blocks x 2 layers, or blocks of 2+1+1+4 layers."""
    if len(set(config.depths)) == 1:
        return f"{config.block_count} blocks x {config.depths[0]} layers"
    return f"blocks of {'+'.join(map(str, config.depths))} layers"


def _show(
    console: Console,
    config: "Config",
    scores: dict[str, dict[str, Any]],
    sample: str,
    out: Path,
    seconds: float,
) -> None:
    blocks, twin, layers = scores["blocks"], scores.get("end-to-end"), config.model.layers
    twins = {
        "end-to-end": f"end-to-end, {layers} layers",
        SHALLOW: f"end-to-end, {config.trained_layers} layers (one worker's)",
    }
    rows = [
        *((twins[name], s["parameters"], s["ce"]) for name, s in scores.items() if name in twins),
        *(
            (f"{_division(config)}, {name}", blocks["parameters"], blocks["readings"][reading])
            for name, reading in config.kind.demo_readings.items()
        ),
    ]
    table = Table(title="Cross entropy on held-out text", title_justify="left")
    for column in ("model", "parameters", "CE (nats/byte)", "gap"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, parameters, ce in rows:
        gap = "" if twin is None or name == rows[0][0] else f"{ce - twin['ce']:+.3f}"
        table.add_row(name, f"{parameters / 1e6:.2f}M", f"{ce:.4f}", gap)
    unit = "bytes" if config.data.tokenizer == "bytes" else "tokens"
    console.print()
    console.print(table)
    console.print(
        f"{blocks['windows']} windows of {config.model.window} {unit}, digest {blocks['digest']},"
        f" the same for every row; {seconds:.0f} s in total"
    )
    console.print(
        Panel(Text(sample), title="generated by the assembled blocks", title_align="left")
    )
    trained = out / "blocks"
    console.print(
        f"next: {command('generate', trained, '--prompt', 'Return the ')}", soft_wrap=True
    )
    chat = command("serve", trained)
    console.print(f"chat: {chat}, then open http://127.0.0.1:8000/", soft_wrap=True)
