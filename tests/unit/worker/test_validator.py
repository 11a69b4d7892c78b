"""A validator scores updates as merges would add them, and goes on whatever it is given."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.support.fault_server import Fault, FaultServer
from tests.support.turned_clock import TurnedClock
from tests.support.worker_side import RUN, described_run, joined

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
from blocktrain.protocol.status_messages import (
    BlockStatus,
    Checking,
    Moved,
    Score,
    Status,
    WorkerStatus,
)
from blocktrain.storage import tensor_file
from blocktrain.storage.tensor_file import Tensors
from blocktrain.training.device import resolve
from blocktrain.training.scoring import BlockScorer, hidden_windows, leased_windows
from blocktrain.worker.agent import WorkerSettings
from blocktrain.worker.client import Client
from blocktrain.worker.machine import Bandwidth, EventReporter, StopCondition, WorkerEvent
from blocktrain.worker.model_scores import OccasionalScores
from blocktrain.worker.transfer import BlobCache, Transfer
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
        self.versions: list[tuple[int, ...]] = [(0, 0)]  # of one status after another
        self.status: dict[str, object] = {}  # its other fields
        self.scores: list[Score] = []
        server.on("GET /v1/status", lambda body: self._status())
        server.on("POST /v1/scores", self._take_score)

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

    def scored(self) -> list[tuple[int, ...]]:
        """The versions of the models that were scored."""
        return [score.versions for score in self.scores if score.block is None]

    def _status(self) -> Status:
        versions = self.versions.pop(0) if len(self.versions) > 1 else self.versions[0]
        fields = {"state": "running", "workers": (), "checking": None, **self.status}
        blocks = []
        for index, version in enumerate(versions):
            module = initial_block(self.config, index)
            weights = {name: p.detach().numpy() for name, p in module.named_parameters()}
            blocks.append(
                BlockStatus(
                    index=index, version=version, weights=self.held(weights), ce=None,
                    bytes_trained=1, progress=0.5, replicas=0, participation=None,
                    pending_updates=0, moved=Moved(),
                )
            )  # fmt: skip
        return Status(run=RUN, ce=None, codec="none", seconds=1.0, blocks=tuple(blocks), **fields)

    def _take_score(self, body: bytes) -> None:
        self.scores.append(Score.model_validate_json(body))

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
    monkeypatch.setattr("blocktrain.worker.model_scores.FEWEST_WINDOWS", 2)
    monkeypatch.setattr("blocktrain.worker.model_scores.MOST_WINDOWS", 2)
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


# Scores of the model

NOTHING_TO_CHECK = Wait(seconds=0.0, reason="no update waits for a check")


def test_the_model_is_scored_early_and_at_the_end_and_not_all_the_time(scene: Scene):
    scene.versions = [(1, 0), (4, 4)]
    scene.run(*[NOTHING_TO_CHECK] * 5)
    assert [(score.block, score.versions) for score in scene.scores] == [
        (0, (1,)), (1, (0,)), (None, (1, 0)), (0, (4,)), (1, (4,)), (None, (4, 4)),
    ]  # fmt: skip
    assert all(0.0 < score.ce < 10.0 for score in scene.scores)
    assert scene.events[-1].kind == "finished"


def test_versions_that_were_scored_are_not_scored_again(scene: Scene):
    scene.versions = [(4, 4)]
    scene.run(NOTHING_TO_CHECK)
    assert scene.scored() == [(4, 4)]
    told = Checking(share=None, validators=2, waiting=0, scored=(5, 5))
    scene.versions, scene.status = [(5, 5)], {"checking": told}  # by another validator
    scene.run(NOTHING_TO_CHECK)
    assert scene.scored() == [(4, 4)]


def test_a_worker_with_an_evaluation_invite_scores_instead(scene: Scene):
    """Only the final versions are scored, in case that worker leaves before the end."""
    evaluator = WorkerStatus(
        worker="judge001", name="judge", role="evaluate", device="cpu", block=None,
        state="waiting", bytes_trained=0, updates=0, seconds_since_seen=1.0, moved=Moved(),
    )  # fmt: skip
    scene.versions, scene.status = [(2, 2), (3, 3)], {"workers": (evaluator,)}
    scene.run(NOTHING_TO_CHECK)
    assert scene.scored() == [(3, 3)]


def test_a_model_that_does_not_fit_is_reported_and_updates_are_checked(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("blocktrain.worker.validator.serving_problem", lambda *_: "too large")
    scene.versions = [(1, 1)]
    assert len(scene.run(NOTHING_TO_CHECK, scene.check(changed(scene.weights, 0.1)))) == 1
    assert not scene.scores
    unable = [event.text for event in scene.events if event.kind == "unable"]
    assert unable[0] == "cannot score the model: too large"


def test_an_older_coordinator_that_takes_no_scores_is_no_reason_to_end(scene: Scene):
    scene.server.faults = [Fault("POST /v1/scores", status=403, times=9)]
    scene.versions = [(1, 1)]
    assert len(scene.run(NOTHING_TO_CHECK, scene.check(changed(scene.weights, 0.1)))) == 1


class SlowScorer:
    """Takes a minute for every score."""

    def __init__(self, time: TurnedClock) -> None:
        self._time, self.scores = time, 0

    def score(self, status: Status) -> bool:
        self._time.sleep(60.0)
        self.scores += 1
        return True


def test_scores_take_a_small_share_of_a_validators_time(
    server: FaultServer, new_client: Callable[..., Client], scene: Scene, tmp_path: Path
):
    time = TurnedClock()
    client = new_client(clock=time.clock)
    transfer = Transfer(client, BlobCache(tmp_path / "own"), Bandwidth(None, time.clock))
    events = EventReporter(scene.events.append, transfer.bandwidth, time.clock)
    slow, stop = SlowScorer(time), StopCondition(time.clock, None)
    scores = OccasionalScores(slow, transfer, events, stop, str, lambda: None)
    scene.versions = [(number, number) for number in range(1, 500)]  # a new one at every look
    began = time.now
    while time.now < began + 6 * 3600:
        scores.score_if_due()
        time.sleep(60.0)
    assert 0.04 < 60.0 * slow.scores / (time.now - began) <= 0.055
    scores.score_last()
    assert scene.scored() == [] and slow.scores > 15
