"""What a machine can compute with, and what is compiled for it."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from blocktrain.config import Config
from blocktrain.data.corpus import Corpus
from blocktrain.errors import DeviceError
from blocktrain.training import device
from blocktrain.training.checkpoints import Progress
from blocktrain.training.device import Compute, resolve
from blocktrain.training.trainer import BlockTrainer

LAYER = nn.Linear(2, 2)
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.fixture
def with_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if it were installed; it is looked for, and not imported."""
    (tmp_path / "triton.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    device.has_triton.cache_clear()
    yield
    device.has_triton.cache_clear()


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has MPS")
def test_mps_without_mps_is_one_sentence():
    with pytest.raises(DeviceError, match=r"^this machine has no MPS device .* use auto or cpu$"):
        resolve("mps", "auto")


def test_nothing_is_compiled_for_a_cpu():
    assert resolve("cpu", "fp32").compiled(LAYER) is LAYER


@pytest.mark.usefixtures("with_triton")
@pytest.mark.parametrize("compiler", ["gcc", None])
def test_a_gpu_s_step_is_compiled_where_there_is_a_c_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str | None
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if compiler:
        (tmp_path / compiler).touch(mode=0o755)
    if not Path(device.sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("this Python has no headers")
    gpu = Compute(torch.device("cuda"), torch.bfloat16)
    assert gpu.compiles == (compiler is not None)
    if not compiler:
        assert gpu.compiled(LAYER) is LAYER


@pytest.mark.gpu
@NEEDS_CUDA
def test_for_a_gpu_it_is_compiled():
    assert resolve("cuda", "bf16").compiled(LAYER) is not LAYER


@pytest.mark.parametrize("name", ["tpu", "cuda:99", "cpu2"])
def test_a_device_that_is_not_there_is_named(name: str):
    with pytest.raises(DeviceError, match=name):
        resolve(name, "auto")


@pytest.mark.parametrize(("has_amx", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_cpu_computes_in_bf16_if_it_has_matrix_units_for_it(
    monkeypatch: pytest.MonkeyPatch, has_amx: bool, dtype: torch.dtype
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_tile": has_amx}, raising=False)
    assert resolve("cpu", "auto").dtype == dtype


def losses(config: Config, corpus: Corpus, steps: int = 12) -> list[float]:
    trainer = BlockTrainer(config, 0, corpus, resolve("cuda", "bf16"), None)
    trainer.module.train()
    found = []
    for _ in range(steps):
        trainer.train_step()
        found.append(float(trainer.last_loss))
    return found


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize("kind", ["denoise", "end_to_end"])
def test_a_replayed_step_is_the_step(config: Config, corpus: Corpus, kind: str):
    """Same noise, same dropout, same rate at every step, replayed or not."""
    config = config.with_settings(objective__kind=kind, model__dropout=0.1)
    replayed = losses(config, corpus)
    eager = losses(config.with_settings(train__cuda_graph=False), corpus)
    assert replayed == pytest.approx(eager, rel=1e-3)


@pytest.mark.gpu
@NEEDS_CUDA
def test_many_models_are_captured_in_one_process(config: Config, corpus: Corpus):
    for seed in range(8):
        found = losses(config.with_settings(train__seed=seed), corpus, steps=6)
        assert found[-1] < found[0]


@pytest.mark.gpu
@NEEDS_CUDA
def test_recomputed_layers_train_too(config: Config, corpus: Corpus):
    config = config.with_settings(train__checkpoint_layers=True)
    assert losses(config, corpus)[-1] < losses(config, corpus)[0]


@pytest.mark.gpu
@NEEDS_CUDA
def test_the_reported_rate_counts_the_device_s_time(config: Config, corpus: Corpus):
    """Steps are queued in no time; what counts is when the device is done with them."""
    config = config.with_settings(
        model__width=512, model__heads=8, model__window=256, train__batch=64, train__steps=60
    )
    trainer = BlockTrainer(config, 0, corpus, resolve("cuda", "bf16"), None)
    reports: list[Progress] = []
    started = time.perf_counter()
    trainer.train(reports.append)
    took = time.perf_counter() - started
    reported = sum(10 * 64 * 256 / report.bytes_per_s for report in reports)
    assert reported == pytest.approx(took, rel=0.1)
