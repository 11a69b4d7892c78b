"""blocktrain generate: continue a prompt, byte by byte."""

import codecs
import json
import math
import os
import sys
import time
from pathlib import Path

import click

from blocktrain.cli import options


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
@options.precision
@options.as_json
def command(
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
    from blocktrain.model.generate import Sampling, generate
    from blocktrain.storage.run_dir import RunDir
    from blocktrain.train.assemble import load_stack
    from blocktrain.train.device import resolve

    stack = load_stack(RunDir.open(run), resolve(device, precision)).first(first_blocks)
    sampling = Sampling(temperature, seed, start, readout)
    started = time.perf_counter()
    stream = generate(stack, os.fsencode(prompt), count, sampling)
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
