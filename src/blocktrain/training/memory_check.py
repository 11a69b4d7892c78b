"""Checks that training or serving fits into free memory before it starts, and computes which
settings would make it fit. Imports torch only if the machine may have a GPU."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blocktrain.config import Config
from blocktrain.config.sizes import block_sizes
from blocktrain.data.run_text import expected_vocabulary
from blocktrain.errors import ConfigError, DeviceError
from blocktrain.memory import FreeMemory, free_memory
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.estimation import cache_bytes, memory_by_block, serving_bytes, update_bytes

GPU_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # of NVIDIA's driver, WSL's and AMD's
# A process with torch, before any weights. Estimates of activations are those of a GPU; on a CPU
# more numbers are kept, up to 1.6 times as many (bench/memory.py measures a GPU).
PROCESS_BYTES = 400_000_000
CPU_ACTIVATIONS = 1.6
WORKER_SHARE = 0.75  # of free memory, unless the owner sets --memory
MOST_SHOWN = 4
FORCE = "--force starts anyway"


@dataclass(frozen=True)
class Device:
    """Where blocks are trained or served, and the memory that is free there."""

    is_cpu: bool
    free: FreeMemory | None  # None: unknown

    @classmethod
    def named(cls, name: str) -> "Device":
        """The device of a setting: auto, cpu, mps, cuda or cuda:N."""
        if not name.startswith("cuda") and not (name == "auto" and _may_have_gpu()):
            return cls(name != "mps", free_memory())  # a Mac's GPU shares the machine's memory
        import torch

        from blocktrain.training.device import resolve

        device = resolve(name, "fp32").device
        if device.type != "cuda":
            return cls(device.type == "cpu", free_memory())
        return cls(False, FreeMemory(torch.cuda.mem_get_info(device)[0], str(device)))

    def training_bytes(self, config: Config, *, updates: bool = False) -> list[int]:
        """Memory to train each block of a run. `updates`: as a worker that sends updates."""
        if self.is_cpu and config.train.precision == "auto":
            config = config.with_settings(train__precision="fp32")
        sizes = memory_by_block(config, CPU_ACTIVATIONS if self.is_cpu else 1.0)
        if not self.is_cpu:
            return sizes
        more = PROCESS_BYTES
        if config.objective.feature_cache == "ram":
            more += cache_bytes(config)
        copies = update_bytes(config) if updates else [0] * len(sizes)
        return [more + each + copied for each, copied in zip(sizes, copies, strict=True)]


def _may_have_gpu() -> bool:
    return sys.platform == "win32" or any(Path(file).exists() for file in GPU_FILES)


def check_training(
    config: Config, device: str, blocks: Sequence[int] = (), processes: int = 1
) -> None:
    """Raise DeviceError unless blocks, by default any, fit into free memory, with the settings that
    would help. `processes`: how many blocks are trained at the same time."""
    place = Device.named(device)

    def needed(changed: Config) -> int:
        sizes = place.training_bytes(changed)
        chosen = [sizes[index] for index in blocks if index < len(sizes)] or sizes
        return sum(sorted(chosen, reverse=True)[:processes])

    together = f" {processes} blocks at the same time" if processes > 1 else ""
    _check(f"training{together}", config, place.free, needed)


def check_run(config: Config, folder: Path, blocks: Sequence[int], processes: int) -> None:
    """`check_training` of a run on this machine, whose tokenizer may not exist yet. `folder`: where
    it is, or will be."""
    stored = RunDir.resumable(folder, config)
    config = replace(config, vocab=stored.config.vocab if stored else expected_vocabulary(config))
    check_training(config, config.train.device, blocks, processes)


def check_first_versions(config: Config) -> None:
    """Raise DeviceError unless the largest block of a new run can be initialised in free memory."""

    def needed(changed: Config) -> int:
        return PROCESS_BYTES + 2 * 4 * max(size.parameters for size in block_sizes(changed))

    _check("writing the first version of a block", config, free_memory(), needed)


def _check(
    what: str, config: Config, free: FreeMemory | None, needed: Callable[[Config], int]
) -> None:
    if free and (total := needed(config)) > free.bytes:
        advice = _advice(config, free.bytes, needed)
        raise DeviceError(f"{too_large(what, total, free)}; {advice}; {FORCE}")


def check_serving(
    config: Config, device: str, precision: str, weights: str, blocks: range, processes: int
) -> None:
    """Raise DeviceError unless blocks fit into free memory. `processes`: how many share them."""
    if problem := serving_problem(config, device, precision, weights, blocks, processes):
        raise DeviceError(f"{problem}; {FORCE}")


def serving_problem(
    config: Config, device: str, precision: str, weights: str, blocks: range, processes: int
) -> str:
    """Why blocks cannot be served from free memory, and what would help; empty if they can."""
    place = Device.named(device)
    element = 4 if precision == "fp32" or (precision == "auto" and place.is_cpu) else 2

    def needed(weights: str) -> int:
        process = PROCESS_BYTES if place.is_cpu else 0
        return processes * process + serving_bytes(config, blocks, element, weights)

    if place.free is None or needed(weights) <= place.free.bytes:
        return ""
    what = f"block {blocks[0]}" if len(blocks) == 1 else f"{len(blocks)} blocks"
    smaller = f"--weights int8 ({gigabytes(needed('int8'))}), or " * (weights != "int8")
    return (
        f"{too_large(f'serving {what}', needed(weights), place.free)}; use {smaller}other machines"
        " for some of the blocks (blocktrain stage)"
    )


def too_large(what: str, needed: int, free: FreeMemory) -> str:
    return (
        f"{what} needs about {gigabytes(needed)} of memory, {gigabytes(needed - free.bytes)} more"
        f" than is free on {free.source} ({gigabytes(free.bytes)})"
    )


def gigabytes(count: float) -> str:
    for unit in ("MB", "GB", "TB"):
        count /= 1e6 if unit == "MB" else 1e3
        if count < 999.5 or unit == "TB":
            break
    return f"{count:,.1f} {unit}" if count < 99.95 else f"{count:,.0f} {unit}"


# Which settings would help

Step = Callable[[Config], Config]  # makes one setting smaller, or larger if that saves memory


def _advice(config: Config, free: int, needed: Callable[[Config], int]) -> str:
    """The settings that make it fit by themselves or, if there are none, those that save most."""
    steps = {**_STEPS, **{name: _halving(name) for name in _HALVED}}
    fitting = {}
    for name, step in steps.items():
        smaller: Config | None = config
        while smaller and needed(smaller) > free:
            smaller = _stepped(step, smaller)
        if smaller:
            fitting[name] = smaller
    if fitting:
        listed = [
            f"{_text(name, after)} ({gigabytes(needed(after))})" for name, after in fitting.items()
        ]
        return f"it would fit with {' or '.join(listed[:MOST_SHOWN])}"
    once = {name: after for name, step in steps.items() if (after := _stepped(step, config))}
    saved = {name: needed(config) - needed(after) for name, after in once.items()}
    listed = [
        f"{_text(name, once[name])} (saves {gigabytes(saved[name])})"
        for name in sorted(saved, key=lambda name: -saved[name])[:MOST_SHOWN]
        if saved[name] > 0
    ]
    return f"no setting is enough by itself; change several, such as {', '.join(listed)}"


def _stepped(step: Step, config: Config) -> Config | None:
    """The config after a step; None if the setting cannot be changed further."""
    try:
        after = step(config)
    except ConfigError:
        return None
    return None if after == config else after


def _accumulate_more(config: Config) -> Config:
    batch, parts = config.train.batch, config.train.accumulate
    more = 2 * parts if batch % (2 * parts) == 0 else batch
    return config.with_settings(train__accumulate=more)


def _more_blocks(config: Config) -> Config:
    model = config.model
    if config.kind.whole_model or model.depths:
        return config
    return config.with_settings(model__blocks=min(2 * model.blocks, model.layers))


def _narrower(config: Config) -> Config:
    """Half the width, and half the heads, so that a head stays as wide."""
    model = config.model
    heads, keys = (count // 2 or count for count in (model.heads, model.kv_heads))
    return config.with_settings(
        model__width=model.width // 2, model__heads=heads, model__kv_heads=keys
    )


def _fewer_layers(config: Config) -> Config:
    """Half the layers, as a multiple of the blocks."""
    model = config.model
    if model.depths:
        return config
    layers = max(1, model.layers // model.blocks // 2) * model.blocks
    return config.with_settings(model__layers=layers)


def _halving(name: str) -> Step:
    section, _, key = name.partition(".")

    def halve(config: Config) -> Config:
        value = _value(config, name)
        if isinstance(value, float):
            return config.with_settings(**{f"{section}__{key}": value / 2})
        return config.with_settings(**{f"{section}__{key}": value // 2}) if value > 1 else config

    return halve


# Those that leave the model as it is come first.
_STEPS: dict[str, Step] = {
    "train.accumulate": _accumulate_more,
    "train.checkpoint_layers": lambda config: config.with_settings(train__checkpoint_layers=True),
    "train.frozen_in": lambda config: config.with_settings(train__frozen_in="disk"),
    "train.batch": _halving("train.batch"),
    "model.blocks": _more_blocks,
    "model.window": _halving("model.window"),
    "model.width": _narrower,
    "model.layers": _fewer_layers,
}
_HALVED = (
    "vocab.size", "objective.tail", "objective.target_dim", "objective.sigma_rank",
    "model.mlp_ratio", "model.hidden", "model.head_dim",
)  # fmt: skip


def _value(config: Config, name: str) -> Any:
    section, _, key = name.partition(".")
    return getattr(getattr(config, section), key)


def _text(name: str, config: Config) -> str:
    """A setting as it is written after --set. The size of a vocabulary is the tokenizer's."""
    if name == "vocab.size":
        return f"data.tokenizer=bpe:{config.vocab.size}"
    return f"{name}={json.dumps(_value(config, name))}"
