"""Measures tokens per second on a CPU, next to transformers with the same model.

    PYTHONPATH=src:. python bench/serving_cpu.py --out DIR [--layers 28] [--rows 1 8]

The model has random weights in the shape of Qwen3-0.6B (--layers makes it smaller). Each program
continues prompts of 64 tokens greedily in a process of its own. OpenMP's threads wait as those of
blocktrain's commands do in all of them, so that other programs disturb them alike; with --threads 1
they hardly do. blocktrain runs what `generate` and a stage run; transformers runs its forward pass
with its dynamic and with its static cache, without the work of its `generate`. A step's time is the
mean of the tokens after the first. Programs take turns, and the fastest of --rounds counts, because
other programs on the machine only ever add time.

The limit is the time of reading the weights once, at the speed at which this machine reads memory.
The programs' tokens are compared. llama.cpp needs llama-cpp-python and --gguf. Writes
DIR/serving-cpu.json.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tests.support.checkpoints import saved

from blocktrain.environment import sleep_at_barriers
from blocktrain.interop.checkpoint import open_checkpoint
from blocktrain.interop.importing import Import
from blocktrain.serve.ring.activations import joined, split_rows
from blocktrain.serve.ring.batch import SlotLimits
from blocktrain.serve.ring.compute import BlockSource, StageCompute
from blocktrain.serve.router.decode import (
    AnswerCost,
    GenerationRequest,
    TraversalCost,
    new_decoding,
)
from blocktrain.serve.router.first_block import FirstBlock
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.device import resolve
from quality import provenance
from serving import Row, table
from serving_limit import Hardware

BLOCKS, PROMPT_TOKENS = 4, 64
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PROGRAMS = ("blocktrain", "transformers-dynamic", "transformers-static", "llama.cpp")
COLUMNS = {
    "program": "{program}",
    "weights": "{weights}",
    "requests": "{requests}",
    "first token s": "{first_seconds:.3f}",
    "ms per step": "{step_ms:.1f}",
    "tokens/s": "{tokens_per_second:.2f}",
    "of the limit": "{of_limit:.2f}",
    "same tokens": "{as_first}",
}
# Continues prompts by a number of tokens; yields the requests' newest tokens.
Program = Callable[[list[list[int]], int], Iterator[list[int]]]


def checkpoint(folder: Path, layers: int) -> Path:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        hidden_size=1024, num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, intermediate_size=3072, vocab_size=151_936, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, rms_norm_eps=1e-6,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return saved(transformers.Qwen3ForCausalLM(config).to(torch.bfloat16), folder)


def memory_rate() -> float:
    """Bytes per second of reading."""
    return Hardware.measured(resolve("cpu", "fp32")).bytes_per_second


def ours(run: RunDir, precision: str, weights: str) -> Program:
    source, compute = BlockSource(run, weights), resolve("cpu", precision)
    config = run.config.with_settings(vocab__eos=())  # no answer ends early
    modules = [source.load(block, compute) for block in range(config.block_count)]

    def go(prompts: list[list[int]], count: int) -> Iterator[list[int]]:
        limits = SlotLimits(requests=len(prompts), cache_bytes=1 << 40)
        cuts = (range(1), range(1, config.block_count))
        first, rest = (
            StageCompute(config, cut, modules[cut.start : cut.stop], compute, "final", limits)
            for cut in cuts
        )
        front = FirstBlock(first)
        decodings = [
            new_decoding(
                GenerationRequest(prompt, count, "ar"), config, AnswerCost(), TraversalCost()
            )
            for prompt in prompts
        ]
        for _ in range(count):
            proposals = {n: each.propose() for n, each in enumerate(decodings)}
            result = rest.step(joined(front.step(proposals)))
            carried = [rest.carried(row) for row in result.rows]
            parts = {part.rows[0].request: part for part in split_rows(result, carried)}
            yield [
                decodings[n].take(parts[n].rows[0], parts[n].predictions)[0].id
                for n in range(len(prompts))
            ]

    return go


def with_cache(model: Any, kind: str) -> Program:
    """transformers' own forward pass and cache, without the work of its `generate`."""

    @torch.inference_mode()
    def go(prompts: list[list[int]], count: int) -> Iterator[list[int]]:
        length = len(prompts[0]) + count
        cache = (
            transformers.StaticCache(config=model.config, max_cache_len=length)
            if kind == "static"
            else transformers.DynamicCache(config=model.config)
        )
        ids = torch.tensor(prompts)
        for _ in range(count):
            output = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids = output.logits[:, -1:].argmax(dim=-1)
            yield ids[:, 0].tolist()

    return go


def in_llama_cpp(path: Path, threads: int) -> Program:
    import llama_cpp

    model = llama_cpp.Llama(
        str(path), n_ctx=512, n_threads=threads, n_threads_batch=threads, verbose=False
    )

    def go(prompts: list[list[int]], count: int) -> Iterator[list[int]]:
        model.reset()
        tokens = model.generate(prompts[0], temp=0.0, reset=True)
        for token, _ in zip(tokens, range(count), strict=False):
            yield [token]

    return go


def timed(program: Program, prompts: list[list[int]], count: int) -> tuple[Row, list[list[int]]]:
    started = time.perf_counter()
    tokens, moments = [], []
    for newest in program(prompts, count):
        moments.append(time.perf_counter())
        tokens.append(newest)
    step = (moments[-1] - moments[0]) / (count - 1)
    return {"first_seconds": moments[0] - started, "step_seconds": step}, tokens


def prompts_of(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 50_000, (count, PROMPT_TOKENS), generator=generator).tolist()


def weight_bytes(run: RunDir, itemsize: int, in_8_bits: bool) -> int:
    """What one step reads. Tied weights are stored twice, but read once; single embeddings do not
    count. The head is never in 8 bits."""
    layers = 0
    for block in range(run.config.block_count):
        for name, tensor in run.read_block(block):
            layers += 0 if name.startswith(("embed", "head")) else tensor.size
    head = run.config.vocabulary.size * run.config.model.width
    return layers * (1 if in_8_bits else itemsize) + head * itemsize


def measured(args: argparse.Namespace, place: Path) -> list[Row]:
    """One program with one kind of weights, in this process: every number of requests."""
    program, found = chosen(args, place), []
    for count in args.rows:
        timed(program, prompts_of(count), 3)  # warm
        row, tokens = timed(program, prompts_of(count), args.tokens)
        found.append({**row, "requests": count, "tokens": tokens})
    return found


def chosen(args: argparse.Namespace, place: Path) -> Program:
    (name,), (kind,) = args.programs, args.weights
    precision, weights = kind.split("-")
    if name == "blocktrain":
        return ours(RunDir.open(place / "run"), precision, weights)
    if name == "llama.cpp":
        return in_llama_cpp(args.gguf, args.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        place / "checkpoint", dtype=DTYPES[precision]
    )
    return with_cache(model.eval(), name.removeprefix("transformers-"))


def in_child(args: argparse.Namespace, place: Path, name: str, kind: str) -> list[Row]:
    """`measured` in a process of its own."""
    counts = [str(count) for count in args.rows]
    words = ["--programs", name, "--weights", kind, "--rows", *counts, "--model", str(place),
             "--tokens", str(args.tokens), "--threads", str(args.threads),
             "--out", str(args.out), "--child"]  # fmt: skip
    words += ["--gguf", str(args.gguf)] if args.gguf else []
    sleep_at_barriers()  # the child inherits it
    answer = subprocess.run(
        [sys.executable, __file__, *words],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    ).stdout
    rows: list[Row] = json.loads(answer.splitlines()[-1])
    return rows


def compared(args: argparse.Namespace, place: Path, run: RunDir, rate: float) -> list[Row]:
    """The fastest round of every program."""
    rows: list[Row] = []
    for kind in args.weights:
        precision, weights = kind.split("-")
        programs = [p for p in args.programs if weights == "full" or p == "blocktrain"]
        best: dict[tuple[str, int], Row] = {}
        for name in programs * args.rounds:
            for row in in_child(args, place, name, kind):
                key = name, row["requests"]
                if key not in best or row["step_seconds"] < best[key]["step_seconds"]:
                    best[key] = row
        read_seconds = weight_bytes(run, DTYPES[precision].itemsize, weights == "int8") / rate
        named = precision if weights == "full" else f"{precision}, {weights}"
        for (name, count), row in best.items():
            step, tokens = row["step_seconds"], row.pop("tokens")
            rows.append({
                **row, "program": name, "weights": named, "step_ms": 1e3 * step,
                "tokens_per_second": count / step, "of_limit": read_seconds / step,
                "as_first": tokens == best[programs[0], count].get("tokens", tokens),
            })  # fmt: skip
            best[name, count]["tokens"] = tokens
        print(table(rows, COLUMNS), flush=True)
    return rows


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="keep the checkpoint and the run here")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--tokens", type=int, default=24, help="of an answer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--weights", nargs="+", default=["fp32-full", "bf16-full"])
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS[:3])
    parser.add_argument("--gguf", type=Path, help="the same model for llama.cpp")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.child:
        print(json.dumps(measured(args, args.model)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        place = args.model or Path(scratch)
        if not (place / "checkpoint" / "config.json").exists():
            checkpoint(place / "checkpoint", args.layers)
        if not (place / "run" / "manifest.json").exists():
            Import(open_checkpoint(str(place / "checkpoint")), BLOCKS).write(place / "run")
        run = RunDir.open(place / "run")
        rate = memory_rate()
        rows = compared(args, place, run, rate)
    report = {**provenance(), "memory_bytes_per_second": rate, "rows": rows}
    (args.out / "serving-cpu.json").write_text(json.dumps(report, indent=1))
    print(f"memory {rate / 1e9:.1f} GB/s, {args.threads} threads; commit {report['commit']}")


if __name__ == "__main__":
    main()
