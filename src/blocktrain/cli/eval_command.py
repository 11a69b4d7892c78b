"""blocktrain eval: the cross entropy of a run, for each way to read its prediction."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blocktrain.cli import options
from blocktrain.cli.terminal import plain

if TYPE_CHECKING:
    from blocktrain.config import DataConfig
    from blocktrain.storage.run_dir import RunDir
    from blocktrain.train.evaluate import Evaluation


@click.command("eval")
@options.run
@click.option(
    "--data", help="Text to score on, like data.source. Default: what the run was trained on."
)
@click.option(
    "--split",
    type=click.Choice(["train", "valid", "test"]),
    default="valid",
    show_default=True,
    help="Part of the text to score on.",
)
@click.option("--windows", type=click.IntRange(min=1), help="Score at most this many windows.")
@click.option(
    "--draws",
    type=click.IntRange(min=0, max=64),
    default=0,
    show_default=True,
    help="Also score from this many random starts: one alone, as in the paper, and all averaged."
    " Each takes as long as the score itself.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    help="Seed of the random starts.",
)
@click.option(
    "--fit-weights", is_flag=True, help="Also score the product with block weights fitted on valid."
)
@options.first_blocks
@options.device
@options.thread_count
@options.precision
@options.as_json
def eval_command(
    run: Path,
    data: str | None,
    split: str,
    windows: int | None,
    draws: int,
    seed: int,
    fit_weights: bool,
    first_blocks: int | None,
    device: str,
    precision: str,
    as_json: bool,
) -> None:
    """Score RUN on non-overlapping windows, in which every byte is predicted once, from the bytes
    before it alone.

    The score is the row marked *: the product of all blocks' predictions. The other rows are for
    comparison: the prediction of each block alone; that of the last block is the readout
    `final`."""
    from blocktrain.cli.progress import progress_bar
    from blocktrain.data.corpus import load_corpus
    from blocktrain.data.windows import evaluation_windows
    from blocktrain.storage.run_dir import RunDir
    from blocktrain.train.device import resolve
    from blocktrain.train.evaluate import evaluate, fit_product_weights
    from blocktrain.train.loading import load_stack

    if fit_weights and split == "valid":
        raise click.UsageError("--fit-weights fits on valid, so it needs --split test or train")
    opened = RunDir.open(run)
    compute = resolve(device, precision)
    corpus = load_corpus(_text(opened, data))
    window = opened.config.model.window
    chosen = evaluation_windows(corpus.split(split, window), window, windows)
    stack = load_stack(opened, compute).first(first_blocks)
    weights = None
    if fit_weights and len(stack.blocks) > 1:
        weights = fit_product_weights(stack, corpus.split("valid", window))
    with progress_bar("scoring windows", len(chosen), hidden=as_json) as on_scored:
        evaluation = evaluate(stack, chosen, draws, seed, weights, on_scored)
    if as_json:
        click.echo(json.dumps(_as_dict(evaluation, corpus.source, split)))
    else:
        _show(evaluation, run, corpus.source, split, compute.name)


def _text(run: "RunDir", data: str | None) -> "DataConfig":
    """The text to score on. The settings of a fetched run come from another machine, and must not
    choose which files are read here."""
    from blocktrain.errors import ConfigError

    settings = run.config.data
    if not data and run.fetched and settings.source.startswith("text:"):
        raise ConfigError(
            f"the run was trained on {plain(settings.source)} of another machine;"
            " give the same text on this machine with --data text:GLOB"
        )
    return replace(settings, source=data) if data else settings


def _as_dict(evaluation: "Evaluation", source: str, split: str) -> dict[str, Any]:
    best = evaluation.default
    return {
        "ce": best.ce,
        "perplexity": best.perplexity,
        "bits_per_byte": best.bits_per_byte,
        "start": best.start,
        "readout": best.readout,
        "source": source,
        "split": split,
        "windows": {
            "count": evaluation.windows,
            "window": evaluation.window,
            "digest": evaluation.digest,
        },
        "parameters": evaluation.parameters,
        "product_weights": evaluation.product_weights,
        "draft_agreement": evaluation.draft_agreement,
        "scores": [
            {
                "start": score.start,
                "readout": score.readout,
                "draws": score.draws,
                "ce": score.ce,
                "perplexity": score.perplexity,
                "bits_per_byte": score.bits_per_byte,
            }
            for score in evaluation.scores
        ],
    }


def _show(evaluation: "Evaluation", run: Path, source: str, split: str, compute: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(f"{run} on {plain(source)} {split}"), title_justify="left")
    for column in ("start", "readout", "CE (nats/byte)", "perplexity", "bits/byte"):
        table.add_column(column, justify="left" if column in ("start", "readout") else "right")
    last = _last_block(evaluation)
    for score in evaluation.scores:
        if last and score.readout == "final":
            continue  # the same as the last block's row
        name = score.readout + (" (final)" if score.readout == last else "")
        name += f", {score.draws} draws" if score.draws > 1 else ""
        name += " *" if score is evaluation.default else ""
        table.add_row(
            score.start,
            name,
            f"{score.ce:.4f}",
            f"{score.perplexity:.3f}",
            f"{score.bits_per_byte:.3f}",
            style="bold" if score is evaluation.default else None,
        )
    console = Console()
    console.print(table)
    for line in _explained(evaluation):
        console.print(line, highlight=False)
    console.print(
        f"{evaluation.windows} windows of {evaluation.window} bytes, digest {evaluation.digest};"
        f" {evaluation.parameters / 1e6:.2f}M parameters; {compute}",
        highlight=False,
    )
    if evaluation.draft_agreement is not None:
        console.print(
            f"block 0 alone predicts the same most likely byte as the final readout at"
            f" {100 * evaluation.draft_agreement:.1f}% of positions",
            highlight=False,
        )


def _last_block(evaluation: "Evaluation") -> str | None:
    """The readout that is the last block's prediction; None if there is only one block."""
    blocks = [score.readout for score in evaluation.scores if score.readout.startswith("block ")]
    return blocks[-1] if blocks else None


def _explained(evaluation: "Evaluation") -> list[str]:
    starts = {score.start for score in evaluation.scores}
    lines = [f"* the model's score: {evaluation.default.readout}"]
    if _last_block(evaluation):
        lines[0] += " of all blocks' predictions; final is the last block's alone"
    if "mean" in starts:
        line = "start: the blocks refine a guess, which begins at the mean of all targets"
        noise = ", or at random as in the paper; several draws are averaged"
        lines.append(line + (noise if "noise" in starts else " (--draws adds noise)"))
    return lines
