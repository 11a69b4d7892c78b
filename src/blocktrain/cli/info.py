"""blocktrain info: what a run holds, block by block."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from blocktrain.cli import options
from blocktrain.cli.plain import plain
from blocktrain.cli.sizes import size

if TYPE_CHECKING:
    from blocktrain.storage.run_dir import BlockDir


@click.command("info")
@options.run
@options.as_json
def command(run: Path, as_json: bool) -> None:
    """Show what RUN holds: its settings, and of each block how far it is, the text it has seen and,
    where train.eval_every asked for them, its score on valid."""
    from blocktrain.storage.run_dir import EXPORTED, RunDir

    opened = RunDir.open(run)
    config = opened.config
    exported = (run / EXPORTED).exists()
    blocks = [] if exported else [opened.block(index) for index in range(config.units)]
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
        f" in {config.units} block{'s' * (config.units > 1)}, window {model.window},"
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
