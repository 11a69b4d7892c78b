"""The kinds of models that bench/quality.py compares, and how each is trained.

Not run by itself.

    end-to-end  the reference: all layers by one optimizer
    shallow     end-to-end with the layers of one denoising block
    denoise     denoising blocks, one after another
    workers     the same blocks by --workers workers of a real run on this machine, over HTTPS
    cascade     a cascade in lockstep: every block sees the others `stale` steps old
    fitting     end-to-end with the layers that one cascade worker trains: what fits its memory
    swarm       the product of as many fitting models as there are blocks, each from its own seed
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from blocktrain.config import Config, load_config
from blocktrain.data.corpus import load_corpus
from blocktrain.model.block import LogitsAt
from blocktrain.model.stack import CausalStack, Stack
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.device import resolve
from blocktrain.training.run_session import open_session
from blocktrain.training.stored_models import load_stack
from contenders import refuse_eager_fallback
from lockstep import train_in_lockstep

if TYPE_CHECKING:
    from blocktrain.protocol.status_messages import Status

KINDS = ("end-to-end", "shallow", "denoise", "workers", "cascade", "fitting", "swarm")
DEFAULT_KINDS = KINDS[:3]
WHOLE = "objective.kind=end_to_end"
POLL_SECONDS = 0.5
SWARM_SEEDS = 1000  # apart from each other and from the seeds that are compared


@dataclass(frozen=True)
class Variant:
    """One model to train, as overrides of the base config."""

    name: str
    kind: str
    settings: tuple[str, ...]
    point: str  # of the grid; gaps are taken to the reference of the same point
    defaults: tuple[str, ...]  # of the preset and the program, which were others once
    stale: int = 0
    shares: tuple[float, ...] = ()
    workers: int = 0

    def identity(self, seed: int) -> list[str]:
        """All that determines the result: what was trained with these is not trained again."""
        lockstep = [f"stale={self.stale}", f"shares={self.shares}"] if self.stale else []
        crew = [f"workers={self.workers}"] if self.workers else []
        return [self.kind, *self.settings, *self.defaults, *lockstep, *crew, f"train.seed={seed}"]


@dataclass(frozen=True)
class Trained:
    """How to load what was trained, and what was counted on the way."""

    load: Callable[[], Stack]
    facts: dict[str, Any]


def new_variant(
    kind: str,
    config_path: Path,
    fixed: Sequence[str],
    chosen: Sequence[str] = (),
    stale: int = 0,
    shares: Sequence[float] = (),
    workers: int = 0,
) -> Variant:
    """`chosen`: the point of the grid. How workers exchange updates matters to workers only, and
    is no part of the point: their runs are compared with each other and with runs without them."""
    if kind != "workers":
        fixed, chosen = _without_swarm(fixed), _without_swarm(chosen)
    settings = [*fixed, *chosen]
    model = load_config(config_path, settings).model
    cascade = load_config(config_path, [*settings, "objective.kind=cascade"])
    depth = model.layers // model.blocks
    fitting = cascade.trained_layers
    spread = f", shares {list(shares)}" if shares else ""
    name, own = {
        "end-to-end": (f"end-to-end, {model.layers} layers", [WHOLE]),
        "shallow": (f"end-to-end, {depth} layers", _alone(depth)),
        "denoise": (f"blocks, {model.blocks} x {depth} layers", ["objective.kind=denoise"]),
        "workers": (
            f"blocks, {model.blocks} x {depth} layers, {workers} workers",
            ["objective.kind=denoise"],
        ),
        "cascade": (
            f"cascade, {'+'.join(map(str, cascade.depths))} layers, tail {cascade.objective.tail},"
            f" lead {cascade.lead:g}, {stale} stale{spread}",
            ["objective.kind=cascade"],
        ),
        "fitting": (f"end-to-end, {fitting} layers", _alone(fitting)),
        "swarm": (
            f"product of {model.blocks} x end-to-end, {fitting} layers",
            [*_alone(fitting), f"members={model.blocks}"],
        ),
    }[kind]
    return Variant(
        name + _listed(chosen),
        kind,
        (*settings, *own),
        _listed(_without_swarm(chosen)),
        (f"optimizer={cascade.train.optimizer}", f"lr={cascade.train.lr}", f"lead={cascade.lead}"),
        stale,
        tuple(shares),
        workers,
    )


def _listed(settings: Sequence[str]) -> str:
    return "".join(f", {setting}" for setting in settings)


def _without_swarm(settings: Sequence[str]) -> list[str]:
    return [setting for setting in settings if not setting.startswith("swarm.")]


def _alone(layers: int) -> list[str]:
    """A whole model of fewer layers."""
    return [WHOLE, f"model.layers={layers}", "model.blocks=1", "model.depths=[]"]


def train(variant: Variant, config_path: Path, seed: int, folder: Path) -> Trained:
    """Train a variant, or find it trained."""
    started = time.perf_counter()
    refuse_eager_fallback()
    rates: list[float] = []
    facts: dict[str, Any] = {}
    if variant.kind == "swarm":
        *settings, members = variant.settings
        count = int(members.removeprefix("members="))
        seeds = [seed, *(SWARM_SEEDS * (seed + 1) + member for member in range(1, count))]
        runs = [
            _train_in_turn(_config(config_path, settings, member), folder / f"seed-{member}", rates)
            for member in seeds
        ]
    elif variant.kind == "cascade":
        config = _config(config_path, variant.settings, seed)
        runs = [_train_in_lockstep(config, folder, variant, rates)]
    elif variant.kind == "workers":
        config = _config(config_path, variant.settings, seed)
        runs = [_train_by_workers(config, folder, variant.workers, facts)]
    else:
        runs = [_train_in_turn(_config(config_path, variant.settings, seed), folder, rates)]
    rate = f"{statistics.median(rates) / 1e6:.2f} MB/s" if rates else "trained before"
    print(f"{variant.name}, seed {seed}: {time.perf_counter() - started:.0f} s, {rate}", flush=True)
    return Trained(lambda: _stack(runs), facts)


def _config(config_path: Path, settings: Sequence[str], seed: int) -> Config:
    return load_config(config_path, [*settings, f"train.seed={seed}"])


def _train_in_turn(config: Config, folder: Path, rates: list[float]) -> RunDir:
    session = open_session(config, folder)
    blocks = list(range(config.block_count))
    session.train_in_turn(blocks, lambda p: rates.append(p.bytes_per_s), lambda: False)
    return session.run


def _train_in_lockstep(
    config: Config, folder: Path, variant: Variant, rates: list[float]
) -> RunDir:
    run = RunDir.create(folder, config)
    if not all(run.block(block).finished() for block in range(config.block_count)):
        train_in_lockstep(
            config,
            load_corpus(config.data),
            resolve(config.train.device, config.train.precision),
            run,
            stale=variant.stale,
            shares=variant.shares,
            on_progress=lambda p: rates.append(p.bytes_per_s),
        )
    return run


def _train_by_workers(config: Config, folder: Path, workers: int, facts: dict[str, Any]) -> RunDir:
    from blocktrain.api.swarm import Swarm

    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "model", ignore_errors=True)  # of an earlier run of this bench
    with (
        tempfile.TemporaryDirectory(dir=folder) as scratch,  # gigabytes that nobody reads again
        Swarm.start(config, scratch) as swarm,
    ):
        swarm.join(workers, device=config.train.device, data=config.data.source)
        while (status := swarm.read_status()).state != "finished":
            time.sleep(POLL_SECONDS)
        facts |= {
            "versions": [block.version for block in status.blocks],
            "participation": [block.participation for block in status.blocks],
            "updates": sum(worker.updates for worker in status.workers),
            "run_seconds": status.seconds,
            **_bytes_moved(status),
        }
        print(facts, flush=True)
        return RunDir.open(swarm.fetch(folder / "model"))


def _bytes_moved(status: "Status") -> dict[str, int | float]:
    """Updates up and versions down, whole and as differences; not the text, which all have."""
    moved = [block.moved for block in status.blocks]
    up = sum(each.up for each in moved)
    down = sum(each.down_whole + each.down_differences for each in moved)
    return {
        "bytes_up": up,
        "bytes_down": down,
        "up_smaller": sum(each.up_raw for each in moved) / up,
        "down_smaller": sum(each.down_raw for each in moved) / down,
    }


def _stack(runs: list[RunDir]) -> Stack:
    compute = resolve(runs[0].config.train.device, "auto")
    stacks = [load_stack(run, compute) for run in runs]
    return stacks[0] if len(stacks) == 1 else Swarm(stacks)


class Swarm(CausalStack):
    """Whole models side by side, joined by nothing but their product."""

    def __init__(self, members: list[Stack]) -> None:
        blocks: list[nn.Module] = [block for member in members for block in member.blocks]
        super().__init__(members[0].config, blocks)
        self.members = members

    def predictions(self, ids_BT: Tensor, start: str = "mean", seed: int = 0) -> list[LogitsAt]:
        return [logits for member in self.members for logits in member.predictions(ids_BT)]
