"""The learning rate as a pure function of the step: linear warm-up, then a cosine to a floor."""

import math
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from blocktrain.config import TrainConfig
from blocktrain.model.block import Block
from blocktrain.model.layer import Layer, Linear


def learning_rate(step: int, settings: TrainConfig) -> float:
    warm = min(1.0, (step + 1) / settings.warmup) if settings.warmup else 1.0
    progress = min(1.0, step / settings.steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.lr * warm * (settings.lr_floor + (1.0 - settings.lr_floor) * cosine)


MOMENTUM = 0.95
# A quintic that takes singular values from (0, 1] to about 1 in five turns: steepest at zero,
# exact nowhere, and exact is not needed (Jordan et al., 2024).
QUINTIC, TURNS = (3.4445, -4.7750, 2.0315), 5
# An orthogonal matrix times this has entries as large as AdamW's steps, so that one learning rate
# serves both (Liu et al., 2025).
LIKE_ADAMW = 0.2
AT_ONCE = 2**25  # numbers made orthogonal together: copies of them are in memory meanwhile


def new_optimizer(module: nn.Module, settings: TrainConfig, lr: Tensor) -> torch.optim.Optimizer:
    by_muon = _stepped_by_muon(module, settings)
    taken = {id(matrix.weight) for matrix in by_muon}
    spared = {
        id(parameter)
        for part in module.modules()
        if isinstance(part, Block | Layer)
        for parameter in part.undecayed()
    }
    decayed: list[Tensor] = []
    others: list[Tensor] = []
    for parameter in module.parameters():
        if id(parameter) not in taken:
            (others if id(parameter) in spared else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=lr,
        betas=(settings.beta1, settings.beta2),
        fused=True,
        capturable=lr.device.type == "cuda",
    )
    return Muon(by_muon, adamw, lr, settings.weight_decay) if by_muon else adamw


def moment_shapes(module: nn.Module, settings: TrainConfig) -> dict[str, tuple[int, ...]]:
    """What an optimizer keeps of a block's steps, by parameter and kind."""
    taken = {id(matrix.weight) for matrix in _stepped_by_muon(module, settings)}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in module.named_parameters():
        shape = tuple(parameter.shape)
        if id(parameter) in taken:
            shapes[f"{name}.momentum"] = shape
        else:
            shapes |= {f"{name}.step": (), f"{name}.exp_avg": shape, f"{name}.exp_avg_sq": shape}
    return shapes


class Muon(torch.optim.Optimizer):
    """Steps matrices itself and everything else by an AdamW; both keep their state in one place."""

    def __init__(
        self, matrices: list[Linear], beside: torch.optim.AdamW, lr: Tensor, weight_decay: float
    ) -> None:
        weights = [matrix.weight for matrix in matrices]
        super().__init__(weights, {"lr": lr, "weight_decay": weight_decay})
        self.found_inf: Tensor | None = None
        self._matrices, self._beside = matrices, beside
        self.state = beside.state
        self.param_groups.extend(beside.param_groups)

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        if self.found_inf is not None:
            self._beside.found_inf = self.found_inf  # type: ignore[attr-defined]
        self._beside.step()
        group = self.param_groups[0]
        bad = torch.zeros_like(group["lr"]) if self.found_inf is None else self.found_inf
        rate = group["lr"] * (1.0 - bad)
        for alike in self._alike():
            directions = torch.cat([self._direction(matrix, bad.bool()) for matrix in alike])
            steps = torch.split(orthogonal(directions), [matrix.parts for matrix in alike])
            scale = LIKE_ADAMW * max(directions.shape[1:]) ** 0.5
            for matrix, step in zip(alike, steps, strict=True):
                weight = matrix.weight
                weight.mul_(1.0 - rate * group["weight_decay"])
                weight.sub_(step.reshape(weight.shape) * (rate * scale))

    def _alike(self) -> Iterator[list[Linear]]:
        """Matrices whose parts have one shape: they are made orthogonal together."""
        by_shape: dict[tuple[int, int], list[Linear]] = defaultdict(list)
        for matrix in self._matrices:
            rows, columns = matrix.weight.shape
            by_shape[rows // matrix.parts, columns].append(matrix)
        for matrices in by_shape.values():
            count = max(1, AT_ONCE // matrices[0].weight.numel())
            for start in range(0, len(matrices), count):
                yield matrices[start : start + count]

    def _direction(self, matrix: Linear, bad: Tensor) -> Tensor:
        """Gradient and momentum together (Nesterov), a matrix for each part."""
        gradient = matrix.weight.grad
        assert gradient is not None
        state = self.state[matrix.weight]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(gradient)
        gradient = torch.where(bad, 0.0, gradient)
        momentum: Tensor = state["momentum"]
        momentum.mul_(torch.where(bad, 1.0, MOMENTUM)).add_(gradient)
        direction = gradient + MOMENTUM * momentum
        return direction.view(matrix.parts, -1, gradient.size(1))


def orthogonal(matrices: Tensor) -> Tensor:
    """Each matrix with its singular values taken to about one."""
    x = matrices.bfloat16() if matrices.device.type == "cuda" else matrices
    upright = x.size(1) > x.size(2)
    if upright:
        x = x.mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = QUINTIC
    for _ in range(TURNS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if upright else x).to(matrices.dtype)


def _stepped_by_muon(module: nn.Module, settings: TrainConfig) -> list[Linear]:
    if settings.optimizer != "muon":
        return []
    layers = [layer for layer in module.modules() if isinstance(layer, Layer)]
    return [matrix for layer in layers for matrix in layer.muon_matrices()]
