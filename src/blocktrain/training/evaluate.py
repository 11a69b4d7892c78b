"""Honest cross entropy: the context is teacher-forced, and z starts without the target in it.

Windows do not overlap, so every token is predicted once. A digest names the windows, and only
scores with equal digests can be compared. There is a score for every start (`mean`, `noise`), block
and readout. Noise starts also have a score for the mixture over several draws.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blocktrain.config import Config
from blocktrain.data.corpus import Bytes, Ids, evaluation_windows, shifted
from blocktrain.data.tokenizer import MASKED_DTYPE, ids_of, trained_on
from blocktrain.model.block import CausalBlock, LogitsAt, run_targets
from blocktrain.model.denoising import DenoisingBlock, NoiseLevel
from blocktrain.model.linear import chunks
from blocktrain.model.stack import READOUTS, DenoisingStack, Stack, fit_weights, product, read_out
from blocktrain.numerics.noise import precondition
from blocktrain.numerics.sampling import mixed_seed
from blocktrain.training.streamed import AnyPrefix, AnySuffix

Reading = tuple[str, str, int]  # start, readout, draws

NO_START = "none"  # of models without z
POSITIONS_PER_BATCH = 1 << 15
FITTED_BYTES = 1 << 16


@dataclass(frozen=True)
class ModelScore:
    """The cross entropy of one start and readout, in nats per byte."""

    start: str
    readout: str
    ce: float
    draws: int = 1
    bytes_per_token: float = 1.0  # of the windows that were scored

    @property
    def ce_per_token(self) -> float:
        return self.ce * self.bytes_per_token

    @property
    def perplexity(self) -> float:
        """The perplexity per token; infinite if it is too large for a float."""
        try:
            return math.exp(self.ce_per_token)
        except OverflowError:
            return math.inf

    @property
    def bits_per_byte(self) -> float:
        return self.ce / math.log(2)

    def row(self) -> dict[str, Any]:
        """The score in all units, for JSON, which has no infinity."""
        return {
            **asdict(self),
            "perplexity": self.perplexity if math.isfinite(self.perplexity) else None,
            "bits_per_byte": self.bits_per_byte,
            "ce_per_token": self.ce_per_token,
        }


@dataclass(frozen=True)
class Evaluation:
    scores: list[ModelScore]
    windows: int
    window: int
    digest: str
    parameters: int
    product_weights: list[float] | None = None
    draft_agreement: float | None = None
    readout: str = "product"  # of the model's score

    @property
    def ce(self) -> float:
        """The model's cross entropy, in nats per byte."""
        return self.default.ce

    def rows(self) -> list[dict[str, Any]]:
        """All scores, one row each."""
        return [score.row() for score in self.scores]

    @property
    def default(self) -> ModelScore:
        """The model's score: that of its default readout, from the mean start if the model has
        starts. The last score if the blocks that were scored have no such readout."""
        for score in self.scores:
            if score.readout == self.readout and score.start in ("mean", NO_START):
                return score
        return self.scores[-1]


@torch.no_grad()
def evaluate(
    stack: Stack,
    windows: Bytes,
    draws: int = 4,
    seed: int = 0,
    product_weights: list[float] | None = None,
    on_scored: Callable[[int], None] = lambda windows: None,
    text_bytes: int | None = None,
) -> Evaluation:
    """Score every start, block and readout. After each batch, `on_scored` gets its number of
    windows. `text_bytes`: the size of the windows' text; default: a byte per token."""
    scored = trained_on(windows).size
    text_bytes = text_bytes or scored
    sums: dict[Reading, float] = defaultdict(float)
    agreed, several = 0, sum(map(stack.config.has_head, range(len(stack.blocks)))) > 1
    for number, batch in enumerate(_batches(windows)):
        seeds = [mixed_seed(seed, draw, number) for draw in range(draws)]
        readings, agreements = _readings(stack, batch, seeds, product_weights)
        agreed += agreements
        for key, log_probs_BT in readings.items():
            sums[key] -= float(_scored(log_probs_BT.cpu().double(), batch).sum())
        on_scored(len(batch))
    scores = [
        ModelScore(start, name, total / text_bytes, count, text_bytes / max(1, scored))
        for (start, name, count), total in sums.items()
    ]
    count, window = windows.shape
    content = f"{count}x{window} ".encode() + windows.tobytes()
    digest = hashlib.sha256(content).hexdigest()[:16]
    agreement = agreed / windows.size if several else None
    return Evaluation(
        scores, count, window, digest, stack.parameters, product_weights, agreement,
        stack.config.default_readout,
    )  # fmt: skip


@torch.no_grad()
def fit_product_weights(stack: Stack, valid: Bytes) -> list[float]:
    """Fit the product's weights to the beginning of `valid`. Never fit them to windows whose score
    is reported."""
    config = stack.config
    fitted_tokens = FITTED_BYTES / config.vocabulary.bytes_per_token
    window = config.model.window
    windows = evaluation_windows(valid, window, max(1, int(fitted_tokens) // window))
    batches = [_inputs(config, batch, stack.device) for batch in _batches(windows)]
    read = [(stack.predictions(ids), targets_BT) for ids, targets_BT in batches]
    blocks = len(read[0][0])

    def parts() -> Iterator[tuple[Tensor, Tensor]]:
        for predictions, targets_BT in read:
            for at in _chunks(config, targets_BT, blocks):
                log_probs = [torch.log_softmax(logits(at), dim=-1) for logits in predictions]
                yield torch.stack(log_probs).flatten(1, 2), targets_BT[:, at].flatten()

    return fit_weights(blocks, parts)


@torch.no_grad()
def solo_ce(
    config: Config,
    block: int,
    module: nn.Module,
    windows: Bytes,
    prefix: AnyPrefix | None = None,
    suffix: AnySuffix | None = None,
) -> float:
    """The cross entropy of one block, in nats per token. A denoising block starts from the mean at
    its own highest sigma; a block of a cascade reads its predecessors and predicts through its
    tail, or through the blocks after it."""
    module.eval()
    device = next(module.parameters()).device
    total = 0.0
    for batch in _batches(windows):
        ids, targets_BT = _inputs(config, batch, device)
        logits = _solo_logits(config, block, module, ids, prefix, suffix)
        for at in _chunks(config, targets_BT):
            predicted, targets = logits(at).flatten(0, 1), targets_BT[:, at].flatten()
            if (part := batch[:, at]).dtype == MASKED_DTYPE:
                chosen = torch.tensor(part >= 0).to(device).flatten()
                predicted, targets = predicted[chosen], targets[chosen]
            total += float(nn.functional.cross_entropy(predicted, targets, reduction="sum"))
    return total / max(1, trained_on(windows).size)


def _solo_logits(
    config: Config,
    block: int,
    module: nn.Module,
    ids: Tensor,
    prefix: AnyPrefix | None,
    suffix: AnySuffix | None,
) -> LogitsAt:
    if isinstance(module, CausalBlock):
        features = module.features(prefix.features(ids) if prefix else ids)
        return suffix.logits_of(features) if suffix else module.logits_of(features)
    assert isinstance(module, DenoisingBlock)
    sigma = config.partition().owned_range(block)[1]
    level = precondition(sigma, config.objective.sigma_data)
    levels = NoiseLevel.constant(level, len(ids), ids.device)
    table = run_targets(config, ids.device)
    z = torch.zeros(*ids.shape, config.state_width, device=ids.device)
    return module.logits_of(module.answer(ids, z, levels, table), levels, table)


def _readings(
    stack: Stack, batch: Bytes, seeds: list[int], weights: list[float] | None
) -> tuple[dict[Reading, Tensor], int]:
    """Returns log-probabilities of a batch's tokens, for every start, block and readout, and the
    number of positions at which the first and the last block agree on the likeliest token. There
    the model would accept the first block's draft."""
    ids, targets_BT = _inputs(stack.config, batch, stack.device)
    result: dict[Reading, Tensor] = {}
    mixed: dict[str, Tensor] = {}  # log of the sum over the draws so far
    agreed = 0
    for start, predictions in _traversals(stack, ids, seeds):
        picked: dict[str, list[Tensor]] = defaultdict(list)
        for at in _chunks(stack.config, targets_BT):
            blocks = [torch.log_softmax(logits(at), dim=-1) for logits in predictions]
            for name, log_probs in _named(start, blocks, weights).items():
                picked[name].append(log_probs.gather(-1, targets_BT[:, at, None]).squeeze(-1))
            if start != "noise":
                first, last = (log_probs.argmax(dim=-1) for log_probs in (blocks[0], blocks[-1]))
                agreed += int((first == last).sum())
        for name, parts in picked.items():
            log_probs_BT = torch.cat(parts, dim=1)
            result.setdefault((start, name, 1), log_probs_BT)
            if start == "noise":
                before = mixed.get(name)
                mixed[name] = (
                    log_probs_BT if before is None else torch.logaddexp(before, log_probs_BT)
                )
    if len(seeds) > 1:
        for name, total in mixed.items():
            result["noise", name, len(seeds)] = total - math.log(len(seeds))
    return result, agreed


def _traversals(
    stack: Stack, ids: Tensor, seeds: list[int]
) -> Iterator[tuple[str, list[LogitsAt]]]:
    """Every block's predictions, from the mean start and from noise of every seed."""
    if not isinstance(stack, DenoisingStack):
        yield NO_START, stack.predictions(ids)
        return
    contexts = stack.read_contexts(ids)
    yield "mean", stack.traverse(contexts, stack.starting_point("mean", ids.shape))
    for seed in seeds:
        yield "noise", stack.traverse(contexts, stack.starting_point("noise", ids.shape, seed))


def _named(start: str, blocks: list[Tensor], weights: list[float] | None) -> dict[str, Tensor]:
    if start == NO_START and len(blocks) == 1:
        return {"final": blocks[0]}
    named = {f"block {index}": log_probs for index, log_probs in enumerate(blocks)}
    named |= {readout: read_out(readout, blocks) for readout in READOUTS}
    if weights is not None and start != "noise":
        named["product fitted"] = product(blocks, weights)
    return named


def _batches(windows: Bytes) -> list[Bytes]:
    size = max(1, POSITIONS_PER_BATCH // windows.shape[1])
    return [windows[i : i + size] for i in range(0, len(windows), size)]


def _inputs(config: Config, batch: Bytes, device: torch.device) -> tuple[Tensor, Tensor]:
    """A batch's context and targets."""
    return to_device(shifted(batch, config.vocabulary), device), to_device(ids_of(batch), device)


def _scored(values_BT: Tensor, batch: Bytes) -> Tensor:
    """The values at the tokens that are trained on, and zeros at the others."""
    return values_BT if batch.dtype != MASKED_DTYPE else values_BT * torch.tensor(batch >= 0)


def _chunks(config: Config, targets_BT: Tensor, blocks: int = 1) -> Iterator[slice]:
    """Slices of positions so short that the logits of `blocks` blocks fit in memory."""
    batch, positions = targets_BT.shape
    return chunks(positions, batch * config.vocabulary.size * blocks, targets_BT.device)


def to_device(ids: Ids | Bytes, device: torch.device) -> Tensor:
    return torch.tensor(ids).to(device).long()  # a copy: corpora are read-only memory maps
