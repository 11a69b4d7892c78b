"""blocktrain plot: what a run has learned, what that cost, and how fast it answers, as pictures."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from blocktrain.cli import options
from blocktrain.cli.options import COUNT, FOLDER

if TYPE_CHECKING:
    from blocktrain.figures import Points
    from blocktrain.storage.run_dir import RunDir

TIMED_TOKENS = 64
SCORED_WINDOWS = 64
MOST_SCORES = 100_000
NATS = "nats per byte"


@click.command("plot")
@options.run
@click.option("--out", type=FOLDER, help="Folder for the pictures. Default: plots in RUN.")
@click.option("--data", help="Text to score on for latency.png, written as data.source.")
@click.option(
    "--windows", type=COUNT, default=SCORED_WINDOWS, help="Windows to score for latency.png."
)
@options.device
@options.thread_count
@options.as_json
def plot_command(
    run: Path, out: Path | None, data: str | None, windows: int, device: str, as_json: bool
) -> None:
    """Draw pictures of RUN, the folder of a run or of its coordinator. Needs blocktrain[plots].

    Of a run: loss.png, the loss of each block by step, and latency.png, the score of the first
    blocks alone (early exit) by the time they take for a token, measured here and now. Of a
    coordinator's folder: score.png, the scores of its model by the bytes of merged updates.
    """
    from blocktrain.coordinator.folder import LEDGER_FILE
    from blocktrain.figures import check_plots_installed
    from blocktrain.storage.run_dir import RunDir

    check_plots_installed()
    folder = out or run / "plots"
    if (run / LEDGER_FILE).exists():
        pictures = [_score_by_bytes(run, folder)]
    else:
        opened = RunDir.open(run)
        pictures = [] if opened.exported else [_loss_by_step(opened, folder)]
        if opened.exported or all(block.versions() for block in opened.blocks()):
            pictures.append(_score_by_latency(opened, folder, data, windows, device))
    if as_json:
        click.echo(json.dumps({"pictures": [str(picture) for picture in pictures]}))
    for picture in pictures:
        click.echo(str(picture))


def _loss_by_step(run: "RunDir", folder: Path) -> Path:
    """The training loss of each block, and its scores on valid if it has any."""
    from blocktrain.errors import RunError
    from blocktrain.figures import write_figure

    lines: dict[str, Points] = {}
    for block in run.blocks():
        records = list(block.metrics())
        for name, key in (("training", "ce"), ("valid", "valid_ce")):
            points = [(each["step"], each[key]) for each in records if each[key] is not None]
            if points:
                lines[f"block {block.index}, {name}"] = points
    if not lines:
        raise RunError(f"{run.path} is not trained yet; there is nothing to draw")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "loss.png"
    write_figure(path, f"Loss of each block, {NATS}", "steps", lines, legend="loss on")
    return path


def _score_by_latency(
    run: "RunDir", folder: Path, data: str | None, windows: int, device: str
) -> Path:
    """The score of the first one, two, ... blocks, by their time per token."""
    from blocktrain.api.models import load
    from blocktrain.data.run_text import scored_text
    from blocktrain.figures import write_figure

    corpus = scored_text(run, data).corpus
    points = []
    for count in range(1, run.config.block_count + 1):
        if not run.config.has_head(count - 1):
            continue
        model = load(run.path, device=device, blocks=count)
        next(model.stream_ids(" ", 1))  # warm-up
        began = time.perf_counter()
        tokens = len(list(model.stream_ids(" ", TIMED_TOKENS)))
        milliseconds = 1000 * (time.perf_counter() - began) / tokens
        points.append((milliseconds, model.evaluate(corpus, windows=windows).ce))
    folder.mkdir(parents=True, exist_ok=True)
    path, title = folder / "latency.png", f"Score of the first blocks, {NATS}"
    write_figure(path, title, "milliseconds per token", {"product": points}, marked=True)
    return path


def _score_by_bytes(coordinator: Path, folder: Path) -> Path:
    """The scores of the assembled model, by the bytes of the updates that its versions contain."""
    from blocktrain.errors import RunError
    from blocktrain.figures import write_figure

    points = scores_by_bytes(coordinator)
    if not points:
        raise RunError(
            f"{coordinator} has no scores yet; start a worker with --evaluate, which makes them"
        )
    folder.mkdir(parents=True, exist_ok=True)
    path, title = folder / "score.png", f"Score of the model, {NATS}"
    write_figure(path, title, "MB of merged updates", {"model": points}, marked=True)
    return path


def scores_by_bytes(coordinator: Path) -> "Points":
    """(megabytes of merged updates, cross entropy), by time."""
    from blocktrain.coordinator.folder import CoordinatorFolder
    from blocktrain.protocol.messages import UpdateClaim

    ledger = CoordinatorFolder(coordinator).operator().ledger
    with ledger.read() as tx:
        updates, scores = tx.updates.merged(), tx.history.scores_after(0, MOST_SCORES)
    ledger.close()
    sizes = [
        (row.block, row.merged_into or 0, UpdateClaim.model_validate_json(row.offer).recipe.size)
        for row in updates
    ]
    points = []
    for score in scores:
        if score.block is None:
            versions = json.loads(score.versions)
            moved = sum(size for block, version, size in sizes if version <= versions[block])
            points.append((moved / 1e6, score.ce))
    return points
