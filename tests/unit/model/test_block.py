import torch
from tests.support.models import awake_block

from blocktrain.config import Config
from blocktrain.model.block import target_table
from blocktrain.model.denoising import DenoisingBlock, NoiseLevel
from blocktrain.model.stack import new_block
from blocktrain.numerics.noise import precondition


def test_target_rows_are_orthonormal_where_there_is_room():
    table = target_table(3, 256)
    assert torch.allclose(table @ table.T, torch.eye(256), atol=1e-5)
    assert torch.allclose(target_table(3, 64).norm(dim=1), torch.ones(256), atol=1e-5)


def test_the_table_is_the_seeds_alone():
    assert torch.equal(target_table(3, 256), target_table(3, 256))
    assert not torch.equal(target_table(3, 256), target_table(4, 256))


def test_the_clean_stream_never_sees_sigma_or_z(config: Config):
    block = awake_block(config)
    assert isinstance(block, DenoisingBlock)
    ids = torch.randint(0, 256, (2, 16))
    context = block.read_context(ids)
    table = target_table(0, 256)
    kept = [(layer.cached.k_BHTK.clone(), layer.cached.v_BHTK.clone()) for layer in context.layers]
    for sigma in (1.0, 9.0):
        level = NoiseLevel.constant(precondition(sigma, 0.5), 2, torch.device("cpu"))
        block.denoise(
            context, sigma * torch.randn(2, 16, 256), level, table, block.modulations(level)
        )
    for layer, (k, v) in zip(context.layers, kept, strict=True):
        assert torch.equal(layer.cached.k_BHTK, k)
        assert torch.equal(layer.cached.v_BHTK, v)


def test_sigma_and_z_do_change_the_answer(config: Config):
    block = awake_block(config)
    ids = torch.randint(0, 256, (1, 16))
    table = target_table(0, 256)
    z = torch.randn(1, 16, 256)

    def logits(sigma: float, z: torch.Tensor) -> torch.Tensor:
        level = NoiseLevel.constant(precondition(sigma, 0.5), 1, torch.device("cpu"))
        out: torch.Tensor = block(ids, z, level, table)
        return out

    assert not torch.allclose(logits(2.0, z), logits(4.0, z))
    assert not torch.allclose(logits(2.0, z), logits(2.0, -z))


def test_an_untrained_block_answers_with_exact_evidence(config: Config):
    """logits = z.e / sigma^2 before anything is learned: the Bayes posterior of a flat prior."""
    block = new_block(config, 0)
    table = target_table(0, 256)
    z = torch.randn(2, 16, 256)
    level = NoiseLevel.constant(precondition(2.0, 0.5), 2, torch.device("cpu"))
    logits = block(torch.randint(0, 256, (2, 16)), z, level, table)
    assert torch.allclose(logits, z @ table.T / 4.0, atol=1e-5)


def test_a_learned_scale_is_one_scalar(config: Config):
    learned = new_block(config.with_settings(objective__logit_scale="learned"), 0)
    evidence = new_block(config, 0)
    extra = {n for n, _ in learned.named_parameters()} - {n for n, _ in evidence.named_parameters()}
    assert extra == {"log_scale"}


def test_recomputing_layers_changes_no_gradient(config: Config):
    gradients = []
    for recompute in (False, True):
        block = awake_block(config)
        block.recompute = recompute
        block.train()
        torch.manual_seed(0)
        ids, z = torch.randint(0, 256, (2, 16)), torch.randn(2, 16, 256)
        level = NoiseLevel.constant(precondition(2.0, 0.5), 2, torch.device("cpu"))
        block(ids, z, level, target_table(0, 256)).square().mean().backward()
        gradients.append([p.grad.clone() for p in block.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(list(block.parameters()))
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)
