"""Measures a server under load: whether requests hold each other up, and what they share.

    PYTHONPATH=src:. python bench/serving_load.py PART --out DIR [...]

Each PART is one table:

    stalls       a short request, and answers in progress, while a prompt of 4,000 tokens is read
    prefixes     a prompt that begins as an earlier one did, against a new one
    concurrency  32 requests at once against one
    replicas     32 requests with two replicas of a stage against one, with simulated computing

The model has random weights from --seed: a stack of Llama's layers that reads bytes. With --stages
it is a cascade, with a stage for each block after the first. Router and stages compute with one
thread each. In `replicas` everything is in one process, and a stage sleeps for --row-ms per row
instead of computing much, because two replicas on two cores would only share them. Writes
DIR/PART.json, and prints a table.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from tests.support.local_ring import Ring as LocalRing
from tests.support.local_ring import answer, running, until
from tests.support.models import awake_stack
from tests.support.processes import Processes
from tests.support.ring import Ring

from blocktrain.config import Config
from blocktrain.model.stack import new_block
from blocktrain.numerics.sampling import Sampling
from blocktrain.serve.ring.activations import Activations
from blocktrain.serve.ring.batch import SlotLimits
from blocktrain.serve.ring.compute import StageCompute
from blocktrain.serve.router.decode import GenerationRequest
from blocktrain.serve.router.engine import EngineLimits
from blocktrain.storage.run_dir import RunDir
from quality import provenance

Row = dict[str, Any]
SHORT, LONG = 64, 4000  # tokens
RUNNING = 4  # answers in progress while a prompt is read
WINDOW = 4352
STD = 0.05


class Client:
    """Completions of random prompts, of which no two begin alike."""

    def __init__(self, http: httpx.AsyncClient, seed: int) -> None:
        self._http, self._random = http, random.Random(seed)

    def prompt(self, length: int) -> list[int]:
        return [self._random.randrange(256) for _ in range(length)]

    async def seconds(self, prompt: list[int], tokens: int = 1) -> float:
        """How long an answer takes; with one token, the time to the first."""
        began = time.perf_counter()
        fields = {"prompt": prompt, "max_tokens": tokens, "mode": "ar", "temperature": 1.0}
        answer = await self._http.post("/v1/completions", json=fields)
        answer.raise_for_status()
        return time.perf_counter() - began

    async def moments(self, prompt: list[int], tokens: int) -> AsyncIterator[float]:
        """When each token of an answer arrives."""
        fields = {"prompt": prompt, "max_tokens": tokens, "mode": "ar", "temperature": 1.0}
        body = {**fields, "stream": True, "logprobs": 0}
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    yield time.perf_counter()


def random_run(folder: Path, args: argparse.Namespace) -> Path:
    """A run whose blocks have random weights."""
    blocks = args.stages + 1
    config = Config().with_settings(
        model__layer="llama", model__layers=args.layers, model__width=args.width,
        model__heads=args.width // 64, model__window=args.window, model__blocks=blocks,
        objective__kind="cascade" if args.stages else "end_to_end", objective__tail=0,
    )  # fmt: skip
    run = RunDir.create(folder / "run", config)
    torch.manual_seed(args.seed)
    weights = []
    for index in range(config.block_count):
        block = new_block(config, index)
        with torch.no_grad():
            named = {
                name: (each + STD * torch.randn_like(each)).numpy()
                for name, each in block.named_parameters()
            }
        weights.append(named)
    run.write_exported(weights)
    return run.path


@contextmanager
def served(args: argparse.Namespace, *options: str):  # type: ignore[no-untyped-def]
    """The address of a server of a random model."""
    with tempfile.TemporaryDirectory() as scratch, Processes(Path(scratch)) as processes:
        run = random_run(Path(scratch), args)
        stages = {f"stage-{block}": str(block) for block in range(1, args.stages + 1)}
        with closing(Ring(processes, run, stages, "--threads", "1", *options)) as ring:
            ring.wait(args.stages)
            yield str(ring.client.base_url)


def asked(args: argparse.Namespace, work: Callable[[Client], Awaitable[Row]], *options: str) -> Row:
    async def run(url: str) -> Row:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=600.0, limits=limits) as http:
            client = Client(http, args.seed)
            await client.seconds(client.prompt(SHORT), 8)  # warm
            return await work(client)

    with served(args, *options) as url:
        return asyncio.run(run(url))


def stalls(args: argparse.Namespace) -> Row:
    rows = []
    for chunk in args.chunks:
        row = asked(args, lambda client: _stalls(client, args.times), "--prefill-chunk", str(chunk))
        rows.append({"chunk": chunk, **row})
        print(json.dumps(rows[-1]), flush=True)
    titles = ("tokens per chunk", "short alone, s", "while a long prompt is read, s", "ratio",
              "long prompt alone, s", "with short ones, s", "tokens/s of 4 answers",
              "while a prompt is read")  # fmt: skip
    print(f"| {' | '.join(titles)} |")
    print("|" + "---|" * 8)
    for row in rows:
        print(
            "| {chunk} | {alone:.3f} | {beside:.3f} | {ratio:.2f} | {long_alone:.2f} |"
            " {long_beside:.2f} | {rate:.1f} | {rate_beside:.1f} |".format(**row)
        )
    return {"short": SHORT, "long": LONG, "rows": rows}


async def _stalls(client: Client, times: int) -> Row:
    """Medians. Alone and beside are measured by turns."""
    alone, beside, long_alone, long_beside = [], [], [], []
    long_alone.append(await client.seconds(client.prompt(LONG)))
    while len(beside) < times:
        long = asyncio.create_task(client.seconds(client.prompt(LONG)))
        await asyncio.sleep(0.05)
        while True:
            seconds = await client.seconds(client.prompt(SHORT))
            if long.done():
                break  # that one was alone for a part of its time
            beside.append(seconds)
            await asyncio.sleep(random.uniform(0.0, 0.1))
        long_beside.append(await long)
        alone += [await client.seconds(client.prompt(SHORT)) for _ in range(4)]
    rate, rate_beside = await _rates(client)
    median = statistics.median
    return {
        "alone": median(alone), "beside": median(beside), "ratio": median(beside) / median(alone),
        "times": [len(alone), len(beside)], "worst_beside": max(beside),
        "long_alone": median(long_alone), "long_beside": median(long_beside),
        "rate": rate, "rate_beside": rate_beside,
    }  # fmt: skip


async def _rates(client: Client) -> tuple[float, float]:
    """Tokens per second of answers in progress, before and while a long prompt is read."""
    moments: list[float] = []

    async def answer() -> None:
        async for moment in client.moments(client.prompt(SHORT), 4000):
            moments.append(moment)

    answers = [asyncio.create_task(answer()) for _ in range(RUNNING)]
    while len(moments) < 16 * RUNNING:
        await asyncio.sleep(0.01)
    began = time.perf_counter()
    await asyncio.sleep(4.0)
    middle = time.perf_counter()
    await client.seconds(client.prompt(LONG))
    end = time.perf_counter()
    for task in answers:
        task.cancel()
    await asyncio.gather(*answers, return_exceptions=True)
    before = sum(began <= moment < middle for moment in moments)
    during = sum(middle <= moment < end for moment in moments)
    return before / (middle - began), during / (end - middle)


def concurrency(args: argparse.Namespace) -> Row:
    row = asked(args, lambda client: _concurrency(client, args.tokens))
    print("| requests at once | tokens/s of all |\n|---|---|")
    for count in (1, 32):
        print(f"| {count} | {row[f'rate_{count}']:.1f} |")
    print(f"{row['ratio']:.1f}x")
    return row


def prefixes(args: argparse.Namespace) -> Row:
    row = asked(args, lambda client: _prefixes(client, args.times))
    print("| prompt | median, s |\n|---|---|")
    print("| {LONG} new tokens | {new:.3f} |".format(LONG=LONG, **row))
    print("| {LONG} tokens, of which {own} are new | {shared:.3f} |".format(LONG=LONG, **row))
    print("| the new ones alone | {alone:.3f} |".format(**row))
    return row


async def _prefixes(client: Client, times: int) -> Row:
    own, new, shared, alone = LONG // 50, [], [], []
    for _ in range(max(1, times // 5)):
        beginning = client.prompt(LONG - own)
        new.append(await client.seconds(beginning + client.prompt(own)))
        shared += [await client.seconds(beginning + client.prompt(own)) for _ in range(5)]
        alone += [await client.seconds(client.prompt(own)) for _ in range(5)]
    median = statistics.median
    return {"own": own, "new": median(new), "shared": median(shared), "alone": median(alone)}


def replicas(args: argparse.Namespace) -> Row:
    rates = {}
    for count in (1, 2, 1, 2):  # the first two warm up
        rates[count] = asyncio.run(_replicated(count, args.row_ms / 1e3, args.tokens, args.seed))
    print("| replicas | tokens/s of 32 requests |\n|---|---|")
    for count, rate in rates.items():
        print(f"| {count} | {rate:.1f} |")
    print(f"{rates[2] / rates[1]:.2f}x (bar: 1.7)")
    return {"rates": rates, "ratio": rates[2] / rates[1], "row_ms": args.row_ms}


async def _replicated(count: int, row_seconds: float, tokens: int, seed: int) -> float:
    """Tokens per second of 32 requests at once."""
    config = Config().with_settings(
        model__layers=2, model__width=16, model__heads=2, model__window=256, model__blocks=2,
        objective__kind="cascade",
    )  # fmt: skip
    ring, numbers = LocalRing(awake_stack(config)), random.Random(seed)
    for _ in range(count):
        ring.start(range(1, 2), SlotLimits(64))
    for compute in ring.computes:
        slow_down(compute, row_seconds)
    async with running(ring, ring.engine(EngineLimits(64))) as engine:
        await until(lambda: len(engine.status()["stages"]) == count)
        requests = [
            GenerationRequest(
                numbers.randbytes(SHORT), tokens, "ar", sampling=Sampling(1.0, seed=n)
            )
            for n in range(32)
        ]
        began = time.perf_counter()
        await asyncio.gather(*(answer(engine, request) for request in requests))
        return 32 * tokens / (time.perf_counter() - began)


def slow_down(compute: StageCompute, row_seconds: float) -> None:
    """Make every row take at least this long."""
    step = compute.step

    def slow_step(activations: Activations, **more: Any) -> Activations:
        time.sleep(row_seconds * len(activations.rows))
        return step(activations, **more)

    compute.step = slow_step  # type: ignore[method-assign]


async def _concurrency(client: Client, tokens: int) -> Row:
    rates = {}
    for count in (32, 1, 32):  # the first warms up
        prompts = [client.prompt(SHORT) for _ in range(count)]
        began = time.perf_counter()
        await asyncio.gather(*(client.seconds(prompt, tokens) for prompt in prompts))
        rates[f"rate_{count}"] = count * tokens / (time.perf_counter() - began)
    return {**rates, "ratio": rates["rate_32"] / rates["rate_1"]}


PARTS = {part.__name__: part for part in (stalls, prefixes, concurrency, replicas)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--window", type=int, default=WINDOW)
    parser.add_argument("--stages", type=int, default=0)
    parser.add_argument("--times", type=int, default=20, help="short requests beside a long prompt")
    parser.add_argument("--chunks", type=int, nargs="+", default=[0, WINDOW])
    parser.add_argument("--row-ms", type=float, default=2.0, help="of a stage of `replicas`")
    parser.add_argument(
        "--tokens", type=int, default=64, help="of an answer of `concurrency` or `replicas`"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    here = {**provenance(), "cpus": os.cpu_count(), "load_before": os.getloadavg()[0]}
    report = {**here, "seed": args.seed, **PARTS[args.part](args)}
    report["load_after"] = os.getloadavg()[0]
    (args.out / f"{args.part}.json").write_text(json.dumps(report, indent=1))
    print(f"commit {report['commit']}, {report['device']}, {here['cpus']} CPUs,"
          f" load {here['load_before']:.1f} to {report['load_after']:.1f}")  # fmt: skip


if __name__ == "__main__":
    main()
