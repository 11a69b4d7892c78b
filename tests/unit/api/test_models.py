"""Models from Python: every kind of run, scores, text, and what torch expects of a module."""

import doctest
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.support.commands import run_here
from tests.support.training import CPU

import blocktrain as bt
from blocktrain.api import models
from blocktrain.config import Config
from blocktrain.errors import ConfigError, RequestError
from blocktrain.model.stack import read_out
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.stored_models import load_stack

from ..interop.conftest import token_config, trained_run


@pytest.fixture
def text(tmp_path: Path) -> str:
    """A text as data.source."""
    path = tmp_path / "text.txt"
    path.write_text("It was the best of times, it was the worst of times. " * 200)
    return f"text:{path}"


def test_importing_loads_nothing_that_is_heavy():
    code = "import blocktrain, sys; print(sorted({'torch', 'numpy', 'rich'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"
    assert set(bt.__all__) <= set(dir(bt))
    with pytest.raises(AttributeError, match="nothing"):
        _ = bt.nothing  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["denoise", "cascade", "end_to_end"])
def test_a_trained_run_loads_as_a_module(tmp_path: Path, config: Config, text: str, kind: str):
    settings = {"objective.kind": kind, "data.source": text, "objective.tail": 1}
    out = tmp_path / "run"
    assert bt.train(config, out, settings, progress=False) == out
    model = bt.load(out, device="cpu")
    ids = model.encode("It was the")
    readout = model.config.default_readout
    expected = read_out(readout, load_stack(RunDir.open(out), CPU).log_probs(ids))[0]
    assert torch.equal(model.logits("It was the"), expected)
    assert torch.equal(model.logits(ids[0].tolist()), expected)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    count = sum(parameter.numel() for parameter in model.parameters())
    evaluation = model.evaluate(windows=8)
    assert count == evaluation.parameters
    assert evaluation.ce == pytest.approx(min(row["ce"] for row in evaluation.rows()), abs=0.2)
    greedy = model.generate("It was", 5, temperature=0)
    assert greedy == "".join(model.stream("It was", 5, temperature=0))
    assert model.logits("It was")[-1].argmax() == ord(greedy[0])
    with pytest.raises(RequestError, match="33 tokens, but this model reads 1 to 32"):
        model.logits("x" * 32)


def test_a_step_along_the_gradient_lowers_the_loss(tmp_path: Path, config: Config, text: str):
    run = bt.train(config, tmp_path / "run", {"data.source": text}, progress=False)
    model = bt.load(run, device="cpu").requires_grad_()
    ids = model.encode("It was the best")

    def loss() -> torch.Tensor:
        return torch.nn.functional.nll_loss(model(ids)[0, :-1], ids[0, 1:])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = loss()
    before.backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad for p in model.blocks[1].parameters()]
    assert gradients
    assert all(g is not None and g.any() for g in gradients)
    optimizer.step()
    assert loss() < before
    copy = bt.load(run, device="cpu")
    copy.load_state_dict(model.state_dict())
    assert torch.equal(copy.logits("It"), model.logits("It"))


def test_a_model_of_another_program_goes_there_and_back(tmp_path: Path, config: Config):
    run = trained_run(tmp_path / "run", token_config(config))
    folder = bt.export_hf(run.path, tmp_path / "hugging-face")
    expected = bt.load(run.path, device="cpu").logits([1, 2, 3], readout="final")
    loaded = bt.load(folder, device="cpu")
    torch.testing.assert_close(loaded.logits([1, 2, 3]), expected, atol=1e-5, rtol=1e-5)
    assert loaded.generate("and", 3)
    shown = run_here(["info", str(folder)], tmp_path, os.environ).stdout
    assert "a Hugging Face folder; turns, 2 layers" in shown
    imported = bt.import_hf(folder, tmp_path / "imported", blocks=2)
    torch.testing.assert_close(
        bt.load(imported, device="cpu").logits([1, 2, 3]), expected, atol=1e-5, rtol=1e-5
    )
    with pytest.raises(ConfigError, match="imported model, without a text"):
        bt.load(imported, device="cpu").evaluate()


def test_the_examples_work(tmp_path: Path, config: Config, text: str):
    run = bt.train(config, tmp_path / "run", {"data.source": text}, progress=False)
    names = {"bt": bt, "folder": tmp_path, "model": bt.load(run, device="cpu")}
    parser, runner = doctest.DocTestFinder(recurse=True), doctest.DocTestRunner()
    examples = [each for each in parser.find(models, globs=names) if each.examples]
    assert len(examples) >= 5
    for example in examples:
        runner.run(example)
    assert not runner.failures
