"""blocktrain doctor: checks this machine, and the way to a run's coordinator and its storage."""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from blocktrain import __version__, environment
from blocktrain.cli import options
from blocktrain.cli.terminal import duration, echo_words, plain, size

if TYPE_CHECKING:
    from blocktrain.config import Config
    from blocktrain.worker.client import Client
    from blocktrain.worker.http import HttpRequest

GIGABYTE = 1e9
LEAST_FREE_DISK, ENOUGH_DISK = 0.5 * GIGABYTE, 5 * GIGABYTE
LEAST_MEMORY = 1 * GIGABYTE  # a process with torch and a small block
MOST_SKEW = 60.0  # seconds; tokens and certificates are valid for minutes or more
REQUEST_SECONDS = 10.0
DOWNLOAD_SECONDS = 60.0
LARGEST_PROBE = 64 << 20  # bytes to download from the storage
MEASURED_SECONDS = 3.0
EARLIEST = 1_735_689_600  # 2025 began; no machine of this release has an earlier clock
MARKS = {"ok": "ok  ", "warning": "note", "problem": "FAIL"}


@dataclass(frozen=True)
class Diagnosis:
    """`remedy`: what to do, unless it is ok."""

    subject: str
    state: Literal["ok", "warning", "problem"]
    text: str
    remedy: str = ""


@click.command("doctor")
@click.argument("invite", required=False)
@options.at
@options.device
@options.thread_count
@options.as_json
def doctor_command(invite: str | None, at: tuple[str, ...], device: str, as_json: bool) -> None:
    """Check this machine: versions, device, memory, disk, clock, and how fast it trains. With
    INVITE, also the way to the run's coordinator and storage, and whether this machine can train
    for the run. The exit code is 1 if something prevents that."""
    findings = []
    for finding in _findings(invite, at, device):
        findings.append(finding)
        if not as_json:
            mark = f"{MARKS[finding.state]}  {finding.subject:12}"
            echo_words(f"{mark} {plain(finding.text)}", indent=len(mark) + 1)
            if finding.remedy:
                click.echo(f"{'':18} -> {plain(finding.remedy)}")  # commands stay whole
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings]))
    if any(finding.state == "problem" for finding in findings):
        raise SystemExit(1)


def _findings(invite: str | None, at: tuple[str, ...], device: str) -> Iterator[Diagnosis]:
    for check in (_versions, _threads, _memory, _disk, _clock, _proxy):
        yield check()
    yield (placed := _or_problem("device", lambda: _device(device)))
    config = None
    if invite:
        client = options.client_of(invite, at)
        client.http.on_unreachable = lambda reason, seconds: None  # a finding says it
        yield (reached := _or_problem("coordinator", lambda: _coordinator(client)))
        if reached.state != "problem":
            yield _or_problem("clocks", lambda: _clocks(client))
            yield _or_problem("storage", lambda: _storage(client))
            config = _config_of(client)
        client.close()
    if placed.state != "problem" and (config or not invite):
        yield _or_problem("training", lambda: _training(config, device))


def _or_problem(subject: str, check: Callable[[], Diagnosis]) -> Diagnosis:
    """What a check finds. An error is a problem; its message says what to do."""
    from blocktrain.errors import BlocktrainError

    try:
        return check()
    except BlocktrainError as error:
        reason, _, remedy = str(error).partition("; ")
        return Diagnosis(subject, "problem", reason, remedy)


# This machine


def _versions() -> Diagnosis:
    try:
        import torch
    except ImportError as error:
        text, remedy = f"torch cannot be imported: {error}", "install it: pip install torch"
        return Diagnosis("versions", "problem", text, remedy)
    python = ".".join(map(str, sys.version_info[:3]))
    return Diagnosis(
        "versions", "ok", f"blocktrain {__version__}, Python {python}, torch {torch.__version__}"
    )


def _device(name: str) -> Diagnosis:
    from blocktrain.training.device import resolve

    compute = resolve(name, "auto")
    if compute.device.type == "cpu" and shutil.which("nvidia-smi"):
        return Diagnosis(
            "device", "warning", f"{compute.name}, although this machine has an NVIDIA GPU",
            "install torch with CUDA: https://pytorch.org/get-started/locally",
        )  # fmt: skip
    return Diagnosis("device", "ok", compute.name)


def _threads() -> Diagnosis:
    cores, threads = os.cpu_count() or 1, environment.machine_threads()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    text = f"{threads} thread{'s' * (threads > 1)} on {cores} cores, load {load:.1f}"
    if threads > cores:
        remedy = f"set {environment.THREADS.name} to {cores} or less, or unset it"
        return Diagnosis("threads", "warning", text, remedy)
    if load > cores:
        return Diagnosis("threads", "warning", text, "other programs are busy; training is slower")
    return Diagnosis("threads", "ok", text)


def _memory() -> Diagnosis:
    from blocktrain.memory import free_memory

    free = free_memory()
    if free is None:
        return Diagnosis("memory", "warning", "unknown", "limit a worker yourself with --memory GB")
    text = f"{size(free.bytes)} free in {free.source}"
    if free.bytes < LEAST_MEMORY:
        return Diagnosis("memory", "problem", text, f"free at least {size(LEAST_MEMORY)}")
    return Diagnosis("memory", "ok", text)


def _disk() -> Diagnosis:
    from blocktrain.data.corpus import cache_dir

    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        remedy = f"make it writable, or set {environment.CACHE.name} to another folder"
        return Diagnosis("disk", "problem", f"cannot write to {folder}: {error.strerror}", remedy)
    text = f"{size(free)} free in {folder}"
    remedy = f"free some, or set {environment.CACHE.name} to a folder on a larger disk"
    if free < LEAST_FREE_DISK:
        return Diagnosis("disk", "problem", text, remedy)
    return Diagnosis("disk", "ok", text) if free >= ENOUGH_DISK else Diagnosis(
        "disk", "warning", text, remedy
    )  # fmt: skip


def _clock() -> Diagnosis:
    text = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    if time.time() < EARLIEST:
        return Diagnosis("clock", "problem", text, "set it; certificates are refused until then")
    return Diagnosis("clock", "ok", text)


def _proxy() -> Diagnosis:
    names = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
    used = [name for name in names if environment.Variable(name, "").is_set]
    return Diagnosis("proxy", "ok", f"used, by {', '.join(used)}" if used else "none")


# A run


def _coordinator(client: "Client") -> Diagnosis:
    """Reaches the coordinator and shows the invite to it."""
    from blocktrain.errors import BlocktrainError

    addresses = ", ".join(client.invite.addresses)
    began = time.monotonic()
    try:
        client.hello(client.deadline(REQUEST_SECONDS))
        milliseconds = 1000 * (time.monotonic() - began)
        status = client.status(client.deadline(REQUEST_SECONDS))
    except BlocktrainError as error:
        remedy = (
            f"is it running, and do firewalls let this machine reach it? From here: curl -k"
            f" {client.invite.addresses[0]}/v1/hello"
        )
        return Diagnosis("coordinator", "problem", str(error), remedy)
    text = f"{addresses} answers in {milliseconds:.0f} ms; run {status.run} is {status.state}"
    if status.state == "finished":
        remedy = "there is nothing left to train; `blocktrain fetch` downloads the model"
        return Diagnosis("coordinator", "warning", text, remedy)
    return Diagnosis("coordinator", "ok", text)


def _clocks(client: "Client") -> Diagnosis:
    request = _date_request()
    answered = client.http.send(request, "/v1/hello", client.deadline(REQUEST_SECONDS))
    if answered is None:
        return Diagnosis(
            "clocks", "warning", "the coordinator sends no date", "compare them by hand"
        )
    skew = time.time() - answered
    text = (
        f"this clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the coordinator's"
    )
    if abs(skew) > MOST_SKEW:
        return Diagnosis(
            "clocks", "problem", text, "set both by NTP, such as: timedatectl set-ntp on"
        )
    return Diagnosis("clocks", "ok", text)


def _date_request() -> "HttpRequest[float | None]":
    from blocktrain.worker.http import HttpRequest, HttpResponse

    class DateRequest(HttpRequest[float | None]):
        method = "GET"

        def headers(self) -> dict[str, str]:
            return {}

        def read(self, response: HttpResponse) -> float | None:
            response.whole()
            date = response.headers.get("date")
            return parsedate_to_datetime(date).timestamp() if date else None

    return DateRequest()


def _storage(client: "Client") -> Diagnosis:
    """Downloads the smallest file of the run, by presigned URL if the storage is a bucket."""
    from blocktrain.worker.machine import Bandwidth
    from blocktrain.worker.transfer import BlobCache, Transfer

    blob = min((block.weights for block in client.status().blocks), key=lambda blob: blob.size)
    if blob.size > LARGEST_PROBE:
        text = f"not tried, since the smallest block has {size(blob.size)}"
        return Diagnosis("storage", "ok", text)
    with tempfile.TemporaryDirectory(prefix="blocktrain-") as scratch:
        bandwidth = Bandwidth(None, client.clock)
        transfer = Transfer(client, BlobCache(Path(scratch)), bandwidth)
        began = time.monotonic()
        transfer.read(blob, client.deadline(DOWNLOAD_SECONDS))
        seconds = time.monotonic() - began
    return Diagnosis(
        "storage", "ok", f"{size(blob.size)} downloaded at {size(blob.size / seconds)}/s"
    )


def _config_of(client: "Client") -> "Config":
    from blocktrain.config import from_toml

    return from_toml(client.run().config)


# What this machine can train


def _training(config: "Config | None", device: str) -> Diagnosis:
    """Trains a block for some seconds: of the run or, without one, of the preset `demo`."""
    from blocktrain.config import load_config
    from blocktrain.config.presets import config_path
    from blocktrain.training.memory_check import Device

    own = config or load_config(config_path("demo"))
    what = "a block of this run" if config else "a block of the preset demo"
    place = Device.named(device)
    needs = place.training_bytes(own, updates=True)
    if place.free and min(needs) > place.free.bytes:
        text = (
            f"{what} needs about {size(min(needs))}, more than is free ({size(place.free.bytes)})"
        )
        return Diagnosis("training", "problem", text, "free memory, or use a machine with more")
    block = needs.index(min(needs))
    steps_per_s = _steps_per_second(own, block, device)
    text = (
        f"{what}: {steps_per_s:.2g} steps/s, {size(own.bytes_per_step * steps_per_s)}/s of text;"
        f" all {own.train.steps} steps of one block take {duration(own.train.steps / steps_per_s)}"
    )
    fitting = [
        index for index, need in enumerate(needs) if not place.free or need <= place.free.bytes
    ]
    if len(fitting) < len(needs):
        remedy = f"only {len(fitting)} of {len(needs)} blocks fit; the worker trains those"
        return Diagnosis("training", "warning", text, remedy)
    return Diagnosis("training", "ok", text)


def _steps_per_second(config: "Config", block: int, device: str) -> float:
    """How fast a block trains on random text. In a cascade, without the frozen blocks before it."""
    import numpy as np

    from blocktrain.data.corpus import Corpus
    from blocktrain.data.tokenizer import Tokens
    from blocktrain.training.device import resolve
    from blocktrain.training.trainer import BlockTrainer

    first = 0 if config.kind.reads_predecessors else block
    tokens = 4 * config.model.window * config.train.batch
    dtype = np.uint8 if config.vocabulary.is_bytes else np.uint32
    draws = np.random.default_rng(0)
    text: Tokens = draws.integers(0, config.vocabulary.size, tokens).astype(dtype)
    corpus = Corpus("random", dict.fromkeys(("train", "valid", "test"), text), {})
    settings: dict[str, Any] = {"train__warm_start": "", "train__compile": False}
    trained = config.with_settings(train__device=device, train__steps=1_000_000, **settings)
    trainer = BlockTrainer(trained, first, corpus, resolve(device, config.train.precision), None)
    quiet: dict[str, float] = {}

    def measured() -> bool:
        """Whether enough steps were made; the first one, which also allocates, does not count."""
        now = time.monotonic()
        quiet.setdefault("began", now) if trainer.step else None
        return bool(quiet) and now - quiet["began"] >= MEASURED_SECONDS and trainer.step > 1

    trainer.train(lambda progress: None, measured)
    return (trainer.step - 1) / (time.monotonic() - quiet["began"])
