"""A validator scores updates as merges would add them, and goes on whatever it is given."""

from pathlib import Path

import numpy as np
import pytest
from tests.support.fault_server import Fault, FaultServer
from tests.support.worker_side import described_run, joined

from blocktrain.config import Config
from blocktrain.data.corpus import Corpus
from blocktrain.model.stack import initial_block
from blocktrain.protocol.check_messages import (
    Check,
    CheckAnswer,
    CheckResult,
    LeasedText,
    ScoreCheck,
    ScoreResult,
    Unable,
)
from blocktrain.protocol.messages import Finished, Wait
from blocktrain.storage import tensor_file
from blocktrain.storage.tensor_file import Tensors
from blocktrain.training.device import resolve
from blocktrain.training.scoring import BlockScorer, hidden_windows, leased_windows
from blocktrain.worker.agent import WorkerSettings
from blocktrain.worker.client import Client
from blocktrain.worker.machine import WorkerEvent
from blocktrain.worker.validator import Validator

SEED, WINDOWS = 5, 6


class Scene:
    """A validator, a coordinator that hands out these checks, and what is reported."""

    def __init__(
        self, server: FaultServer, client: Client, config: Config, corpus: Corpus, folder: Path
    ) -> None:
        self.server, self.config, self.corpus = server, config, corpus
        self.answers: list[Check | Wait | Finished] = []
        self.results: list[CheckResult] = []
        self.events: list[WorkerEvent] = []
        settings = WorkerSettings(folder / "validator", "cpu")
        self.validator = Validator(client, settings, self.events.append)
        elsewhere = config.with_settings(data__source="text:/nowhere")
        description = described_run(server, elsewhere, corpus)
        server.on("POST /v1/join", lambda body: joined(role="validate", description=description))
        server.on("POST /v1/checks", lambda body: CheckAnswer(answer=self._next()))
        server.on("POST /v1/checks/.*", self._take)
        self.weights = self._weights()

    def check(self, update: Tensors, name: str = "check001", **task: object) -> Check:
        fields = {"seed": SEED, "windows": WINDOWS, **task}
        return Check(
            check=name, block=1, version=3, seconds_left=60.0,
            text=LeasedText(first_batch=0, steps=4, schedule_start=0, schedule_stride=1),
            task=ScoreCheck(
                current=self.held(self.weights), update=self.held(update), **fields,
            ),
        )  # fmt: skip

    def held(self, tensors: Tensors) -> object:
        return self.server.hold(b"".join(tensor_file.encode(tensors)))

    def run(self, *answers: Check | Wait) -> list[CheckResult]:
        self.answers = [*answers]
        assert self.validator.run(lambda: False)
        return self.results

    def losses(self, weights: Tensors) -> tuple[float, float]:
        """Of hidden text, and of the lease's."""
        scorer = BlockScorer(self.config, 1, self.corpus, resolve("cpu", "fp32"))
        hidden = hidden_windows(self.corpus, self.config.model.window, WINDOWS, SEED)
        own = leased_windows(self.config, 1, self.corpus, range(4), WINDOWS, SEED)
        return tuple(float(scorer.losses(weights, each, SEED).mean()) for each in (hidden, own))

    def _next(self) -> Check | Wait | Finished:
        return self.answers.pop(0) if self.answers else Finished()

    def _take(self, body: bytes) -> None:
        self.results.append(CheckResult.model_validate_json(body))

    def _weights(self) -> Tensors:
        module = initial_block(self.config, 1)
        return {name: p.detach().numpy().copy() for name, p in module.named_parameters()}


@pytest.fixture
def scene(
    server: FaultServer,
    client: Client,
    config: Config,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Scene:
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(tmp_path / "cache"))
    return Scene(server, client, config, corpus, tmp_path)


def changed(weights: Tensors, by: float) -> Tensors:
    draws = np.random.default_rng(1)
    return {
        name: (array + by * draws.normal(size=array.shape)).astype(np.float32)
        for name, array in sorted(weights.items())
    }


def test_an_update_is_scored_as_a_merge_would_add_it(scene: Scene):
    """A late one: half of its change since its base, on top of the newest version."""
    base, update = changed(scene.weights, 0.1), changed(scene.weights, 0.3)
    expected = {n: w + 0.5 * (update[n] - base[n]) for n, w in scene.weights.items()}
    (result,) = scene.run(scene.check(update, base=scene.held(base), share=0.5))
    assert isinstance(score := result.result, ScoreResult)
    before, after = scene.losses(scene.weights), scene.losses(expected)
    assert (score.hidden.before, score.own.before) == pytest.approx(before)
    assert (score.hidden.after, score.own.after) == pytest.approx(after, rel=1e-5)
    assert after != pytest.approx(before, rel=1e-3)
    assert score.hidden.error is not None and score.hidden.error > 0


def test_updates_of_one_version_are_compared_with_the_same_loss(scene: Scene):
    one, other = (scene.check(changed(scene.weights, by), f"check00{by}") for by in (1, 2))
    first, second = scene.run(one, Wait(seconds=0.0, reason="none"), other)
    assert isinstance(first.result, ScoreResult) and isinstance(second.result, ScoreResult)
    assert first.result.hidden.before == second.result.hidden.before
    assert first.result.hidden.after != second.result.hidden.after


def test_what_makes_weights_infinite_is_reported_as_such(scene: Scene):
    update = {name: np.full_like(array, 3e38) for name, array in scene.weights.items()}
    base = {name: -array for name, array in update.items()}
    (result,) = scene.run(scene.check(update, base=scene.held(base)))
    assert isinstance(score := result.result, ScoreResult)
    assert score.hidden.before is not None and score.hidden.after is None


def test_what_cannot_be_checked_is_reported_and_the_next_one_is_checked(scene: Scene):
    other = dict(list(scene.weights.items())[1:])
    bad, good = scene.check(other), scene.check(changed(scene.weights, 0.1), "check002")
    first, second = scene.run(bad, good)
    assert isinstance(first.result, Unable)
    assert isinstance(second.result, ScoreResult)


def test_a_result_that_comes_too_late_is_forgotten(scene: Scene):
    scene.server.faults = [Fault("POST /v1/checks/", status=410)]
    update = changed(scene.weights, 0.1)
    assert len(scene.run(scene.check(update), scene.check(update, "check002"))) == 1
