"""Ragged batches in the cache's slots, against each text in one pass without a cache."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.models import awake_block
from torch import Tensor

from blocktrain.config import Config, load_config
from blocktrain.config.settings import LAYERS as LAYER_NAMES
from blocktrain.model.block import CausalBlock, target_table
from blocktrain.model.cache import BlockCache, CacheShape, SlotCache
from blocktrain.model.denoising import DenoisingBlock, NoiseLevel
from blocktrain.model.layer import LAYERS, layer_class
from blocktrain.numerics.noise import precondition

ROOT = Path(__file__).resolve().parents[3]
WINDOW = 100
TINY = ["model.layers=2", "model.blocks=1", "model.width=16", "model.heads=2"]
CPU = torch.device("cpu")
LEVEL = NoiseLevel.constant(precondition(2.0, 0.5), 1, CPU)


def tiny(kind: str, taps: int = 3) -> Config:
    settings = [f"model.window={WINDOW}", f"model.taps={taps}", f"objective.kind={kind}"]
    return load_config(ROOT / "configs" / "tiny.toml", TINY + settings)


BLOCKS = {kind: awake_block(tiny(kind)).eval() for kind in ("end_to_end", "denoise")}


def slots_of(config: Config) -> SlotCache:
    layer = layer_class(config.model).cache_shape(config.model)
    return SlotCache(config.model.window, layer, [(config.model.layers, 0)], CPU, torch.float32)


def read(block: torch.nn.Module, ids_BT: Tensor, memory: BlockCache | None) -> Tensor:
    """What a block makes of its context."""
    with torch.no_grad():
        if isinstance(block, CausalBlock):
            return block.features(ids_BT, memory)
        assert isinstance(block, DenoisingBlock)
        z = torch.zeros(*ids_BT.shape, 256)
        context = block.read_context(ids_BT, memory)
        return block.denoise(context, z, LEVEL, target_table(0, 256), block.modulations(LEVEL))


def alone(block: torch.nn.Module, text: list[int]) -> Tensor:
    return read(block, torch.tensor([text]), None)[0]


STEPS = st.lists(
    st.dictionaries(
        st.integers(0, 5),  # the slot
        st.tuples(st.floats(0.0, 1.0), st.lists(st.integers(0, 257), min_size=1, max_size=20)),
        min_size=1,
        max_size=4,
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("kind", BLOCKS)
@settings(max_examples=25, deadline=None)
@given(steps=STEPS)
def test_ragged_rows_with_roll_back_give_each_its_own_result(
    kind: str, steps: list[dict[int, tuple[float, list[int]]]]
):
    """A row may start anywhere in what its slot holds: the rest is written over."""
    block, cache = BLOCKS[kind], slots_of(tiny(kind))
    texts: dict[int, list[int]] = {}
    for step in steps:
        starts = [int(share * len(texts.get(slot, []))) for slot, (share, _) in step.items()]
        rows = [ids for _, ids in step.values()]
        view = cache.view(list(step), starts, [len(ids) for ids in rows])[0]
        longest = max(map(len, rows))
        padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids in rows])
        found = read(block, padded, view)
        assert torch.isfinite(found).all()
        for row, slot, start, ids in zip(found, step, starts, rows, strict=True):
            texts[slot] = texts.get(slot, [])[:start] + ids
            expected = alone(block, texts[slot])[start:]
            assert torch.allclose(row[: len(ids)], expected, atol=1e-5)


def test_consecutive_slots_are_not_copied():
    cache = slots_of(tiny("end_to_end"))
    layer = cache.view([1, 2], [0, 0], [5, 3])[0].layers[0]
    k = torch.randn(2, 2, 5, 8)
    assert layer.append(k, k).k_BHTK.untyped_storage().data_ptr() == layer.pool.k_STD.data_ptr()
    scattered = cache.view([2, 0], [3, 0], [1, 1])[0].layers[0]
    new = torch.randn(2, 2, 1, 8)
    held = scattered.append(new, new).k_BHTK
    assert torch.equal(held[0, :, :3], k[1, :, :3])
    assert torch.equal(held[0, :, 3:4], new[0])


def test_room_grows_to_the_window_and_no_further():
    cache = slots_of(tiny("end_to_end"))
    cache.view([0], [0], [65])
    assert (cache.slots, cache.room) == (1, WINDOW)
    cache.view([4], [99], [1])
    assert (cache.slots, cache.room) == (8, WINDOW)
    with pytest.raises(ValueError, match="exceed the model's window"):
        cache.view([0], [99], [2])


def test_layers_without_a_local_filter_have_slots_too():
    config = tiny("end_to_end", taps=0)
    block = awake_block(config).eval()
    view = slots_of(config).view([0], [0], [4])[0]
    found = read(block, torch.tensor([[1, 2, 3, 4]]), view)[0]
    assert torch.allclose(found, alone(block, [1, 2, 3, 4]), atol=1e-5)


@pytest.mark.parametrize("kind", ["end_to_end", "denoise"])
def test_a_slot_that_held_nan_is_clean_for_the_next_sequence(kind: str):
    """A mask hides an old number, but not an old NaN."""
    block, cache = BLOCKS[kind], slots_of(tiny(kind))
    first, other = [*range(40)], [*range(100, 130)]
    (view,) = cache.view([0], [0], [40])
    read(block, torch.tensor([first]), view)
    for layer in view.layers:
        layer.pool.k_STD.fill_(torch.nan)
        layer.pool.v_STD.fill_(torch.nan)
    (view,) = cache.view([0, 1], [0, 0], [2, 30])
    read(block, torch.tensor([[*first[:2], *[0] * 28], other]), view)
    (view,) = cache.view([0, 1], [2, 30], [1, 1])
    found = read(block, torch.tensor([[first[2]], [5]]), view)
    torch.testing.assert_close(found[0, 0], alone(block, first[:3])[2], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found[1, 0], alone(block, [*other, 5])[30], atol=1e-5, rtol=1e-4)


def test_a_layer_caches_what_it_asks_for():
    """Fewer heads of keys and values than of queries, values and inputs of other widths."""
    layer = CacheShape(heads=1, key_width=8, value_width=4, input_width=3, inputs_before=2)
    assert SlotCache.slot_bytes(32, layer, [(1, 0)], torch.float32) == 4 * 32 * (8 + 4 + 3)
    cache = SlotCache(32, layer, [(1, 0)], CPU, torch.float32)
    k, v, inputs = torch.randn(1, 1, 5, 8), torch.randn(1, 1, 5, 4), torch.randn(1, 5, 3)
    for start, end in ((0, 3), (3, 5)):
        (block,) = cache.view([0], [start], [end - start])
        read = block.layers[0].extend_inputs(inputs[:, start:end])
        cached = block.layers[0].append(k[:, :, start:end], v[:, :, start:end])
        before = torch.cat([torch.zeros(1, 2, 3), inputs], dim=1)
        assert torch.equal(read, before[:, start : end + 2])
    assert torch.equal(cached.k_BHTK, k)
    assert torch.equal(cached.v_BHTK, v)


def test_every_choice_of_a_layer_exists():
    assert tuple(LAYERS) == LAYER_NAMES
