"""A run on several machines from Python: with real processes, and what is left of them."""

import doctest
from pathlib import Path

import pytest

import blocktrain as bt
from blocktrain.api import swarm as module
from blocktrain.cli.plot_command import scores_by_bytes
from blocktrain.config import Config
from blocktrain.coordinator.folder import CoordinatorFolder
from blocktrain.errors import BlocktrainError, ConfigError
from blocktrain.protocol.status_messages import Score
from blocktrain.storage.run_dir import RunDir


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, object]:
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 200)
    return {"data.source": f"text:{text}", "swarm.quorum": 1, "swarm.first_steps": 4}


def test_a_run_is_started_joined_watched_fetched_and_resumed(tmp_path: Path):
    names: dict[str, object] = {"folder": tmp_path, "bt": bt}
    found = doctest.DocTestFinder().find(module, globs=names)
    (example,) = [each for each in found if each.examples]
    runner = doctest.DocTestRunner()
    runner.run(example, clear_globs=False)
    assert not runner.failures
    assert example.globs["model"].generate("It", 3)
    with pytest.raises(BlocktrainError, match="the swarm is closed"):
        example.globs["swarm"].status()
    with bt.Swarm.start("tiny", tmp_path / "swarm", {"train.steps": 4}) as resumed:
        observer = bt.Swarm(resumed.invite)
        assert observer.finished
        rows = observer.status()
        assert [row["progress"] for row in rows] == [1.0] * 4
        workers = observer.workers()
        assert sorted(row["name"] for row in workers) == ["worker 0", "worker 1"]
        moved = sum(row["moved_up"] for row in workers)
        assert moved > 0
        add_scores(tmp_path / "swarm" / "coordinator", [row["version"] for row in resumed.status()])
        before, after = scores_by_bytes(tmp_path / "swarm" / "coordinator")
        assert before == (0.0, 5.5)
        # Less than everything that was sent: an update that came too late is in no version.
        assert 0 < after[0] <= moved / 1e6 and after[1] == 4.5
        observer.close()
    trained = RunDir.open(tmp_path / "fetched").trained
    assert trained
    assert (trained.steps, trained.versions) == ([4] * 4, [row["version"] for row in rows])


def add_scores(coordinator: Path, versions: list[int]) -> None:
    """A score of the first versions, and one of these."""
    ledger = CoordinatorFolder(coordinator).operator().ledger
    with ledger.write() as tx:
        for scored, ce in ([0] * len(versions), 5.5), (versions, 4.5):
            score = Score(
                block=None, versions=tuple(scored), split="valid", windows="windows0", ce=ce
            )
            tx.events.add_score(score, "w0", 0.0)
    ledger.close()


def test_failures_are_explained(tmp_path: Path, config: Config, settings: dict[str, object]):
    with bt.Swarm.start(config, tmp_path / "swarm", settings) as swarm:
        swarm.join(device="cuda:99")
        with pytest.raises(BlocktrainError, match=r"every worker failed.*cuda:99"):
            swarm.watch(60)
    with pytest.raises(ConfigError, match="holds a run with other settings"):
        bt.Swarm.start(config, tmp_path / "swarm", {**settings, "train.steps": 13})
