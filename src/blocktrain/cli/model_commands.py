"""blocktrain generate, export, info and fetch: what to do with a trained model."""

import codecs
import json
import math
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from blocktrain.cli import options
from blocktrain.cli.options import client_of
from blocktrain.cli.terminal import plain, size

if TYPE_CHECKING:
    from blocktrain.storage.run_dir import BlockDir


@click.command("export")
@options.run
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="New folder."
)
@options.as_json
def export_command(run: Path, out: Path, as_json: bool) -> None:
    """Write all blocks of RUN into one safetensors file, with its config. eval, generate and serve
    accept the new folder like a run."""
    from blocktrain.storage.run_dir import RunDir

    path = RunDir.open(run).export(out)
    count = path.stat().st_size
    click.echo(
        json.dumps({"file": str(path), "bytes": count}) if as_json else f"{path}  {size(count)}"
    )


@click.command("fetch")
@options.invite
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="New run folder."
)
@options.as_json
def fetch_command(invite: str, out: Path, as_json: bool) -> None:
    """Download the current version of every block into a run folder, for eval, generate, export and
    serve. This works at any time during a run."""
    from blocktrain.worker.versions import fetch_model

    fetched = fetch_model(client_of(invite), out)
    if as_json:
        answer = {"out": str(out), "versions": fetched.versions, "bytes_moved": fetched.bytes_moved}
        click.echo(json.dumps(answer))
        return
    click.echo(
        f"{out}: blocks at versions {', '.join(map(str, fetched.versions))},"
        f" {size(fetched.bytes_moved)} downloaded   next: blocktrain eval {out}"
    )


@click.command("generate")
@options.run
@click.option("--prompt", default="", help="Text to continue.")
@click.option(
    "--bytes",
    "count",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Length of the continuation.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0.0),
    default=0.8,
    show_default=True,
    help="0 always takes the most likely byte.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    help="Seed of the sampling.",
)
@click.option(
    "--start",
    type=click.Choice(["mean", "noise"]),
    default="mean",
    show_default=True,
    help="First guess that the blocks refine: the mean of all targets, or random noise.",
)
@click.option(
    "--readout",
    type=click.Choice(["product", "final"]),
    default="product",
    show_default=True,
    help="product: of all blocks' predictions; final: the last block's alone.",
)
@options.first_blocks
@options.device
@options.thread_count
@options.precision
@options.as_json
def generate_command(
    run: Path,
    prompt: str,
    count: int,
    temperature: float,
    seed: int,
    start: str,
    readout: str,
    first_blocks: int | None,
    device: str,
    precision: str,
    as_json: bool,
) -> None:
    """Continue a prompt with the model of RUN."""
    if not math.isfinite(temperature):
        raise click.BadParameter("must be a finite number", param_hint="--temperature")
    from blocktrain.numerics.sampling import Sampling
    from blocktrain.serve.router.local import generate
    from blocktrain.storage.run_dir import RunDir
    from blocktrain.train.device import resolve
    from blocktrain.train.loading import load_stack

    stack = load_stack(RunDir.open(run), resolve(device, precision)).first(first_blocks)
    sampling = Sampling(temperature, seed=seed)
    started = time.perf_counter()
    stream = generate(stack, os.fsencode(prompt), count, sampling, readout=readout, start=start)
    if as_json:
        text = bytes(stream)
        seconds = time.perf_counter() - started
        decoded = text.decode("utf-8", errors="replace")
        click.echo(
            json.dumps({"prompt": prompt, "text": decoded, "bytes": len(text), "seconds": seconds})
        )
        return
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    click.echo(prompt, nl=False)
    for byte in stream:
        click.echo(decoder.decode(bytes([byte])), nl=False)
        sys.stdout.flush()
    click.echo(decoder.decode(b"", final=True))


@click.command("info")
@options.run
@options.as_json
def info_command(run: Path, as_json: bool) -> None:
    """Show the settings of RUN and the progress of each block: steps, bytes of text and, with
    train.eval_every, its score on valid."""
    from blocktrain.storage.run_dir import EXPORTED, RunDir

    opened = RunDir.open(run)
    config = opened.config
    exported = (run / EXPORTED).exists()
    blocks = [] if exported else [opened.block(index) for index in range(config.block_count)]
    if as_json:
        described = [
            {
                "index": block.index,
                "finished": block.finished(),
                "versions": [asdict(version) for version in block.versions()],
            }
            for block in blocks
        ]
        click.echo(
            json.dumps({"config": config.to_dict(), "exported": exported, "blocks": described})
        )
        return
    model = config.model
    click.echo(
        f"{run}: {config.objective.kind}, {model.layers} layers of width {model.width}"
        f" in {config.block_count} block{'s' * (config.block_count > 1)}, window {model.window},"
        f" data {plain(config.data.source)}, seed {config.train.seed}"
    )
    if exported:
        click.echo(f"exported: {run / EXPORTED}")
    for block in blocks:
        click.echo(_line(block, config.train.steps))
    if len(blocks) > 1:
        seen = sum(block.current().bytes_seen for block in blocks if block.versions())
        click.echo(f"all blocks together: {size(seen)} seen")


def _line(block: "BlockDir", steps: int) -> str:
    if not block.versions():
        return f"block {block.index}: not trained yet"
    current = block.current()
    state = "finished" if block.finished() else f"{block.versions()[-1].step} of {steps} steps"
    score = f", valid CE {current.valid_ce:.4f}" if current.valid_ce is not None else ""
    predecessors = ", ".join(str(version or 0) for version in block.built_on())
    score += f", built on the preceding blocks at step {predecessors}" if predecessors else ""
    return (
        f"block {block.index}: {state}, at step {current.step}, {size(current.bytes_seen)} seen"
        f"{score}, {size(current.weights.size)} on disk"
    )
