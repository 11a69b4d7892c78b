"""Measures models in Hugging Face's format, tokenizers and what tokens cost, on the CPU.

    PYTHONPATH=src:. python bench/interop.py PART... --out DIR [--tokenizer DIR --text FILE]

Parts:

    parity      logits beside transformers after import and after export; tensors and config after
                both; greedy tokens in one process, over three stages, and by transformers
    gguf        greedy tokens of a model trained here, beside llama.cpp (needs llama-cpp-python)
    score       the score of an exported model, beside transformers
    wire        bytes that a stage sends per position
    tokenising  tokens of a corpus beside a bare loop over the tokenizers library, and memory
    import      a checkpoint with the shapes of a 7B model beside `cp`: time and memory
    blocks      denoising blocks and end-to-end models on bytes and on tokens, at equal compute

Models of `parity` have random weights; those of other parts are trained on --text. Writes one JSON
file per part into DIR and prints it.
"""

import argparse
import json
import math
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from blocktrain.config import load_config
from blocktrain.config.settings import Vocabulary
from blocktrain.data.corpus import evaluation_windows
from blocktrain.data.run_text import stored_text
from blocktrain.numerics.sampling import Sampling
from blocktrain.protocol.framing import encode
from blocktrain.serve.ring.activations import Activations, Choice, Row
from blocktrain.serve.ring.envelope import StepEnvelope, step_message
from blocktrain.serve.router.first_block import generate
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.device import resolve
from blocktrain.training.estimation import flops_per_step
from blocktrain.training.stored_models import load_stack
from quality import provenance

COMMAND = [sys.executable, "-m", "blocktrain.cli.main"]
CPU = resolve("cpu", "fp32")
PRESET = Path(__file__).resolve().parent.parent / "configs" / "tiny-tokens.toml"
POSITIONS, GREEDY_TOKENS, LLAMA_TOKENS, PROMPT_TOKENS = 128, 128, 64, 16
REPEATS = 2


def blocktrain(*arguments: object) -> str:
    """Run a command and return what it prints."""
    words = [*COMMAND, *map(str, arguments)]
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout


def settings(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


# parity, gguf and score


def parity(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    import transformers
    from tests.support.checkpoints import FAMILIES, random_model, saved

    for family in FAMILIES:
        folder = args.out / "parity" / family
        model = random_model(family, 4, bos_token_id=None, eos_token_id=None)
        saved(model, folder / "checkpoint")
        blocktrain("import", folder / "checkpoint", "--blocks", 4, "--out", folder / "run")
        blocktrain("export", folder / "run", "--to", "hf", "--out", folder / "hf",
                   "--shard-gb", 0.001)  # fmt: skip
        run = RunDir.open(folder / "run")
        endless = run.config.with_settings(vocab__eos=())  # 0 ends an answer: use no such prompt
        stack = replace(load_stack(run, CPU), config=endless)
        ids = next(drawn for seed in range(50) if 0 not in greedy_here(
            stack, (drawn := random_ids(seed))[0, :PROMPT_TOKENS].tolist()))  # fmt: skip
        exported = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf")
        with torch.no_grad():
            ours = stack.predictions(ids)[-1](slice(None))
            differences = [float((ours - other(ids).logits).abs().max())
                           for other in (model, exported)]  # fmt: skip
        prompt = ids[0, :PROMPT_TOKENS].tolist()
        names = [run_token_name(run, token) for token in greedy_here(stack, prompt)]
        yield {
            "model": family,
            "largest difference of logits after import": differences[0],
            "largest difference of logits after export": differences[1],
            "tensors bit-identical": tensors(folder / "checkpoint") == tensors(folder / "hf"),
            "config unchanged": described(folder / "checkpoint") == described(folder / "hf"),
            "greedy tokens": len(names),
            "as transformers": names
            == [run_token_name(run, token) for token in greedy_in_transformers(model, prompt)],
            "as over three stages": [
                names == greedy_over_stages(folder, prompt, mode) for mode in ("ar", "speculative")
            ],
        }


def random_ids(seed: int) -> torch.Tensor:
    from tests.support.checkpoints import TOKENS

    return torch.randint(1, TOKENS, (2, POSITIONS), generator=torch.Generator().manual_seed(seed))


def greedy_here(stack: Any, prompt: list[int]) -> list[int]:
    return list(generate(stack, prompt, GREEDY_TOKENS, readout="final"))


def greedy_in_transformers(model: Any, prompt: list[int]) -> list[int]:
    import transformers

    options = transformers.GenerationConfig(max_new_tokens=GREEDY_TOKENS, do_sample=False)
    made: list[int] = model.generate(torch.tensor([prompt]), generation_config=options)[0].tolist()
    return made[len(prompt) :]


def greedy_over_stages(folder: Path, prompt: list[int], mode: str) -> list[str]:
    """The names of the tokens that `serve` and three stages write, each in a process."""
    import httpx
    from tests.support.processes import Processes, free_port

    address = f"127.0.0.1:{free_port()}"
    (folder / mode).mkdir()
    with Processes(folder / mode) as processes:
        server = processes.serve(folder / "run", address)
        processes.wait_for("it serves", lambda: "serving" in server.log.read_text(), 180.0)
        body = {"prompt": prompt, "max_tokens": GREEDY_TOKENS, "temperature": 0, "logprobs": 0,
                "mode": mode}  # fmt: skip
        answer = httpx.post(f"http://{address}/v1/completions", json=body, timeout=120.0).json()
    tokens: list[str] = answer["choices"][0]["logprobs"]["tokens"]
    return tokens


def run_token_name(run: RunDir, token: int) -> str:
    from blocktrain.data.tokenizer import stored_tokenizer
    from blocktrain.serve.http.served_model import ServedModel

    tokenizer = stored_tokenizer(run.tokenizer_files(), run.config.vocab)
    return ServedModel("", run.config, tokenizer).token_name(token)


def tensors(folder: Path) -> dict[str, tuple[str, bytes]]:
    from safetensors.torch import load_file

    return {
        name: (str(tensor.dtype), tensor.contiguous().view(torch.uint8).numpy().tobytes())
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def described(folder: Path) -> dict[str, Any]:
    import transformers

    config: dict[str, Any] = transformers.AutoConfig.from_pretrained(folder).to_dict()
    return {name: value for name, value in config.items() if name != "_name_or_path"}


def trained(args: argparse.Namespace, name: str, preset: str, *changes: str) -> RunDir:
    """A run on --text; one that is complete is not trained again."""
    folder = args.out / name
    chosen = settings(f"data.source=text:{args.text}", "train.device=cpu", *changes)
    blocktrain("train", "--config", preset, "--out", folder, "--json", *chosen)
    return RunDir.open(folder)


def small_model(args: argparse.Namespace) -> RunDir:
    return trained(args, "tiny-tokens", "tiny-tokens", "model.window=128", "train.steps=300")


def gguf(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    import llama_cpp

    run = small_model(args)
    path = args.out / "tiny-tokens.gguf"
    path.unlink(missing_ok=True)
    blocktrain("export", run.path, "--to", "gguf", "--dtype", "f32", "--out", path)
    text = stored_text(run)
    prompt = text.corpus.split("valid")[:PROMPT_TOKENS].tolist()
    ours = list(generate(load_stack(run, CPU), prompt, LLAMA_TOKENS, readout="final"))
    f32 = llama_cpp.GGML_TYPE_F32  # of the cache, which is f16 by default
    model = llama_cpp.Llama(str(path), n_ctx=256, n_threads=1, n_gpu_layers=0, type_k=f32,
                            type_v=f32, verbose=False)  # fmt: skip
    made = model.generate([run.config.vocabulary.bos, *prompt], temp=0.0, top_k=1,
                          repeat_penalty=1.0)  # fmt: skip
    theirs = [token for token, _ in zip(made, range(LLAMA_TOKENS), strict=False)]
    yield {
        "llama-cpp-python": llama_cpp.__version__,
        "greedy tokens": len(ours),
        "different tokens": len(set(ours)),
        "as llama.cpp": theirs[: len(ours)] == ours,
    }


def score(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    import transformers

    run = small_model(args)
    out = args.out / "tiny-tokens-hf"
    if not out.exists():
        blocktrain("export", run.path, "--to", "hf", "--out", out)
    found = json.loads(blocktrain("eval", run.path, "--precision", "fp32", "--json"))
    ours = next(each for each in found["scores"] if each["readout"] == "final")
    corpus = stored_text(run).corpus
    windows = evaluation_windows(corpus.split("valid"), run.config.model.window)
    targets = torch.tensor(windows.astype("int64"))
    start = torch.full_like(targets[:, :1], run.config.vocabulary.bos)
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    total = 0.0
    for inputs, batch in zip(torch.cat([start, targets[:, :-1]], 1).split(16), targets.split(16),
                             strict=True):  # fmt: skip
        with torch.no_grad():
            logits = model(inputs).logits.flatten(0, 1)
        total += float(F.cross_entropy(logits, batch.flatten(), reduction="sum"))
    theirs = total / corpus.bytes_of(windows)
    yield {
        "windows": len(windows),
        "nats per byte here": ours["ce"],
        "nats per byte in transformers": theirs,
        "difference": abs(ours["ce"] - theirs),
    }


# wire

TLS_RECORD, TLS_BYTES = 16384, 22
SEED = 6_482_915_730_118_264_905  # as long as random seeds are


def wire(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The frames that stages send for one step: greedy with one stage to come, sampled with two.
    TLS adds 22 bytes to each 16 KiB."""
    vocabulary = Vocabulary("gpt2", 50304, bos=50256, eos=(50256,), mask=50257)
    routes = {
        "greedy": (Sampling(), ("192.0.2.3:7101",), {"block 1": 0.012345}),
        "sampled": (
            Sampling(0.7, top_p=0.95, seed=SEED), ("192.0.2.3:7101", "198.51.100.4:7101"),
            {"block 1": 0.012345},
        ),
    }  # fmt: skip
    for name, (sampling, hops, seconds) in routes.items():
        for width, positions in product((768, 1024, 4096), (1, 8, 512)):
            ids = np.arange(positions, dtype=np.uint32)
            row = Row(7, 512, ids, 1, Choice(sampling, position=512 + positions))
            state = np.random.default_rng(0).standard_normal((positions, width), np.float32)
            work = Activations([row], state)
            step = StepEnvelope(work, secrets.token_urlsafe(6), hops, "bf16", seconds)
            sent = sum(len(memoryview(part).cast("B"))
                       for part in encode(step_message(step, vocabulary)))  # fmt: skip
            tls = TLS_BYTES * -(-sent // TLS_RECORD)
            yield {
                "step": name,
                "width": width,
                "positions in the step": positions,
                "bytes beside the features": sent - 2 * width * positions,
                "times 2 x width": round(sent / positions / (2 * width), 3),
                "with TLS": round((sent + tls) / positions / (2 * width), 3),
            }


# tokenising

BARE_LOOP = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from blocktrain.data.documents import read_text
from blocktrain.data.tokenizer import SubwordTokenizer
tokenizers = [SubwordTokenizer.open(Path(sys.argv[1]))._plain for _ in range(2)]
def pieces():
    batch, size = [], 0
    for piece in read_text(Path(sys.argv[2])):
        batch.append(piece.text.decode(errors="replace"))
        size += len(piece.text)
        if size >= 1 << 20:
            yield batch
            batch, size = [], 0
    yield batch
batches = list(pieces())
def encode(share):
    return sum(len(e.ids) for batch in batches[share::2]
               for e in tokenizers[share].encode_batch_fast(batch, add_special_tokens=False))
started, before = time.perf_counter(), time.process_time()
with ThreadPoolExecutor(2) as threads:
    total = sum(threads.map(encode, range(2)))
print(time.perf_counter() - started, time.process_time() - before, total)
"""
CORPUS = """
import resource, sys, time
from blocktrain.config import DataConfig
from blocktrain.data.corpus import load_corpus
from blocktrain.data.run_text import resolve_tokenizer
data = DataConfig(f"text:{sys.argv[2]}", tokenizer=sys.argv[1])
tokenizer = resolve_tokenizer(data)
started, before = time.perf_counter(), time.process_time()
corpus = load_corpus(data, tokenizer)
print(time.perf_counter() - started, time.process_time() - before,
      sum(map(len, corpus.splits.values())), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def tokenising(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """In turn, since other programs may use the cores too: the corpus, and a loop that only encodes
    text which is in memory already. The time of the processor does not depend on the others."""
    whole = args.text.read_bytes()
    for share in (0.25, 1.0):
        text = args.out / f"text-{share}.txt"
        text.write_bytes(whole[: int(share * len(whole))])
        megabytes = text.stat().st_size / 1e6
        for _ in range(REPEATS):
            cache = {"BLOCKTRAIN_CACHE": str(args.out / f"cache-{time.monotonic_ns()}")}
            seconds, used, tokens, peak = python(CORPUS, args.tokenizer, text, **cache)
            bare_seconds, bare_used, bare_tokens = python(BARE_LOOP, args.tokenizer, text)
            yield {
                "MB of text": round(megabytes, 1),
                "MB/s": round(megabytes / seconds, 2),
                "bare loop, MB/s": round(megabytes / bare_seconds, 2),
                "share of the bare loop": round(bare_seconds / seconds, 3),
                "MB per second of two cores' time": round(2 * megabytes / used, 2),
                "bare loop, the same": round(2 * megabytes / bare_used, 2),
                "peak memory, MB": round(peak / 1024),
                "tokens": int(tokens),
                "tokens of the bare loop": int(bare_tokens),
            }


def python(program: str, *arguments: object, **env: str) -> list[float]:
    """The numbers that a program prints, with two threads."""
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        check=True, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "2", "RAYON_NUM_THREADS": "2"} | env,
    )  # fmt: skip
    return [float(number) for number in done.stdout.split()]


# import

SHAPE_7B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000,
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
SHARD_LAYERS = 4


def import_7b(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """`cp` and `import` in turn, each followed by a sync, from files that are not in memory."""
    source = args.out / "7b"
    if not (source / "config.json").exists():
        write_7b(source)
    files = sorted(source.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    for _ in range(2):
        copy, run = args.out / "7b-copy", args.out / "7b-run"
        copied = timed(["sh", "-c", 'cp -r "$0" "$1" && sync -f "$1"', source, copy], files)
        subprocess.run(["rm", "-r", copy], check=True)
        command = [*COMMAND, "import", source, "--blocks", 4, "--out", run, "--json"]
        imported = timed(command, files)
        subprocess.run(["rm", "-r", run], check=True)
        yield {
            "GB": round(size / 1e9, 2),
            "cp, seconds": round(copied[0], 1),
            "import, seconds": round(imported[0], 1),
            "times cp": round(imported[0] / copied[0], 2),
            "peak memory of import, GB": round(imported[1] * 1024 / 1e9, 3),
        }


def timed(command: list[Any], files: list[Path]) -> tuple[float, int]:
    """Seconds and peak memory (KiB) of a command that reads these files from disk."""
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    program = ("import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True,"
               " stdout=subprocess.DEVNULL);"
               "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)")  # fmt: skip
    started = time.perf_counter()
    words = [sys.executable, "-c", program, *map(str, command)]
    printed = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
    return time.perf_counter() - started, int(printed)


def write_7b(folder: Path) -> None:
    """Random bf16 tensors with the shapes of Llama 2 7B, in shards. The same numbers come again and
    again, which saves time and changes nothing for a copy."""
    from safetensors.torch import save_file
    from tests.support.small_tokenizer import small_tokenizer

    folder.mkdir(parents=True)
    numbers = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    width, hidden, tokens = 4096, 11008, 32000
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (width,), "post_attention_layernorm": (width,),
        **{f"self_attn.{name}_proj": (width, width) for name in "qkvo"},
        "mlp.gate_proj": (hidden, width), "mlp.up_proj": (hidden, width),
        "mlp.down_proj": (width, hidden),
    }  # fmt: skip
    ends = {"model.embed_tokens": (tokens, width), "model.norm": (width,),
            "lm_head": (tokens, width)}  # fmt: skip
    places: dict[str, str] = {}

    def save(number: int, named: dict[str, tuple[int, ...]]) -> None:
        name = f"model-{number}.safetensors"
        made = {f"{key}.weight": numbers.repeat(-(-math.prod(shape) // len(numbers)))
                [: math.prod(shape)].reshape(shape) for key, shape in named.items()}  # fmt: skip
        save_file(made, folder / name, {"format": "pt"})
        places.update(dict.fromkeys(made, name))

    for number in range(32 // SHARD_LAYERS):
        layers = range(number * SHARD_LAYERS, (number + 1) * SHARD_LAYERS)
        save(number, {f"model.layers.{i}.{k}": v for i in layers for k, v in shapes.items()})
    save(32 // SHARD_LAYERS, ends)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for name, data in small_tokenizer().files.items():
        (folder / name).write_bytes(data)
    (folder / "config.json").write_text(json.dumps(SHAPE_7B))


# blocks

SMALL = ("model.layers=4", "model.blocks=2", "model.width=64", "model.heads=4",
         "model.kv_heads=0", "model.taps=0", "model.layer=llama", "objective.tail=0",
         "train.batch=16", "train.eval_every=0", "train.save_every=100000")  # fmt: skip


def blocks(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every model gets the same FLOPs in all of its blocks together, and windows of about as many
    bytes. One block is as deep as half of the end-to-end model."""
    units = {
        "bytes": ("data.tokenizer=bytes", "model.window=256"),
        "bpe:1024": ("data.tokenizer=bpe:1024", "model.window=96"),
    }
    for seed in args.seeds:
        for unit, changes in units.items():
            for kind in ("end_to_end", "denoise"):
                chosen = [*SMALL, *changes, f"objective.kind={kind}", f"train.seed={seed}"]
                if kind == "end_to_end":
                    chosen.append("model.blocks=1")
                name = f"{kind}-{unit.replace(':', '')}-{seed}"
                steps = steps_within(args, chosen)
                run = trained(args, name, "tiny-tokens", *chosen, f"train.steps={steps}")
                found = json.loads(blocktrain("eval", run.path, "--json"))
                yield {
                    "kind": kind,
                    "tokens": unit,
                    "seed": seed,
                    "steps per block": steps,
                    "parameters": found["parameters"],
                    **{f"{each['start']} {each['readout']}": each["ce"]
                       for each in found["scores"]},
                }  # fmt: skip


def steps_within(args: argparse.Namespace, chosen: list[str]) -> int:
    from blocktrain.data.run_text import expected_vocabulary

    config = load_config(PRESET, [*chosen, f"data.source=text:{args.text}"])
    config = replace(config, vocab=expected_vocabulary(config))
    each = sum(flops_per_step(config, index) for index in range(config.block_count))
    return round(args.flops / each)


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[dict[str, Any]]]] = {
    "parity": parity, "gguf": gguf, "score": score, "wire": wire, "tokenising": tokenising,
    "import": import_7b, "blocks": blocks,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, help="folder of GPT-2's tokenizer")
    parser.add_argument("--text", type=Path, help="a file of text")
    parser.add_argument("--flops", type=float, default=1e12, help="of each model of `blocks`")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    for part in args.parts:
        rows = []
        for row in PARTS[part](args):
            rows.append(row)
            print(json.dumps({part: row}), flush=True)
            result = {**provenance(), "results": rows}
            (args.out / f"{part}.json").write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
