"""blocktrain info: the settings, size and progress of a run, wherever it comes from."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blocktrain.cli import options
from blocktrain.cli.terminal import compute, echo_words, plain, score, size

if TYPE_CHECKING:
    from blocktrain.config import Config
    from blocktrain.storage.block_dir import BlockDir
    from blocktrain.storage.run_dir import RunDir, TrainingRecord


@click.command("info")
@options.run
@options.as_json
def info_command(run: Path, as_json: bool) -> None:
    """Show the settings, parameters, tokenizer and progress of RUN: trained here, fetched,
    imported or exported, or a Hugging Face folder. Scores are shown if there are any: of training
    with train.eval_every, or of the coordinator that RUN was fetched from."""
    from blocktrain.storage.run_dir import RunDir

    if (run / "config.json").is_file() and not (run / "config.toml").exists():
        _show_hugging_face(run, as_json=as_json)
        return
    opened = RunDir.open(run)
    if as_json:
        click.echo(json.dumps(_as_dict(opened)))
        return
    for line in _lines(opened):
        echo_words(line, indent=2)


def _show_hugging_face(folder: Path, *, as_json: bool) -> None:
    from blocktrain.interop.checkpoint import open_checkpoint
    from blocktrain.interop.importing import Import

    config = Import(open_checkpoint(str(folder)), blocks=1).config
    if as_json:
        answer = {"config": config.to_dict(), "parameters": _parameters(config)}
        click.echo(json.dumps(answer))
        return
    echo_words(f"{folder}: a Hugging Face folder; {_model(config)}", indent=2)
    echo_words(_tokenizer(config, trained_here=False), indent=2)


def _as_dict(run: "RunDir") -> dict[str, Any]:
    blocks = [
        {
            "index": block.index,
            "finished": block.finished(),
            "versions": [asdict(version) for version in block.versions()],
        }
        for block in ([] if run.exported else run.blocks())
    ]
    return {
        "config": run.config.to_dict(),
        "parameters": _parameters(run.config),
        "exported": run.exported,
        "origin": dict(run.origin) if run.origin else None,
        "trained": asdict(run.trained) if run.trained else None,
        "blocks": blocks,
    }


def _lines(run: "RunDir") -> Iterator[str]:
    from blocktrain.storage.run_dir import EXPORTED

    config, origin = run.config, run.origin
    training = f", data {plain(config.data.source)}, seed {config.train.seed}" * (not origin)
    yield f"{run.path}: {_model(config)}{training}"
    if origin:
        revision = f" at revision {origin['revision']}" if origin["revision"] else ""
        yield f"imported from {plain(origin['source'])}{revision}"
    elif run.exported:
        yield f"{'fetched' if run.fetched else 'exported'}: {run.path / EXPORTED}"
    yield _tokenizer(config, trained_here=not origin)
    if ends := config.train.extended_at:
        listed = ", ".join(map(str, ends))
        yield f"extended at step {listed}; now {config.train.steps} steps per block"
    if run.trained:
        yield from _trained_lines(run.trained, config)
    if run.exported:
        return
    blocks = run.blocks()
    yield from (_block_line(block, config) for block in blocks)
    if len(blocks) > 1:
        total = sum(block.current().bytes_seen for block in blocks if block.versions())
        yield f"all blocks together: {size(total)} seen"
    steps = [block.versions()[-1].step if block.versions() else 0 for block in blocks]
    yield f"compute: {compute(config, steps)}"


def _model(config: "Config") -> str:
    model, blocks = config.model, config.block_count
    return (
        f"{config.objective.kind}, {model.layers} layers of width {model.width} in {blocks}"
        f" block{'s' * (blocks > 1)}, window {model.window},"
        f" {_parameters(config) / 1e6:,.2f}M parameters"
    )


def _parameters(config: "Config") -> int:
    from blocktrain.config.sizes import block_sizes

    return sum(block.parameters for block in block_sizes(config))


def _tokenizer(config: "Config", *, trained_here: bool) -> str:
    vocabulary = config.vocabulary
    if vocabulary.is_bytes:
        return "tokenizer: none, a token is a byte"
    length = f", {vocabulary.bytes_per_token:.2f} bytes each in the run's text" * trained_here
    return f"tokenizer {vocabulary.digest[:12]}: {vocabulary.size:,} tokens{length}"


def _trained_lines(trained: "TrainingRecord", config: "Config") -> Iterator[str]:
    per_token = config.vocabulary.bytes_per_token
    for index, step in enumerate(trained.steps):
        version = f"version {trained.versions[index]}, " if trained.versions else ""
        ce = trained.ces[index]
        scored = f", valid CE {score(ce, per_token)}" if ce is not None else ""
        seen = size(trained.bytes_seen[index])
        yield f"block {index}: {version}{step} of {config.train.steps} steps, {seen} seen{scored}"
    yield f"compute: {compute(config, trained.steps)}"
    if trained.ce is not None:
        yield f"the whole model: valid CE {score(trained.ce, per_token)}"


def _block_line(block: "BlockDir", config: "Config") -> str:
    if not block.versions():
        return f"block {block.index}: not trained yet"
    current = block.current()
    reached = f"{block.versions()[-1].step} of {config.train.steps} steps"
    state = "finished" if block.finished() else reached
    valid_ce, notes = current.valid_ce, ""
    if valid_ce is not None:
        notes = f", valid CE {score(valid_ce, config.vocabulary.bytes_per_token)}"
    predecessors = ", ".join(str(version or 0) for version in block.built_on())
    notes += f", built on the preceding blocks at step {predecessors}" if predecessors else ""
    return (
        f"block {block.index}: {state}, at step {current.step}, {size(current.bytes_seen)} seen"
        f"{notes}, {size(current.weights.size)} on disk"
    )
