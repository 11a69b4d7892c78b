"""blocktrain train, eval and tokenizer: train a run on this machine, and score it on held-out text;
train a tokenizer."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from blocktrain.api.display import stop_on_signal
from blocktrain.cli import options
from blocktrain.cli.options import COUNT, SEED
from blocktrain.cli.terminal import (
    command,
    plain,
    tokenising_progress,
    training_progress,
)
from blocktrain.environment import PROGRAM

if TYPE_CHECKING:
    from blocktrain.training.evaluate import Evaluation


@click.command("train")
@options.config
@options.overrides
@options.out("Folder of the run.")
@click.option(
    "--block", "blocks", type=int, multiple=True, help="Train only this block; repeatable."
)
@click.option(
    "--parallel",
    type=COUNT,
    default=1,
    help="Number of blocks to train at the same time, each in its own process.",
)
@options.thread_count
@options.force
@options.log_options("warning")
@options.as_json
def train_command(
    config_path: Path,
    overrides: tuple[str, ...],
    out: Path,
    blocks: tuple[int, ...],
    parallel: int,
    force: bool,
    as_json: bool,
) -> None:
    """Train a run. The same command resumes it after an interruption.

    The loss and ce shown are not scores: they are those of the training batches, and the input of a
    denoising block contains the answer plus noise. `blocktrain eval` computes scores.
    """
    from blocktrain.config import load_config
    from blocktrain.errors import ConfigError

    config = load_config(config_path, overrides)
    for block in blocks:
        if not 0 <= block < config.block_count:
            raise ConfigError(f"--block {block}: the run has blocks 0 to {config.block_count - 1}")
    for warning in config.warnings:
        click.echo(f"warning: {warning}", err=True)
    chosen = list(blocks) or list(range(config.block_count))
    if not force:
        from blocktrain.training.memory_check import check_run

        check_run(config, out, blocks, parallel)

    from blocktrain.training.run_session import open_session  # loads torch, which takes seconds

    with tokenising_progress(hidden=as_json) as on_text:
        session = open_session(config, out, on_text)
    for note in session.notes(chosen):
        click.echo(note, err=True)
    with stop_on_signal() as stop, training_progress("block", as_json=as_json) as on_progress:
        if parallel > 1:
            done = session.train_side_by_side(chosen, parallel, on_progress, stop, PROGRAM)
        else:
            done = session.train_in_turn(chosen, on_progress, stop)
    if not done:
        click.echo(f"stopped; the same command resumes {out}", err=True)
        raise SystemExit(130)
    if not as_json:
        click.echo(f"trained: {out}   next: {command('eval', out)}")


@click.command("eval")
@options.run
@click.option(
    "--data", help="Text to score on, written as data.source. Default: the run's own text."
)
@click.option(
    "--split",
    type=click.Choice(["train", "valid", "test"]),
    default="valid",
    help="Part of the text to score on.",
)
@click.option("--windows", type=COUNT, help="Score at most this many windows.")
@click.option(
    "--draws",
    type=click.IntRange(min=0, max=64),
    default=0,
    help="Also score with this many random starts: one alone, as in the paper, and all averaged."
    " Each takes as long as the score itself.",
)
@click.option("--seed", type=SEED, default=0, help="Seed of the random starts.")
@click.option(
    "--fit-weights",
    is_flag=True,
    help="Also score a weighted product, with weights fitted on valid.",
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
    """Score RUN on non-overlapping windows. Every token is predicted once, from the tokens before
    it.

    The row marked * is the score: the product of all blocks' predictions if tokens are bytes, else
    the last block's prediction (final), which is what `serve` and `export` use too. The other rows
    are for comparison.
    """
    from blocktrain.api.models import load
    from blocktrain.data.run_text import scored_text
    from blocktrain.storage.run_dir import RunDir
    from blocktrain.training.device import resolve

    if fit_weights and split == "valid":
        raise click.UsageError("--fit-weights fits on valid; score on --split test or train")
    compute = resolve(device, precision)
    with tokenising_progress(hidden=as_json) as on_text:
        corpus = scored_text(RunDir.open(run), data, on_text).corpus
    model = load(run, device=device, precision=precision, blocks=first_blocks)
    evaluation = model.evaluate(
        corpus, split=split, windows=windows, draws=draws, seed=seed, fit_weights=fit_weights,
        progress=not as_json,
    )  # fmt: skip
    if as_json:
        click.echo(json.dumps(_as_dict(evaluation, corpus.source, split)))
    else:
        _show(evaluation, run, corpus.source, split, compute.name)


def _as_dict(evaluation: "Evaluation", source: str, split: str) -> dict[str, Any]:
    fields = asdict(evaluation)
    del fields["readout"]  # the score has its own
    windows = {"count": fields.pop("windows")}
    windows |= {name: fields.pop(name) for name in ("window", "digest")}
    return {
        **evaluation.default.row(),
        "source": source,
        "split": split,
        "windows": windows,
        **fields,
        "scores": evaluation.rows(),
    }


def _show(evaluation: "Evaluation", run: Path, source: str, split: str, compute: str) -> None:
    """Print the scores. They are per byte of text, so that models of bytes and of tokens can be
    compared."""
    unit = "bytes" if evaluation.default.bytes_per_token == 1.0 else "tokens"
    columns = ["start", "readout", "CE (nats/byte)", "perplexity", "bits/byte"]
    if unit == "tokens":
        columns[3:] = ["bits/byte", "CE (nats/token)", "perplexity"]
    table = Table(title=Text(f"{run} on {plain(source)} {split}"), title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in ("start", "readout") else "right")
    last, default = _last_block(evaluation), evaluation.default
    for score in evaluation.scores:
        if last and score.readout == "final":
            continue  # equal to the last block's row
        same = default.readout == "final" and (score.readout, score.start) == (last, default.start)
        is_default = score is default or same
        name = score.readout + (" (final)" if score.readout == last else "")
        name += f", {score.draws} draws" if score.draws > 1 else ""
        cells = {
            "start": score.start,
            "readout": name + " *" * is_default,
            "CE (nats/byte)": f"{score.ce:.4f}",
            "bits/byte": f"{score.bits_per_byte:.3f}",
            "CE (nats/token)": f"{score.ce_per_token:.4f}",
            "perplexity": f"{score.perplexity:.3f}",
        }
        table.add_row(*(cells[name] for name in columns), style="bold" if is_default else None)
    console = Console(highlight=False)
    console.print(table)
    for line in _legend(evaluation):
        console.print(line)
    console.print(
        f"{evaluation.windows} windows of {evaluation.window} {unit}, digest {evaluation.digest};"
        f" {evaluation.parameters / 1e6:.2f}M parameters; {compute}"
    )
    if unit == "tokens":
        console.print(f"a token of these windows is {evaluation.default.bytes_per_token:.3f} bytes")
    if evaluation.draft_agreement is not None:
        console.print(
            f"block 0 alone predicts the same most likely {unit[:-1]} as the final readout at"
            f" {100 * evaluation.draft_agreement:.1f}% of positions"
        )


def _last_block(evaluation: "Evaluation") -> str | None:
    """The readout of the last block; None if there is only one block."""
    blocks = [score.readout for score in evaluation.scores if score.readout.startswith("block ")]
    return blocks[-1] if blocks else None


def _legend(evaluation: "Evaluation") -> list[str]:
    starts = {score.start for score in evaluation.scores}
    lines = [f"* the model's score: {evaluation.default.readout}"]
    if _last_block(evaluation):
        lines[0] += " (product: of all blocks' predictions; final: the last block's alone)"
    if "mean" in starts:
        line = "start: the blocks refine a guess, which begins at the mean of all targets"
        noise = ", or at random as in the paper; several draws are averaged"
        lines.append(line + (noise if "noise" in starts else " (--draws adds noise)"))
    return lines


@click.group("tokenizer")
def tokenizer_command() -> None:
    """Train a tokenizer on a text."""


@tokenizer_command.command("train")
@click.option("--data", required=True, help="Text to train on, written as data.source.")
@click.option("--size", type=click.IntRange(min=257), default=8192, help="Number of tokens.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="New file, for use as data.tokenizer.",
)
@options.as_json
def train_tokenizer_command(data: str, size: int, out: Path, as_json: bool) -> None:
    """Train a byte-level BPE tokenizer, on at most 64 MiB of the training text.

    Models with the same tokenizer can be compared token by token, and one of them can write drafts
    for another. For a single run, data.tokenizer=bpe:SIZE trains a tokenizer of its own.
    """
    from blocktrain.config import DataConfig
    from blocktrain.data.run_text import train_tokenizer
    from blocktrain.data.tokenizer import TOKENIZER_FILE
    from blocktrain.errors import RunError
    from blocktrain.files import write_bytes

    if out.exists():
        raise RunError(f"{out} exists already; use another --out")
    with tokenising_progress(hidden=as_json) as on_text:
        tokenizer = train_tokenizer(DataConfig(source=data), size, on_text)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(out, tokenizer.files[TOKENIZER_FILE])
    if as_json:
        click.echo(json.dumps({"file": str(out), "tokens": tokenizer.count}))
    else:
        click.echo(f"{out}: {tokenizer.count:,} tokens   next: --set data.tokenizer={out}")
