"""An honest cross entropy: the context is teacher-forced, and z starts without the target in it.

Scores non-overlapping windows, in which every token is predicted once, and names the windows by a
digest, so that scores are only compared if they are of the same text. There is a score per start
(`mean`, `noise`), per block and per readout, and for noise starts also of the mixture over K draws.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from blocktrain.config import Config
from blocktrain.data.corpus import Bytes
from blocktrain.data.windows import Ids, evaluation_windows, shifted
from blocktrain.model import readout
from blocktrain.model.block import run_targets
from blocktrain.model.denoising import NoiseLevel
from blocktrain.model.stack import DenoisingStack, Stack
from blocktrain.numerics.noise import precondition
from blocktrain.numerics.sampling import mixed_seed
from blocktrain.train.cascade import Prefix

Reading = tuple[str, str, int]  # start, readout, draws

NO_START = "none"  # of models whose blocks hand on no z
POSITIONS_PER_BATCH = 1 << 15
FITTED_BYTES = 1 << 16


@dataclass(frozen=True)
class ModelScore:
    """One way of reading the model, and its cross entropy in nats per byte."""

    start: str
    readout: str
    ce: float
    draws: int = 1

    @property
    def perplexity(self) -> float:
        return math.exp(self.ce)

    @property
    def bits_per_byte(self) -> float:
        return self.ce / math.log(2)


@dataclass(frozen=True)
class Evaluation:
    scores: list[ModelScore]
    windows: int
    window: int
    digest: str
    parameters: int
    product_weights: list[float] | None = field(default=None)
    draft_agreement: float | None = None

    @property
    def default(self) -> ModelScore:
        """The reading that users get by default: product, from the mean start if there are starts;
        otherwise the only one."""
        for score in self.scores:
            if score.readout == "product" and score.start in ("mean", NO_START):
                return score
        return self.scores[-1]


def evaluate(
    stack: Stack,
    windows: Bytes,
    draws: int = 4,
    seed: int = 0,
    product_weights: list[float] | None = None,
    on_scored: Callable[[int], None] = lambda windows: None,
) -> Evaluation:
    """Score every start, block and readout on the given windows; `on_scored` is told of every few
    that are done."""
    sums: dict[Reading, float] = {}
    agreed = 0
    for number, batch in enumerate(_batches(windows)):
        targets = to_device(batch, stack.device)
        seeds = [mixed_seed(seed, draw, number) for draw in range(draws)]
        readings = _readings(stack, batch, seeds, product_weights)
        agreed += _agreed(readings)
        for key, log_probs in readings:
            nll = -log_probs.gather(-1, targets[..., None]).cpu().double().sum()
            sums[key] = sums.get(key, 0.0) + float(nll)
        on_scored(len(batch))
    scores = [
        ModelScore(start, name, total / windows.size, count)
        for (start, name, count), total in sums.items()
    ]
    count, window = windows.shape
    named = f"{count}x{window} ".encode() + windows.tobytes()
    digest = hashlib.sha256(named).hexdigest()[:16]
    agreement = agreed / windows.size if len(stack.blocks) > 1 else None
    return Evaluation(scores, count, window, digest, stack.parameters, product_weights, agreement)


def fit_product_weights(stack: Stack, valid: Bytes) -> list[float]:
    """Weights of the product that fit the beginning of valid best; never fit them on the windows
    whose score is reported."""
    window = stack.config.model.window
    windows = evaluation_windows(valid, window, max(1, FITTED_BYTES // window))
    log_probs: list[list[Tensor]] = []
    targets: list[Tensor] = []
    for batch in _batches(windows):
        log_probs.append(
            stack.log_probs(to_device(shifted(batch, stack.config.vocabulary), stack.device))
        )
        targets.append(to_device(batch, stack.device))
    blocks = [torch.cat(parts) for parts in zip(*log_probs, strict=True)]
    return readout.fit_weights(blocks, torch.cat(targets))


@torch.no_grad()
def solo_ce(
    config: Config, block: int, module: nn.Module, windows: Bytes, prefix: Prefix | None = None
) -> float:
    """The cross entropy of one block alone. A denoising block starts from the mean at its own
    highest sigma; a block of a cascade reads the blocks before it and predicts through its tail."""
    module.eval()
    device = next(module.parameters()).device
    if not config.kind.denoises:
        return _causal_ce(config, module, windows, prefix, device)
    table = run_targets(config, device)
    sigma = config.partition().owned_range(block)[1]
    level = precondition(sigma, config.objective.sigma_data)
    total = 0.0
    for batch in _batches(windows):
        ids = to_device(shifted(batch, config.vocabulary), device)
        z = torch.zeros(*ids.shape, config.state_width, device=device)
        logits = module(ids, z, NoiseLevel.constant(level, len(ids), device), table)
        total += _summed_ce(logits, batch)
    return total / windows.size


def _causal_ce(
    config: Config,
    module: nn.Module,
    windows: Bytes,
    prefix: Prefix | None,
    device: torch.device,
) -> float:
    total = 0.0
    for batch in _batches(windows):
        ids = to_device(shifted(batch, config.vocabulary), device)
        total += _summed_ce(module(prefix(ids) if prefix else ids), batch)
    return total / windows.size


def _summed_ce(logits: Tensor, batch: Bytes) -> float:
    targets = to_device(batch, logits.device).flatten()
    return float(nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum"))


def _readings(
    stack: Stack, batch: Bytes, seeds: list[int], weights: list[float] | None
) -> list[tuple[Reading, Tensor]]:
    ids = to_device(shifted(batch, stack.config.vocabulary), stack.device)
    if not isinstance(stack, DenoisingStack):
        return _causal_readings(stack.log_probs(ids), weights)
    contexts = stack.read_contexts(ids)
    mean = stack.traverse(contexts, stack.starting_point("mean", ids.shape))
    result: list[tuple[Reading, Tensor]] = [
        (("mean", name, 1), log_probs) for name, log_probs in _named(mean)
    ]
    if weights is not None:
        result.append((("mean", "product fitted", 1), readout.product(mean, weights)))
    mixed: dict[str, Tensor] = {}  # log of the sum over the draws so far
    for draw, seed in enumerate(seeds):
        noise = stack.starting_point("noise", ids.shape, seed)
        for name, log_probs in _named(stack.traverse(contexts, noise)):
            if draw == 0:
                result.append((("noise", name, 1), log_probs))
                mixed[name] = log_probs
            else:
                mixed[name] = torch.logaddexp(mixed[name], log_probs)
    if len(seeds) > 1:
        result += [
            (("noise", name, len(seeds)), total - math.log(len(seeds)))
            for name, total in mixed.items()
        ]
    return result


def _causal_readings(
    blocks: list[Tensor], weights: list[float] | None
) -> list[tuple[Reading, Tensor]]:
    if len(blocks) == 1:
        return [((NO_START, "final", 1), blocks[0])]
    named = _named(blocks)
    if weights is not None:
        named.append(("product fitted", readout.product(blocks, weights)))
    return [((NO_START, name, 1), log_probs) for name, log_probs in named]


def _agreed(readings: list[tuple[Reading, Tensor]]) -> int:
    """Positions at which the first and the last block agree on the likeliest token: drafts of the
    first block that the model would accept."""
    likeliest: dict[str, Tensor] = {}
    for (start, name, _), log_probs in readings:
        if start in ("mean", NO_START) and name in ("block 0", "final"):
            likeliest[name] = log_probs.argmax(dim=-1)
    if len(likeliest) < 2:
        return 0
    return int((likeliest["block 0"] == likeliest["final"]).sum())


def _named(blocks: list[Tensor]) -> list[tuple[str, Tensor]]:
    named = [(f"block {index}", log_probs) for index, log_probs in enumerate(blocks)]
    return [*named, *((name, readout.read(name, blocks)) for name in readout.READOUTS)]


def _batches(windows: Bytes) -> list[Bytes]:
    size = max(1, POSITIONS_PER_BATCH // windows.shape[1])
    return [windows[i : i + size] for i in range(0, len(windows), size)]


def to_device(ids: Ids | Bytes, device: torch.device) -> Tensor:
    return torch.tensor(ids).to(device).long()  # a copy: corpora are read-only memory maps
