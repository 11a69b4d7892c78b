"""Blocks that are trained in turns inside the complete model."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.support.published import Shelf
from tests.support.training import CPU, assert_equal, quiet, weights_of
from torch import nn

from blocktrain.config import Config
from blocktrain.data.corpus import Corpus, evaluation_windows
from blocktrain.errors import ConfigError
from blocktrain.model.stack import assemble, initial_block
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.estimation import estimate
from blocktrain.training.evaluate import evaluate, solo_ce
from blocktrain.training.frozen import Suffix
from blocktrain.training.run_session import LocalRun
from blocktrain.training.stored_models import first_weights, load_stack
from blocktrain.training.trainer import BlockTrainer


@pytest.fixture
def turns(config: Config) -> Config:
    """Three blocks of one layer each, in turns of five steps: 5, 5 and 2."""
    return config.with_settings(
        objective__kind="turns", objective__turn_steps=5, model__layers=3, model__blocks=3,
        train__save_every=3, train__optimizer="adamw", train__lr=3e-3,
    )  # fmt: skip


def shelf_of_others(config: Config, corpus: Corpus) -> Shelf:
    """Blocks with some training behind them, so that gradients through them are not zero."""
    whole = BlockTrainer(config.with_settings(objective__kind="end_to_end"), 0, corpus, CPU, None)
    whole.run(0, 8)
    weights, shelf = whole.weights(), Shelf()
    for block in range(3):
        module = initial_block(config, block)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                source = name.replace("layers.0.", f"layers.{block}.")
                # As the frozen copies hold them, so that both models are the same numbers.
                parameter.copy_(torch.from_numpy(weights[source]).bfloat16().float())
        shelf.put(block, 1, module)
    return shelf


def sticky_stop(steps: int) -> Callable[[], bool]:
    """Asks to stop from this many steps on."""
    made = itertools.count(1)
    return lambda: next(made) >= steps


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_blocks_gradient_is_its_part_of_the_whole_models_gradient(
    turns: Config, corpus: Corpus, block: int, recompute: bool
):
    config = turns.with_settings(train__checkpoint_layers=recompute)
    shelf = shelf_of_others(config, corpus)
    trainer = BlockTrainer(config, block, corpus, CPU, None, shelf)
    whole = config.with_settings(objective__kind="end_to_end")
    reference = BlockTrainer(whole, 0, corpus, CPU, None)
    with torch.no_grad():
        for index in range(3):
            for name, weight in shelf.weights(index).items():
                target = name.replace("layers.0.", f"layers.{index}.")
                reference.module.get_parameter(target).copy_(torch.as_tensor(weight))
                if index == block:
                    trainer.module.get_parameter(name).copy_(torch.as_tensor(weight))
    batch = trainer.objective.prepare(trainer.windows[0], 0)
    reference.objective.loss(reference.forward, batch).value.backward()
    if trainer.predecessors:
        batch = batch._replace(inputs=trainer.predecessors.features(0, batch.inputs))
    trainer.objective.loss(trainer.forward, batch).value.backward()
    for name, parameter in trainer.module.named_parameters():
        expected = reference.module.get_parameter(name.replace("layers.0.", f"layers.{block}."))
        assert parameter.grad is not None and float(parameter.grad.abs().max()) > 0, name
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-3, atol=1e-6)


def test_eight_bits_pass_gradients_on(turns: Config, corpus: Corpus):
    shelf = shelf_of_others(turns, corpus)
    x = torch.randn(2, 8, turns.model.width)
    slopes = []
    for kind in ("bf16", "int8"):
        suffix = Suffix(turns.with_settings(objective__frozen=kind), 0, CPU)
        suffix.refresh(shelf)
        inputs = x.clone().requires_grad_()
        suffix(inputs, torch.zeros(2, 8, dtype=torch.long)).sum().backward()
        assert inputs.grad is not None
        slopes.append(inputs.grad.flatten())
    assert float(nn.functional.cosine_similarity(*slopes, dim=0)) > 0.99


def test_turns_resume_bit_for_bit_and_lower_the_loss(turns: Config, corpus: Corpus, tmp_path: Path):
    def session(name: str) -> LocalRun:
        return LocalRun(RunDir.create(tmp_path / name, turns), corpus, CPU)

    order: list[tuple[int, int]] = []
    whole = session("whole")
    assert whole.train_in_turn([0, 1, 2], lambda p: order.append((p.block, p.step)), lambda: False)
    ends = [(block, step) for block, step in order if step in (5, 10, 12)]
    assert list(dict.fromkeys(ends)) == [(b, s) for s in (5, 10, 12) for b in range(3)]
    for steps in (4, 7, 9):  # within a turn, after some, at the end of one
        session("parts").train_in_turn([0, 1, 2], quiet, sticky_stop(steps))
    assert session("parts").train_in_turn([0, 1, 2], quiet, lambda: False)
    for block in range(3):
        both = [session(name).run.block(block).load_weights() for name in ("whole", "parts")]
        assert_equal(*both)
    windows = evaluation_windows(corpus.split("valid"), turns.model.window, 8)
    trained = evaluate(load_stack(whole.run, CPU), windows).default
    untrained = assemble(turns, [initial_block(turns, block) for block in range(3)])
    assert trained.readout == "final"
    assert trained.ce < evaluate(untrained, windows).default.ce - 0.5


def test_a_block_is_scored_as_the_complete_model(turns: Config, corpus: Corpus):
    shelf = shelf_of_others(turns, corpus)
    windows = evaluation_windows(corpus.split("valid"), turns.model.window, 4)
    trainer = BlockTrainer(turns, 1, corpus, CPU, None, shelf)
    trainer.run(0, 3)
    assert trainer.predecessors and trainer.suffix
    found = solo_ce(
        turns, 1, trainer.module, windows, trainer.predecessors.prefix(), trainer.suffix
    )
    blocks: list[nn.Module] = [initial_block(turns, block) for block in range(3)]
    with torch.no_grad():
        for index, block in enumerate(blocks):
            source = weights_of(trainer) if index == 1 else shelf.weights(index)
            for name, parameter in block.named_parameters():
                parameter.copy_(torch.as_tensor(source[name]))
    assert found == pytest.approx(evaluate(assemble(turns, blocks), windows).default.ce, abs=1e-5)


@pytest.mark.parametrize("kind", ["cascade", "end_to_end"])
def test_a_finished_model_of_another_kind_is_trained_on_in_turns(
    turns: Config, corpus: Corpus, tmp_path: Path, kind: str
):
    """The layers go to the blocks that hold them now; tails and the heads of earlier blocks are
    left out. So both models predict the same before the first step."""
    origin = turns.with_settings(
        objective__kind=kind, objective__tail=1, objective__order="relay", model__blocks=2,
        train__steps=6,
    )  # fmt: skip
    first = LocalRun(RunDir.create(tmp_path / "first", origin), corpus, CPU)
    assert first.train_in_turn(range(origin.block_count), quiet, lambda: False)
    polish = turns.with_settings(train__warm_start=str(tmp_path / "first"))
    blocks = [initial_block(polish, block) for block in range(3)]
    with torch.no_grad():
        for index, block in enumerate(blocks):
            for name, array in first_weights(polish, index).items():
                block.get_parameter(name).copy_(torch.from_numpy(array))
    windows = evaluation_windows(corpus.split("valid"), turns.model.window, 4)
    scores = evaluate(load_stack(first.run, CPU), windows).scores
    final = next(score.ce for score in scores if score.readout == "final")
    assert evaluate(assemble(polish, blocks), windows).default.ce == pytest.approx(final, abs=1e-5)
    session = LocalRun(RunDir.create(tmp_path / "polished", polish), corpus, CPU)
    assert session.train_in_turn(range(3), quiet, lambda: False)


def test_memory_is_one_blocks_optimizer_state_and_the_others_frozen(turns: Config):
    deep = turns.with_settings(model__layers=12)
    needs = estimate(deep)
    whole = estimate(deep.with_settings(objective__kind="end_to_end"))
    parameters = needs.parameters
    assert needs.fixed_bytes_per_worker < 0.55 * whole.fixed_bytes_per_worker
    largest = needs.parameters_per_block
    assert needs.fixed_bytes_per_worker == 16 * largest + 2 * (parameters - largest)
    eight = estimate(deep.with_settings(objective__frozen="int8"))
    assert eight.fixed_bytes_per_worker == 16 * largest + (parameters - largest)
    disk = estimate(deep.with_settings(train__frozen_in="disk"))  # one of them at a time
    counts = [sum(p.numel() for p in initial_block(deep, block).parameters()) for block in range(3)]
    assert disk.fixed_bytes_per_worker == 16 * largest + 2 * sorted(counts)[-2]
    assert disk.frozen_bytes == needs.frozen_bytes > 0
    assert disk.activation_bytes_per_worker < needs.activation_bytes_per_worker


def test_what_does_not_work_in_turns_is_said(turns: Config, corpus: Corpus, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"turns needs train\.keep = last"):
        turns.with_settings(train__keep="best", train__eval_every=5)
    session = LocalRun(RunDir.create(tmp_path, turns), corpus, CPU)
    with pytest.raises(ConfigError, match="leave out --parallel"):
        session.train_side_by_side([0, 1, 2], 2, quiet, lambda: False, ["blocktrain"])
