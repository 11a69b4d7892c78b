"""blocktrain fetch, generate, import and export: use a trained model."""

import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blocktrain.api.display import progress_bar
from blocktrain.cli import options
from blocktrain.cli.options import AMOUNT, COUNT, FILE_OR_FOLDER, SEED
from blocktrain.cli.terminal import command, size

if TYPE_CHECKING:
    pass


@click.command("fetch")
@options.invite
@options.at
@options.out("Run folder: new, or of an earlier download of the same run, which is updated.")
@options.as_json
def fetch_command(invite: str, at: tuple[str, ...], out: Path, as_json: bool) -> None:
    """Download the newest version of every block as a run folder, for eval, generate, export and
    serve, and the text to score it on. This works at any time during a run, and updates an earlier
    download."""
    from blocktrain.worker.downloads import fetch_model

    fetched = fetch_model(options.client_of(invite, at), out)
    if as_json:
        answer = {"out": str(out), "versions": fetched.versions, "bytes_moved": fetched.bytes_moved}
        click.echo(json.dumps(answer))
        return
    click.echo(
        f"{out}: blocks at versions {', '.join(map(str, fetched.versions))},"
        f" {size(fetched.bytes_moved)} downloaded   next: {command('eval', out)}"
    )


@click.command("generate")
@options.run
@click.option("--prompt", default="", show_default=False, help="Text to continue.")
@click.option(
    "--tokens",
    "--bytes",
    "count",
    type=COUNT,
    default=256,
    help="Most tokens to generate; without a tokenizer, a token is a byte.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0.0),
    default=0.8,
    help="Sampling temperature; 0 always takes the most likely token.",
)
@click.option("--seed", type=SEED, default=0, help="Seed of the sampling.")
@options.choice(
    "--start",
    "mean",
    "noise",
    help="First guess that the blocks refine: the mean of all targets, or random noise.",
)
@options.choice(
    "--readout",
    "auto",
    "product",
    "final",
    help="Prediction to use. product: all blocks' multiplied; final: the last block's; auto:"
    " product if tokens are bytes, else final.",
)
@options.first_blocks
@options.device
@options.thread_count
@options.precision
@options.profile
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
    profile: Path | None,
    as_json: bool,
) -> None:
    """Continue a prompt with the model of RUN."""
    if not math.isfinite(temperature):
        raise click.BadParameter("must be a finite number", param_hint="--temperature")
    from blocktrain.api.models import load
    from blocktrain.serve.router.profile import NO_PROFILER, Profiler

    model = load(run, device=device, precision=precision, blocks=first_blocks, frozen=True)
    profiler = Profiler() if profile else NO_PROFILER
    options: dict[str, Any] = {
        "temperature": temperature,
        "seed": seed,
        "readout": None if readout == "auto" else readout,
        "start": start,
        "profiler": profiler,
    }
    started = time.perf_counter()
    if as_json:
        ids = list(model.stream_ids(prompt, count, **options))
        seconds = time.perf_counter() - started
        data = model.tokenizer.decode(ids)
        answer = {
            "prompt": prompt,
            "text": data.decode("utf-8", errors="replace"),
            "tokens": len(ids),
            "bytes": len(data),
            "seconds": seconds,
        }
        click.echo(json.dumps(answer))
    else:
        click.echo(prompt, nl=False)
        for piece in model.stream(prompt, count, **options):
            click.echo(piece, nl=False)
            sys.stdout.flush()
        click.echo()
    if profile:
        profiler.write(profile)
        click.echo(profiler.table(), err=True)


@click.command("import")
@click.argument("source")
@click.option("--blocks", type=COUNT, required=True, help="Number of blocks to cut the model into.")
@options.out("New run folder. The same command resumes an interrupted import.")
@click.option(
    "--window",
    type=click.IntRange(min=8),
    help="Context length in tokens; a longer one takes more memory. Default: the model's own, but"
    " at most 4096.",
)
@options.as_json
def import_command(source: str, blocks: int, out: Path, window: int | None, as_json: bool) -> None:
    """Import a model in Hugging Face's format as a run. SOURCE is a folder, or the name of a
    repository on the hub (OWNER/NAME).

    Supported architectures are Llama, Mistral, Qwen2 and Qwen3. Weights keep their values and
    types.
    """
    from blocktrain.interop.checkpoint import open_checkpoint
    from blocktrain.interop.importing import Import
    from blocktrain.training.memory_check import serving_problem

    planned = Import(open_checkpoint(source), blocks, window)
    # The import itself copies in pieces, and so needs little memory.
    if problem := serving_problem(planned.config, "auto", "auto", "full", range(blocks), blocks):
        click.echo(f"note: {problem}", err=True)
    with progress_bar("copying", planned.size, hidden=as_json, of_bytes=True) as on_copied:
        planned.write(out, on_copied)
    model = planned.config.model
    if as_json:
        click.echo(json.dumps({"out": str(out), "bytes": planned.size, "blocks": blocks}))
        return
    click.echo(
        f"{out}: {model.layers} layers of width {model.width} in {blocks}"
        f" block{'s' * (blocks > 1)}, window {model.window}, {size(planned.size)}"
        f"   next: {command('generate', out, '--prompt', 'Once upon a time')}"
    )


@click.command("export")
@options.run
@options.choice(
    "--to",
    "run",
    "hf",
    "gguf",
    help="run: one safetensors file that eval, generate and serve accept like a run; hf: a folder"
    " for transformers, vLLM and others; gguf: a file for llama.cpp and others.",
)
@click.option("--out", type=FILE_OR_FOLDER, required=True, help="New folder, or new file for gguf.")
@options.choice(
    "--readout",
    "final",
    "product",
    help="Prediction to export. hf and gguf need final, the last block's: other programs cannot"
    " compute the product.",
)
@options.choice(
    "--dtype",
    "stored",
    "f32",
    "bf16",
    "f16",
    help="Number type of the weights for hf and gguf. stored: the same as in RUN.",
)
@click.option("--shard-gb", type=AMOUNT, default=5.0, help="Size limit of a weights file for hf.")
@options.as_json
def export_command(
    run: Path, to: str, out: Path, readout: str, dtype: str, shard_gb: float, as_json: bool
) -> None:
    """Export the model of RUN for other programs or machines.

    hf and gguf need model.layer = llama and a tokenizer. A cascade is exported with the readout
    `final`.
    """
    from blocktrain.interop.gguf_file import GgufExport
    from blocktrain.interop.hugging_face import HuggingFaceExport, refuse_unexportable
    from blocktrain.storage.run_dir import RunDir
    from blocktrain.training.estimation import training_flops

    opened = RunDir.open(run)
    if to == "run":
        path = opened.export(out)
    else:
        refuse_unexportable(opened.config, readout)
        export = (
            HuggingFaceExport(opened, int(shard_gb * 1e9), dtype, training_flops(opened))
            if to == "hf"
            else GgufExport(opened, dtype)
        )
        with progress_bar("copying", export.size, hidden=as_json, of_bytes=True) as on_copied:
            path = export.write(out, on_copied)
    files = path.iterdir() if path.is_dir() else [path]
    count = sum(file.stat().st_size for file in files)
    if as_json:
        click.echo(json.dumps({"file": str(path), "bytes": count}))
    else:
        click.echo(f"{path}  {size(count)}")
