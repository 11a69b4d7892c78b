"""How a block's weights are stepped: the learning rate's schedule, Muon and AdamW."""

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from blocktrain.config import TrainConfig
from blocktrain.model.block import Block
from blocktrain.model.layer import Layer, Linear


def learning_rate(step: int, settings: TrainConfig) -> float:
    """Linear warm-up, then a cosine down to a floor."""
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
AT_ONCE = 2**25  # numbers made orthogonal together; copies of them are in memory meanwhile
ADAMW_EPS = 1e-8


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


class BlockOptimizer(torch.optim.Optimizer):
    """AdamW, and for the matrices of layers Muon if the settings say so.

    `step_unless` takes a flag on the device and changes nothing where it is set, so that a step
    whose loss or gradient is not finite is skipped without waiting for the host.
    """

    def __init__(self, module: nn.Module, settings: TrainConfig, lr: Tensor) -> None:
        self._matrices = _stepped_by_muon(module, settings)
        self._settings, self._lr = settings, lr
        self._by_adamw = _adamw_groups(module, {id(m.weight) for m in self._matrices}, settings)
        by_muon = {
            "params": [matrix.weight for matrix in self._matrices],
            "weight_decay": settings.weight_decay,
        }
        groups = [group for group in (by_muon, *self._by_adamw) if group["params"]]
        super().__init__(groups, {"lr": lr})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.step_unless(torch.zeros_like(self._lr))

    @torch.no_grad()
    def step_unless(self, bad: Tensor) -> None:
        """Step where `bad` is 0, and change neither weights nor moments where it is 1."""
        if bad.device.type == "mps" and bad:
            return  # the fused AdamW of this device does not read the flag
        for group in self._by_adamw:
            self._step_by_adamw(group["params"], group["weight_decay"], bad)
        self._step_by_muon(bad)

    def _step_by_adamw(self, parameters: list[Tensor], weight_decay: float, bad: Tensor) -> None:
        trained = [parameter for parameter in parameters if parameter.grad is not None]
        states = [self._adamw_state(parameter) for parameter in trained]
        adamw(
            trained,
            [cast("Tensor", parameter.grad) for parameter in trained],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            capturable=self._lr.device.type == "cuda",
            found_inf=None if bad.device.type == "mps" else bad,
            amsgrad=False,
            maximize=False,
            beta1=self._settings.beta1,
            beta2=self._settings.beta2,
            eps=ADAMW_EPS,
            lr=self._lr,
            weight_decay=weight_decay,
        )

    def _adamw_state(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state

    def _step_by_muon(self, bad: Tensor) -> None:
        rate = self._lr * (1.0 - bad)
        for alike in self._alike():
            directions = torch.cat([self._direction(matrix, bad.bool()) for matrix in alike])
            steps = torch.split(orthogonal(directions), [matrix.parts for matrix in alike])
            scale = LIKE_ADAMW * max(directions.shape[1:]) ** 0.5
            for matrix, step in zip(alike, steps, strict=True):
                weight = matrix.weight
                weight.mul_(1.0 - rate * self._settings.weight_decay)
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


def _adamw_groups(
    module: nn.Module, taken: set[int], settings: TrainConfig
) -> list[dict[str, Any]]:
    """All parameters but those taken, with and without weight decay."""
    spared = {
        id(parameter)
        for part in module.modules()
        if isinstance(part, Block | Layer)
        for parameter in part.undecayed()
    }
    left = [parameter for parameter in module.parameters() if id(parameter) not in taken]
    groups = [
        ([p for p in left if id(p) not in spared], settings.weight_decay),
        ([p for p in left if id(p) in spared], 0.0),
    ]
    return [
        {"params": parameters, "weight_decay": decay} for parameters, decay in groups if parameters
    ]


def _stepped_by_muon(module: nn.Module, settings: TrainConfig) -> list[Linear]:
    if settings.optimizer != "muon":
        return []
    layers = [layer for layer in module.modules() if isinstance(layer, Layer)]
    return [matrix for layer in layers for matrix in layer.muon_matrices()]
