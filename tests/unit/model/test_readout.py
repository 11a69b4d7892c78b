import math

import torch

from blocktrain.model import readout


def distributions(count: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.log_softmax(3 * torch.randn(2, 5, 256), dim=-1) for _ in range(count)]


def test_every_readout_is_a_normalised_distribution():
    blocks = distributions(4)
    for log_probs in (
        readout.final(blocks),
        readout.product(blocks),
        readout.product(blocks, [0.4, 0.1, 0.9, 0.2]),
    ):
        assert torch.allclose(log_probs.exp().sum(-1), torch.ones(2, 5), atol=1e-5)


def test_product_is_the_renormalised_geometric_mean():
    a, b = distributions(2)
    expected = (a.exp() * b.exp()).sqrt()
    expected = expected / expected.sum(-1, keepdim=True)
    assert torch.allclose(readout.product([a, b]).exp(), expected, atol=1e-6)


def test_product_of_equals_is_each_of_them():
    a = distributions(1)[0]
    assert torch.allclose(readout.product([a, a, a]), a, atol=1e-5)


def test_fitted_weights_find_the_informative_block():
    torch.manual_seed(1)
    targets = torch.randint(0, 256, (4, 50))
    informative = torch.full((4, 50, 256), -8.0).scatter(-1, targets[..., None], 0.0)
    informative = torch.log_softmax(informative + torch.randn(4, 50, 256), dim=-1)
    noise = torch.log_softmax(torch.randn(4, 50, 256), dim=-1)
    weights = readout.fit_weights([noise, informative], targets)
    assert weights[1] > 2 * abs(weights[0])
    fitted = readout.product([noise, informative], weights)
    equal = readout.product([noise, informative])
    picked = targets[..., None]
    assert fitted.gather(-1, picked).mean() > equal.gather(-1, picked).mean()
    assert -fitted.gather(-1, picked).mean() < math.log(256)
