import math
from pathlib import Path
from typing import Any

import pytest
from tests.support.training import CPU

from blocktrain.config import Config, load_config
from blocktrain.config.sizes import block_sizes
from blocktrain.model.stack import new_block
from blocktrain.training.estimation import estimate
from blocktrain.training.frozen import Prefix
from blocktrain.training.optimizer import moment_shapes

CONFIGS = Path(__file__).parents[3] / "configs"


def test_parameters_are_counted_exactly(config: Config):
    needs = estimate(config)
    per_block = sum(p.numel() for p in new_block(config, 0).parameters())
    assert needs.parameters_per_block == per_block
    assert needs.parameters == 2 * per_block


VOCABULARY = {"vocab__sha256": "5" * 64, "vocab__size": 2048, "vocab__bos": 2050}
LLAMA = {"model__layer": "llama", "model__kv_heads": 1}


@pytest.mark.parametrize(
    "settings",
    [
        {"model__taps": 0, "model__activation": "gelu"},
        {"objective__logit_scale": "learned", "train__optimizer": "adamw"},
        VOCABULARY,
        {"objective__kind": "cascade", **VOCABULARY},
        {"objective__kind": "cascade", **LLAMA, "model__biases": "qkv"},
        {"objective__kind": "cascade", **LLAMA, "model__biases": "attention"},
        {"objective__kind": "end_to_end", **LLAMA, "model__biases": "all"},
        {"objective__kind": "end_to_end", **LLAMA, "model__tied_embeddings": True},
        {**LLAMA, "model__qk_norm": False, "model__head_dim": 6, "model__hidden": 40},
        {"objective__kind": "turns", **LLAMA},
    ],
    ids=str,
)
def test_sizes_from_settings_are_those_of_the_blocks(config: Config, settings: dict[str, Any]):
    config = config.with_settings(**settings)
    for index, size in enumerate(block_sizes(config)):
        block = new_block(config, index)
        assert size.parameters == sum(p.numel() for p in block.parameters())
        moments = sum(map(math.prod, filter(None, moment_shapes(block, config.train).values())))
        by_muon = size.matrices if config.train.optimizer == "muon" else 0
        assert moments - 2 * size.parameters + by_muon in (0, -2)  # a lone number has no shape


@pytest.mark.parametrize("name", ["wikitext2-small", "wikitext2-38m", "wikipedia-38m"])
def test_blocks_together_stay_near_the_end_to_end_size(name: str):
    needs = estimate(load_config(CONFIGS / f"{name}.toml"))
    assert needs.parameters / needs.end_to_end_parameters <= 1.15


def test_a_block_costs_at_most_1_7_causal_steps_of_the_same_layers():
    config = load_config(CONFIGS / "wikitext2-38m.toml")
    causal = config.with_settings(objective__kind="end_to_end", model__layers=3, model__blocks=1)
    ratio = estimate(config).flops_per_step / estimate(causal).flops_per_step
    assert 1.3 < ratio < 1.7


def test_billions_are_estimated_without_allocating_them():
    big = load_config(
        CONFIGS / "wikitext2-38m.toml",
        ["model.layers=48", "model.width=8192", "model.heads=64", "model.blocks=12"],
    )
    needs = estimate(big)
    assert needs.parameters > 30e9
    assert 12.0 < needs.fixed_bytes_per_worker / needs.parameters_per_block < 12.1
    adamw = estimate(big.with_settings(train__optimizer="adamw"))
    table = 4 * 256 * big.objective.target_dim
    assert adamw.fixed_bytes_per_worker == needs.parameters_per_block * 16 + table
    assert needs.seconds(1e15) == pytest.approx(needs.flops_per_step * needs.steps / 1e15)


@pytest.mark.parametrize(
    ("overrides", "measured_gb"),
    [
        ([], 3.87),
        (["objective.kind=end_to_end"], 8.61),
        (["train.checkpoint_layers=true"], 1.60),
        (["train.checkpoint_layers=true", "objective.kind=end_to_end"], 1.80),
    ],
)
def test_memory_is_near_what_was_measured(overrides: list[str], measured_gb: float):
    """Peaks of bench/memory.py on one H200 (docs/RESULTS.md), compiled, bf16."""
    overrides = [*overrides, "train.optimizer=adamw"]
    needs = estimate(load_config(CONFIGS / "wikitext2-38m.toml", overrides))
    assert needs.memory_per_worker / 1e9 == pytest.approx(measured_gb, rel=0.2)


@pytest.fixture
def uneven(cascade: Config) -> Config:
    """Three blocks that all differ: in layers, in tails, in whether they read bytes. By AdamW: all
    they train costs 16 bytes a parameter."""
    return cascade.with_settings(
        model__layers=6, model__blocks=3, model__depths=[1, 2, 3], objective__tail=3,
        train__optimizer="adamw",
    )  # fmt: skip


def test_a_cascades_parameters_are_counted_exactly(uneven: Config):
    counts = [sum(p.numel() for p in new_block(uneven, block).parameters()) for block in range(3)]
    assert len(set(counts)) == 3
    needs = estimate(uneven)
    assert needs.parameters == sum(counts)
    assert needs.parameters_per_block == max(counts)
    whole = new_block(uneven.with_settings(objective__kind="end_to_end"), 0)
    assert needs.end_to_end_parameters == sum(p.numel() for p in whole.parameters())


def test_a_worker_of_a_cascade_also_holds_the_trunks_before_it(uneven: Config):
    """Embedding included, tails and heads not."""
    needed = []
    for block in range(3):
        trained = sum(p.numel() for p in new_block(uneven, block).parameters())
        held = sum(p.nbytes for p in Prefix(uneven, block, CPU).parameters())
        needed.append(16 * trained + held)
    assert estimate(uneven).fixed_bytes_per_worker == max(needed)


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_with_a_feature_cache_the_trunks_before_are_not_held(uneven: Config, where: str):
    deepest = uneven.with_settings(model__depths=[1, 1, 4], objective__tail=0)
    needs = estimate(deepest.with_settings(objective__feature_cache=where))
    assert needs.fixed_bytes_per_worker == 16 * needs.parameters_per_block
    assert needs.fixed_bytes_per_worker < estimate(deepest).fixed_bytes_per_worker


def test_from_disk_one_of_the_trunks_before_is_held(uneven: Config):
    deepest = uneven.with_settings(
        model__depths=[2, 3, 1], objective__tail=0, train__frozen_in="disk"
    )
    needed = []
    for block in range(3):
        trained = sum(p.numel() for p in new_block(deepest, block).parameters())
        trunks = Prefix(deepest, block, CPU).trunks
        held = [sum(p.nbytes for p in trunk.parameters()) for trunk in trunks]
        needed.append(16 * trained + max(held, default=0))
    assert estimate(deepest).fixed_bytes_per_worker == max(needed)


def test_int8_halves_what_is_held_of_the_layers_before(uneven: Config):
    deepest = uneven.with_settings(model__depths=[2, 3, 1], objective__tail=0)
    own = 16 * max(
        sum(p.numel() for p in new_block(deepest, block).parameters()) for block in range(3)
    )
    bf16 = estimate(deepest).fixed_bytes_per_worker
    int8 = estimate(deepest.with_settings(objective__frozen="int8")).fixed_bytes_per_worker
    assert bf16 - own == 2 * (int8 - own) > 0


def test_the_feature_cache_is_stated(cascade: Config):
    assert estimate(cascade).feature_cache_bytes == 0
    for where in ("ram", "disk"):
        cached = cascade.with_settings(objective__feature_cache=where, objective__refresh_every=5)
        assert estimate(cached).feature_cache_bytes == 5 * 4 * 32 * 32 * 2
    denoise = cached.with_settings(objective__kind="denoise")
    assert estimate(denoise).feature_cache_bytes == 0
    assert estimate(cached.with_settings(model__blocks=1)).feature_cache_bytes == 0


def test_layers_before_cost_a_forward_pass_and_tails_a_whole_step(cascade: Config):
    """In steps of one trained layer: a layer that runs forward only counts a third."""

    def flops(depths: list[int], tail: int) -> float:
        return estimate(
            cascade.with_settings(
                model__layers=sum(depths), model__depths=depths, objective__tail=tail
            )
        ).flops_per_step

    layer = flops([1, 3], 0) - flops([1, 2], 0)
    assert flops([1, 1], 4) - flops([1, 1], 3) == pytest.approx(layer)
    assert flops([4, 4], 0) - flops([1, 4], 0) == pytest.approx(layer)  # three thirds


def test_a_codec_makes_updates_and_versions_smaller():
    whole = estimate(load_config(CONFIGS / "tiny.toml"))
    sparse = estimate(load_config(CONFIGS / "tiny.toml", ["swarm.codec=sparse"]))
    version = 4 * whole.parameters_per_block
    assert whole.wire_bytes_per_round == 2 * version
    assert sparse.wire_bytes_per_round < 0.05 * version


def with_tokens(config: Config, tokens: int) -> Config:
    return config.with_settings(
        vocab__sha256="5" * 64, vocab__size=tokens, vocab__bos=0, vocab__bytes_per_token=4.0
    )


def test_a_vocabulary_costs_an_embedding_a_head_and_their_products(config: Config):
    plain = config.with_settings(objective__kind="end_to_end")
    few, many = (estimate(with_tokens(plain, tokens)) for tokens in (2048, 50_304))
    width, more = plain.model.width, 50_304 - 2048
    assert many.vocabulary_parameters == 2 * 50_304 * width
    assert many.parameters - few.parameters == 2 * more * width
    positions = plain.train.batch * plain.model.window
    assert many.flops_per_step - few.flops_per_step == 6 * positions * more * width
    assert many.total_flops == many.flops_per_step * many.steps
    assert many.tokens_per_block == many.steps * positions
    assert many.bytes_per_block == 4 * many.tokens_per_block


def test_logits_of_many_tokens_take_a_chunk_of_memory_at_most(config: Config):
    plain = config.with_settings(objective__kind="end_to_end", train__batch=256)
    positions = plain.train.batch * plain.model.window
    assert estimate(with_tokens(plain, 1024)).logits_bytes == positions * 1024 * 16
    many = with_tokens(plain, 250_000)
    gpu, cpu = (
        estimate(many.with_settings(train__device=device)).logits_bytes
        for device in ("cuda", "cpu")
    )
    assert cpu < gpu / 4
    assert gpu < positions * 250_000 * 2  # one number of bf16 for each logit
