"""From the blocks' distributions to one: `final` and `product`.

Everything is log-probabilities in, log-probabilities out, over the last dimension. Both
readouts are normalised distributions, so their mean negative log-likelihood is a true cross
entropy.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

READOUTS = ("final", "product")


def final(log_probs: Sequence[Tensor]) -> Tensor:
    """The last block's distribution."""
    return log_probs[-1]


def product(log_probs: Sequence[Tensor], weights: Sequence[float] | None = None) -> Tensor:
    """The (weighted) geometric mean of the blocks' distributions, renormalised."""
    if weights is None:
        weights = [1.0 / len(log_probs)] * len(log_probs)
    total = torch.zeros_like(log_probs[0])
    for weight, block_log_probs in zip(weights, log_probs, strict=True):
        total = total + weight * block_log_probs
    return torch.log_softmax(total, dim=-1)


def read(name: str, log_probs: Sequence[Tensor], weights: Sequence[float] | None = None) -> Tensor:
    return final(log_probs) if name == "final" else product(log_probs, weights)


def fit_weights(log_probs: Sequence[Tensor], targets: Tensor, steps: int = 50) -> list[float]:
    """Product weights that minimise the cross entropy of the targets. They need not sum to 1: a
    larger sum sharpens the distribution."""
    weights = torch.full(
        (len(log_probs),), 1.0 / len(log_probs), device=targets.device, requires_grad=True
    )
    stacked = torch.stack([p.flatten(0, -2) for p in log_probs])
    flat_targets = targets.flatten()
    optimizer = torch.optim.LBFGS([weights], max_iter=steps, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(
            torch.einsum("b,bnv->nv", weights, stacked), flat_targets
        )
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return [float(weight) for weight in weights.detach()]
