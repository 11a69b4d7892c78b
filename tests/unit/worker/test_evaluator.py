"""A model is scored while the run goes on, and what it is made of is replaced meanwhile."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.fault_server import Fault, FaultServer
from tests.support.turned_clock import TurnedClock
from tests.support.worker_side import described_run, joined
from tests.unit.worker.test_fetch_model import GONE, Blocks

from blocktrain.config import Config
from blocktrain.data.corpus import Corpus
from blocktrain.errors import RefusedError, RunError
from blocktrain.model.stack import initial_block
from blocktrain.protocol.status_messages import Score
from blocktrain.storage import tensor_file
from blocktrain.worker.agent import Evaluator, WorkerSettings
from blocktrain.worker.client import DEFAULT_SECONDS, Client
from blocktrain.worker.machine import WorkerEvent


class Judge:
    """An evaluator, what it told and what it reported."""

    def __init__(
        self, server: FaultServer, client: Client, config: Config, corpus: Corpus, folder: Path
    ) -> None:
        self.events: list[WorkerEvent] = []
        self.scores: list[Score] = []
        self.client, self.settings = client, WorkerSettings(folder / "judge", "cpu")
        self.evaluator = self.make()
        elsewhere = config.with_settings(data__source="text:/nowhere")
        description = described_run(server, elsewhere, corpus)
        server.on("POST /v1/join", lambda body: joined(role="evaluate", description=description))
        server.on("POST /v1/scores", self._take)

    def make(self, **settings: Any) -> Evaluator:
        changed = replace(self.settings, **settings)
        return Evaluator(self.client, changed, self.events.append)

    def has_scored(self) -> bool:
        return bool(self.scores) and self.scores[-1].block is None

    def _take(self, body: bytes) -> None:
        self.scores.append(Score.model_validate_json(body))


@pytest.fixture
def blocks(server: FaultServer, config: Config, corpus: Corpus) -> Blocks:
    return Blocks(server, config, corpus)


@pytest.fixture
def judge(
    server: FaultServer,
    client: Client,
    config: Config,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Judge:
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("blocktrain.worker.model_scores.FEWEST_WINDOWS", 2)
    monkeypatch.setattr("blocktrain.worker.model_scores.MOST_WINDOWS", 2)
    return Judge(server, client, config, corpus, tmp_path)


def test_if_a_version_was_deleted_meanwhile_a_newer_one_is_scored(blocks: Blocks, judge: Judge):
    blocks.told[1][:0] = [(4, GONE)]
    assert not judge.evaluator.run(judge.has_scored)
    assert [event.kind for event in judge.events].count("scoring") == 2
    assert {score.versions for score in judge.scores} == {(5,), (5, 5)}
    assert all(0.0 < score.ce < 10.0 for score in judge.scores)


def test_a_version_that_stays_missing_is_an_error(blocks: Blocks, judge: Judge):
    blocks.told[1] = [(5, GONE)]
    with pytest.raises(RefusedError, match="no chunk"):
        judge.evaluator.run(lambda: bool(judge.scores))


def test_an_owners_copy_of_another_text_is_reported(blocks: Blocks, judge: Judge, tmp_path: Path):
    (tmp_path / "own.txt").write_bytes(b"not what the run is about. " * 1000)
    assert not judge.make(data=f"text:{tmp_path}/own.txt").run(judge.has_scored)
    assert "other_text" in [event.kind for event in judge.events]
    assert judge.scores


def test_a_diverged_block_is_reported_and_newer_versions_are_scored(
    server: FaultServer, blocks: Blocks, judge: Judge, config: Config
):
    good = blocks.told[1][0][1]
    shapes = {name: p.shape for name, p in initial_block(config, 1).named_parameters()}
    weights = {name: np.full(shape, np.nan, np.float32) for name, shape in shapes.items()}
    bad = server.hold(b"".join(tensor_file.encode(weights)))
    blocks.told[1] = [(5, bad), (6, good)]
    assert not judge.evaluator.run(judge.has_scored)
    diverged = [event.text for event in judge.events if event.kind == "diverged"]
    assert [text.split(":")[0] for text in diverged] == ["block 1, version 5", "versions 5, 5"]
    assert all("CE is nan" in text for text in diverged)
    assert [(score.block, score.versions) for score in judge.scores] == [
        (0, (5,)), (0, (5,)), (1, (6,)), (None, (5, 6)),
    ]  # fmt: skip


def test_a_coordinator_that_is_away_for_long_gets_its_scores(
    server: FaultServer, new_client: Callable[..., Client], blocks: Blocks, judge: Judge
):
    """For longer than a command waits before which somebody sits."""
    away = {"Retry-After": str(round(2 * DEFAULT_SECONDS))}
    server.faults = [Fault("POST /v1/scores", status=503, headers=away)]
    judge.client = new_client(clock=TurnedClock().clock)
    assert not judge.make().run(judge.has_scored)


def test_it_works_alone_in_its_folder(blocks: Blocks, judge: Judge):
    half = judge.settings.folder / "chunks" / "partial" / "half"
    half.write_bytes(b"left by a worker that was killed")
    refused: list[RunError] = []

    def try_another() -> bool:
        if not refused:
            with pytest.raises(RunError, match="another worker uses") as caught:
                judge.make().run()
            refused.append(caught.value)
        return judge.has_scored()

    assert not judge.evaluator.run(try_another)
    assert refused
    assert not half.exists()
