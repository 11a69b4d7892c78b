"""How blocks are read from disk: in the type they are stored in, and hashed once."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.checkpoints import random_model, saved

from blocktrain.interop.checkpoint import open_checkpoint
from blocktrain.interop.importing import Import
from blocktrain.serve.ring import compute as ring_compute
from blocktrain.serve.ring.compute import BlockSource, weights_fingerprint
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.device import resolve
from blocktrain.training.stored_models import load_stack

CPU = {precision: resolve("cpu", precision) for precision in ("fp32", "bf16")}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Stored in bf16, as models of the hub are."""
    folder = tmp_path_factory.mktemp("bf16")
    checkpoint = saved(random_model("qwen3").to(torch.bfloat16), folder / "checkpoint")
    return Import(open_checkpoint(str(checkpoint)), blocks=2).write(folder / "run")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / ring_compute.FINGERPRINTS


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_stored_bf16_is_loaded_as_it_is(run: RunDir, precision: str) -> None:
    loaded = BlockSource(run).load(1, CPU[precision])
    stored = dict(run.read_block(1))
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == CPU[precision].dtype
        assert np.array_equal(parameter.float().numpy(), stored[name])


def test_8_bits_are_rounded_from_fp32_whatever_is_stored(run: RunDir) -> None:
    """A scale that was computed in bf16 would be rounded twice."""
    block = BlockSource(run, "int8").load(0, CPU["fp32"])
    stored = dict(run.read_block(0))["layers.0.mlp.up.weight"]
    scale = block.get_buffer("layers.0.mlp.up.scale").numpy()
    assert np.array_equal(scale[:, 0], np.abs(stored).max(axis=1) / np.float32(127))


def test_a_frozen_model_has_its_weights_in_the_type_of_computing(run: RunDir) -> None:
    types = {p.dtype for block in load_stack(run, CPU["bf16"]).blocks for p in block.parameters()}
    assert types == {torch.float32}
    frozen = load_stack(run, CPU["bf16"], frozen=True)
    assert {p.dtype for block in frozen.blocks for p in block.parameters()} == {torch.bfloat16}


def test_a_fingerprint_is_computed_once_per_file(
    run: RunDir, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = BlockSource(run)
    expected = [weights_fingerprint(run.read_block(block)) for block in (0, 1)]
    assert [source.fingerprint(block) for block in (0, 1)] == expected
    assert len(list(cache.iterdir())) == 2
    monkeypatch.setattr(ring_compute, "weights_fingerprint", None)
    assert [source.fingerprint(block) for block in (0, 1)] == expected


def test_a_torn_or_unwritable_cache_costs_only_time(run: RunDir, cache: Path) -> None:
    source, expected = BlockSource(run), weights_fingerprint(run.read_block(0))
    cache.parent.mkdir()
    cache.write_bytes(b"a file where the folder should be")
    assert source.fingerprint(0) == expected
    cache.unlink()
    assert source.fingerprint(0) == expected
    (torn,) = cache.iterdir()
    torn.write_text("abc")
    assert source.fingerprint(0) == expected
    assert torn.read_text() == expected


def test_loading_says_how_much_was_read(
    run: RunDir, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_compute, "PROGRESS_SECONDS", 0.0)
    with caplog.at_level(logging.INFO, "blocktrain"):
        BlockSource(run).load(1, CPU["fp32"])
    assert any("block 1: 0.00 GB read" in each.message for each in caplog.records)
    assert "block 1: 0.00 GB loaded in" in caplog.records[-1].message
