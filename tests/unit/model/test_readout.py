import math

import pytest
import torch

from blocktrain.model.stack import fit_weights, product, read_out


def distributions(count: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.log_softmax(3 * torch.randn(2, 5, 256), dim=-1) for _ in range(count)]


def test_every_readout_is_a_normalised_distribution():
    blocks = distributions(4)
    for log_probs in (
        read_out("final", blocks),
        product(blocks),
        product(blocks, [0.4, 0.1, 0.9, 0.2]),
    ):
        assert torch.allclose(log_probs.exp().sum(-1), torch.ones(2, 5), atol=1e-5)


def test_product_is_the_renormalised_geometric_mean():
    a, b = distributions(2)
    expected = (a.exp() * b.exp()).sqrt()
    expected = expected / expected.sum(-1, keepdim=True)
    assert torch.allclose(product([a, b]).exp(), expected, atol=1e-6)


def test_product_of_equals_is_each_of_them():
    a = distributions(1)[0]
    assert torch.allclose(product([a, a, a]), a, atol=1e-5)


def test_fitted_weights_find_the_informative_block():
    torch.manual_seed(1)
    targets = torch.randint(0, 256, (4, 50))
    likely = torch.where(torch.rand(4, 50) < 0.8, targets, 0)  # now and then it is wrong
    informative = torch.full((4, 50, 256), -8.0).scatter(-1, likely[..., None], 0.0)
    informative = torch.log_softmax(informative + torch.randn(4, 50, 256), dim=-1)
    noise = torch.log_softmax(torch.randn(4, 50, 256), dim=-1)
    stacked, flat = torch.stack([noise, informative]).flatten(1, 2), targets.flatten()
    weights = fit_weights(2, lambda: [(stacked, flat)])
    assert weights[1] > 2 * abs(weights[0])
    fitted = product([noise, informative], weights)
    equal = product([noise, informative])
    picked = targets[..., None]
    assert fitted.gather(-1, picked).mean() > equal.gather(-1, picked).mean()
    assert -fitted.gather(-1, picked).mean() < math.log(256)


def test_fitted_weights_are_a_minimum_whatever_parts_the_text_comes_in():
    blocks = torch.stack(distributions(3)).flatten(1, 2).repeat(1, 20, 1)
    targets = torch.stack([block.exp().multinomial(1)[:, 0] for block in blocks])
    targets = targets.gather(0, torch.arange(200)[None] % 3)[0]  # each block is right at times
    weights = fit_weights(3, lambda: [(blocks, targets)])
    parts = [(blocks[:, at], targets[at]) for at in (slice(70), slice(70, 71), slice(71, None))]
    assert fit_weights(3, lambda: parts) == pytest.approx(weights, abs=1e-4)

    def loss(weights: list[float]) -> float:
        log_probs = product(list(blocks), weights)
        return float(-log_probs.gather(-1, targets[:, None]).double().mean())

    for block in range(3):
        for change in (-0.02, 0.02):
            moved = [w + change * (index == block) for index, w in enumerate(weights)]
            assert loss(moved) > loss(weights)
