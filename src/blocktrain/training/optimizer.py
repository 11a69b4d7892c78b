"""The optimizers of a block, Muon and AdamW. swarm/bounds.py limits updates by how far these move a
number per step; change both together."""

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from blocktrain.config import TrainConfig
from blocktrain.model.block import Block
from blocktrain.model.layer import Layer
from blocktrain.model.linear import Linear

MOMENTUM = 0.95
# Newton-Schulz: a quintic that brings singular values in (0, 1] to about 1 in five iterations.
# It is steep at zero and nowhere exact, which is good enough (Jordan et al., 2024).
QUINTIC, ITERATIONS = (3.4445, -4.7750, 2.0315), 5
# Scales an orthogonal matrix to the size of AdamW's steps, so that both optimizers can use one
# learning rate (Liu et al., 2025).
LIKE_ADAMW = 0.2
AT_ONCE = 2**25  # numbers to orthogonalise together; there are several copies in memory meanwhile
ADAMW_EPS = 1e-8


def moment_shapes(module: nn.Module, settings: TrainConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of a block's optimizer state, by parameter and kind."""
    by_muon = {id(matrix.weight) for matrix in _muon_matrices(module, settings)}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in module.named_parameters():
        shape = tuple(parameter.shape)
        if id(parameter) in by_muon:
            shapes[f"{name}.momentum"] = shape
        else:
            shapes |= {f"{name}.step": (), f"{name}.exp_avg": shape, f"{name}.exp_avg_sq": shape}
    return shapes


class BlockOptimizer(torch.optim.Optimizer):
    """AdamW for all parameters, or Muon for the layers' matrices and AdamW for the rest.

    `step_unless` reads a flag on the device and changes nothing if it is set. So a step whose loss
    or gradient is not finite is skipped without waiting for the host.
    """

    def __init__(self, module: nn.Module, settings: TrainConfig, lr: Tensor) -> None:
        self._matrices = _muon_matrices(module, settings)
        self._settings, self._lr = settings, lr
        self._by_adamw = _adamw_groups(module, {id(m.weight) for m in self._matrices}, settings)
        by_muon = {
            "params": [matrix.weight for matrix in self._matrices],
            "weight_decay": settings.weight_decay,
        }
        groups = [group for group in (by_muon, *self._by_adamw) if group["params"]]
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step_unless(self, bad: Tensor) -> None:
        """Make a step if `bad` is 0; if it is 1, change neither weights nor moments."""
        if bad.device.type == "mps" and bad:
            return  # the fused AdamW of MPS does not read the flag
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
        for maps in self._maps_of_one_shape():
            directions = torch.stack([self._direction(*each, bad.bool()) for each in maps])
            scale = LIKE_ADAMW * max(directions.shape[1:]) ** 0.5
            for (matrix, rows), step in zip(maps, orthogonal(directions), strict=True):
                weight = matrix.weight[rows]
                weight.mul_(1.0 - rate * self._settings.weight_decay)
                weight.sub_(step * (rate * scale))

    def _maps_of_one_shape(self) -> Iterator[list[tuple[Linear, slice]]]:
        """Matrices of equal shape, to orthogonalise in one call. Each is given as a linear map and
        the rows of one of its fused parts, such as q of a fused q, k and v."""
        by_shape: dict[tuple[int, int], list[tuple[Linear, slice]]] = defaultdict(list)
        for matrix in self._matrices:
            start = 0
            for rows in matrix.parts:
                shape = rows, matrix.weight.size(1)
                by_shape[shape].append((matrix, slice(start, start + rows)))
                start += rows
        for shape, maps in by_shape.items():
            count = max(1, AT_ONCE // math.prod(shape))
            for first in range(0, len(maps), count):
                yield maps[first : first + count]

    def _direction(self, matrix: Linear, rows: slice, bad: Tensor) -> Tensor:
        """Update the momentum of some rows. Returns Nesterov's sum of gradient and momentum."""
        assert matrix.weight.grad is not None
        state = self.state[matrix.weight]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(matrix.weight)
        gradient = torch.where(bad, 0.0, matrix.weight.grad[rows])
        momentum: Tensor = state["momentum"][rows]
        momentum.mul_(torch.where(bad, 1.0, MOMENTUM)).add_(gradient)
        return gradient + MOMENTUM * momentum


def orthogonal(matrices: Tensor) -> Tensor:
    """Orthogonalise each matrix: bring its singular values to about one."""
    x = matrices.bfloat16() if matrices.device.type == "cuda" else matrices
    upright = x.size(1) > x.size(2)
    if upright:
        x = x.mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = QUINTIC
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if upright else x).to(matrices.dtype)


def _adamw_groups(
    module: nn.Module, excluded: set[int], settings: TrainConfig
) -> list[dict[str, Any]]:
    """All parameters but the excluded ones: first those with weight decay, then those without."""
    undecayed = {
        id(parameter)
        for part in module.modules()
        if isinstance(part, Block | Layer)
        for parameter in part.undecayed()
    }
    rest = [parameter for parameter in module.parameters() if id(parameter) not in excluded]
    decayed = [p for p in rest if id(p) not in undecayed]
    return [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": [p for p in rest if id(p) in undecayed], "weight_decay": 0.0},
    ]


def _muon_matrices(module: nn.Module, settings: TrainConfig) -> list[Linear]:
    if settings.optimizer != "muon":
        return []
    layers = [layer for layer in module.modules() if isinstance(layer, Layer)]
    return [part for layer in layers for part in layer.modules() if isinstance(part, Linear)]
