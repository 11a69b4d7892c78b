"""blocktrain export: one assembled safetensors file."""

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
from blocktrain.cli.display import plain, size
from blocktrain.cli.options import caller

if TYPE_CHECKING:
    from blocktrain.storage.run_dir import BlockDir


@click.command("export")
@options.run
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Directory to write.")
@options.as_json
def export_command(run: Path, out: Path, as_json: bool) -> None:
    """Write all blocks of RUN as one safetensors file plus config, which eval, generate and serve
    load."""
    from blocktrain.storage.run_dir import RunDir

    path = RunDir.open(run).export(out)
    count = path.stat().st_size
    click.echo(
        json.dumps({"file": str(path), "bytes": count}) if as_json else f"{path}  {size(count)}"
    )


@click.command("fetch")
@options.invite
@click.option("--out", type=click.Path(path_type=Path), required=True, help="New run directory.")
@options.as_json
def fetch_command(invite: str, out: Path, as_json: bool) -> None:
    """Download every block's current version into a run directory that eval, generate and export
    accept. Can be done at any moment of a run."""
    from blocktrain.worker.versions import fetch_model

    fetched = fetch_model(caller(invite), out)
    if as_json:
        told = {"out": str(out), "versions": fetched.versions, "bytes_moved": fetched.bytes_moved}
        click.echo(json.dumps(told))
        return
    click.echo(
        f"{out}: blocks at versions {', '.join(map(str, fetched.versions))},"
        f" {size(fetched.bytes_moved)} moved   next: blocktrain eval {out}"
    )


@click.command("generate")
@options.run
@click.option("--prompt", default="", help="Text to continue.")
@click.option("--bytes", "count", type=click.IntRange(min=1), default=256, show_default=True)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0.0),
    default=0.8,
    show_default=True,
    help="0 takes the likeliest byte.",
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True)
@click.option("--start", type=click.Choice(["mean", "noise"]), default="mean", show_default=True)
@click.option(
    "--readout", type=click.Choice(["product", "final"]), default="product", show_default=True
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
    """Continue a prompt with RUN, one traversal per byte, keys and values cached."""
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
    """Show what RUN holds: its settings, and of each block how far it is, the text it has seen and,
    where train.eval_every asked for them, its score on valid."""
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
    built_on = ", ".join(str(version or 0) for version in block.built_on())
    score += f", built on the blocks before it at step {built_on}" if built_on else ""
    return (
        f"block {block.index}: {state}, at step {current.step}, {size(current.bytes_seen)} seen"
        f"{score}, {size(current.weights.size)} on disk"
    )
