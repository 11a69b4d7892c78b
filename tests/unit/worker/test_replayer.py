"""A part of a lease is trained again: what honest training gives agrees bit for bit, and nothing
else passes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from blocktrain.codec.dense import Int8
from blocktrain.codec.frames import encode
from blocktrain.config import Config
from blocktrain.data.corpus import Corpus
from blocktrain.protocol.check_messages import (
    Check,
    EncodingLink,
    LeasedText,
    ReplayCheck,
    ReplayResult,
    StartLink,
    TrainingState,
)
from blocktrain.protocol.messages import Blob, Predecessor
from blocktrain.storage import tensor_file
from blocktrain.storage.tensor_file import Tensors
from blocktrain.swarm import replay
from blocktrain.training.device import resolve
from blocktrain.training.trainer import BlockTrainer
from blocktrain.worker.lease_trainer import LeasedVersions
from blocktrain.worker.local_block import RESIDUAL
from blocktrain.worker.replayer import Replayer
from blocktrain.worker.transfer import BlobCache

CPU = resolve("cpu", "fp32")
FIRST, STEPS, CUT = 3, 6, 2  # a lease, and where its replayed segment begins


def copied(tensors: Tensors) -> Tensors:
    return {name: array.copy() for name, array in tensors.items()}


@dataclass
class Trained:
    """A lease that was trained honestly: its states at the cuts, and the files of all of them."""

    replayer: Replayer
    files: BlobCache
    predecessors: tuple[Predecessor, ...]
    states: list[tuple[Tensors, Tensors]]

    def blob(self, tensors: Tensors) -> Blob:
        return self.files.write(tensor_file.encode(tensors))

    def state(self, index: int) -> TrainingState:
        weights, moments = self.states[index]
        return TrainingState(weights=self.blob(weights), moments=self.blob(moments))

    def replay(self, segment: int = 1, **links: StartLink | EncodingLink) -> ReplayResult:
        cuts = (0, CUT, STEPS)
        task = ReplayCheck(
            first_step=cuts[segment], steps=cuts[segment + 1] - cuts[segment],
            start=self.state(segment), end=self.state(segment + 1), device="cpu", **links,
        )  # fmt: skip
        text = LeasedText(
            first_batch=FIRST, steps=STEPS, schedule_start=1, schedule_stride=2,
            predecessors=self.predecessors,
        )  # fmt: skip
        check = Check(check="check000", block=1, version=0, text=text, task=task, seconds_left=60.0)
        return self.replayer.replay(check, task, self.weights_of)

    def weights_of(self, predecessor: Predecessor) -> Tensors:
        return tensor_file.decode(self.read(predecessor.weights))

    def read(self, blob: Blob) -> memoryview:
        return memoryview(bytearray(self.files.reader(blob).read(0, blob.size)))


@pytest.fixture(params=["denoise", "cascade"])
def trained(
    request: pytest.FixtureRequest, config: Config, cascade: Config, corpus: Corpus, tmp_path: Path
) -> Trained:
    settings = cascade if request.param == "cascade" else config
    files = BlobCache(tmp_path / "files")

    def read(blob: Blob) -> memoryview:
        return made.read(blob)

    made = Trained(Replayer(settings, corpus, CPU, read, files), files, (), [])
    published = None
    if settings.kind.reads_predecessors:
        first = BlockTrainer(settings, 0, corpus, CPU, None)
        first.run(0, 2)
        made.predecessors = (Predecessor(block=0, version=4, weights=made.blob(first.weights())),)
        published = LeasedVersions(1, [0], made.predecessors, made.weights_of)
    trainer = BlockTrainer(settings, 1, corpus, CPU, None, published)
    trainer.run(0, FIRST)
    made.states.append((copied(trainer.weights()), copied(trainer.moments())))

    def after_step(stopping: bool) -> None:
        if trainer.step - FIRST in (CUT, STEPS):
            made.states.append((copied(trainer.weights()), copied(trainer.moments())))

    positions = [1 + 2 * step for step in range(STEPS)]
    trainer.run(FIRST, STEPS, after_step, positions=positions)
    return made


@pytest.mark.parametrize("segment", [0, 1])
def test_honest_training_is_repeated_bit_for_bit(trained: Trained, segment: int):
    result = trained.replay(segment)
    assert result.identical and not result.fault
    assert (result.distance, result.moments_distance) == (0.0, 0.0)


def test_the_optimizer_of_a_new_block_has_no_moments(config: Config, trained: Trained):
    """That of a worker's first lease."""
    trainer = BlockTrainer(trained.replayer.config, 1, trained.replayer.corpus, CPU, None,
                           _published(trained))  # fmt: skip
    start = copied(trainer.weights())
    positions = [1 + 2 * step for step in range(CUT)]
    trainer.run(FIRST, CUT, positions=positions)
    trained.states[:2] = [(start, {}), (copied(trainer.weights()), copied(trainer.moments()))]
    assert trained.replay(0).identical


def _published(trained: Trained) -> LeasedVersions | None:
    predecessors = trained.predecessors
    return LeasedVersions(1, [0], predecessors, trained.weights_of) if predecessors else None


@pytest.mark.parametrize("part", [0, 1])
def test_a_state_that_was_altered_does_not_agree(trained: Trained, part: int):
    states = [copied(each) for each in trained.states[-1]]
    smallest = min(array.size for array in states[part].values() if array.size > 1)
    next(array for array in states[part].values() if array.size == smallest)[...] *= -1
    trained.states[-1] = (states[0], states[1])
    assert replay.disagreement(trained.replay(), "fp32")


def test_other_text_does_not_agree(trained: Trained):
    corpus = trained.replayer.corpus
    text = np.roll(corpus.splits["train"], 7)
    trained.replayer.corpus = replace(corpus, splits={**corpus.splits, "train": text})
    assert replay.disagreement(trained.replay(), "fp32")


# Links


Alter = Callable[[dict[str, Tensors]], None]


def flipped(files: dict[str, Tensors]) -> None:
    files["sent"] = {name: -array for name, array in files["learned"].items()}


def kept_back(files: dict[str, Tensors]) -> None:
    """All is kept for later, so that the names of learned and residual are right."""
    files["sent"] = {name: 0 * array for name, array in files["learned"].items()}


def other_learned(files: dict[str, Tensors]) -> None:
    files["learned"] = files["sent"] = {n: -array for n, array in files["learned"].items()}


def made_up_residual(files: dict[str, Tensors]) -> None:
    files["residual"] = {RESIDUAL: files["residual"][RESIDUAL] + 1}


@pytest.mark.parametrize(
    ("alter", "fault"),
    [
        (lambda files: None, ""),
        (flipped, "not an encoding"),
        (kept_back, "not an encoding"),
        (other_learned, "not what the lease has learned"),
        (made_up_residual, "not what the lease has learned"),
    ],
)
def test_what_was_sent_is_what_was_learned(trained: Trained, alter: Alter, fault: str):
    start, end = trained.states[0][0], trained.states[-1][0]
    count = sum(array.size for array in start.values())
    before = np.random.default_rng(0).normal(0, 1e-4, count).astype(np.float32)
    learned, at = {}, 0
    for name in sorted(end):
        part = before[at : at + end[name].size].reshape(end[name].shape)
        learned[name], at = (end[name] - start[name]) + part, at + part.size
    files = {"learned": learned, "sent": learned, "residual": {RESIDUAL: before}}
    alter(files)
    sent, left_out = [files["sent"][name] for name in sorted(learned)], []
    update = trained.files.write(encode(sent, Int8(), lambda piece: left_out.append(piece.copy())))
    numbers = np.concatenate([files["learned"][name].reshape(-1) for name in sorted(learned)])
    gone = np.concatenate([part.reshape(-1) for part in sent]) - np.concatenate(left_out)
    link = EncodingLink(
        update=update,
        start=trained.blob(start),
        end=trained.blob(end),
        residual=trained.blob(files["residual"]),
        learned=trained.blob(files["learned"]).name,
        left_out=trained.blob({RESIDUAL: (numbers - gone).astype(np.float32)}).name,
    )
    for segment in (0, 1):  # it is checked with each
        result = trained.replay(segment, closing=link)
        assert fault in result.fault
        assert result.identical == (not fault)


def test_a_lease_begins_with_its_base_and_what_was_left_out(trained: Trained):
    start = trained.states[0][0]
    count = sum(array.size for array in start.values())
    added = np.full(count, 0.5, np.float32)
    base = {name: array - np.float32(0.5) for name, array in start.items()}
    trained.states[0] = ({n: base[n] + np.float32(0.5) for n in base}, trained.states[0][1])
    link = StartLink(base=trained.blob(base), added=trained.blob({RESIDUAL: added}))
    assert not trained.replay(0, opening=link).fault
    other = StartLink(base=trained.blob(base), added=trained.blob({RESIDUAL: 2 * added}))
    assert "did not begin" in trained.replay(0, opening=other).fault
    assert "did not begin" in trained.replay(0, opening=StartLink(base=trained.blob(base))).fault


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("at", [1, 2])
def test_a_worker_that_commits_to_nonsense_is_at_fault(trained: Trained, part: int, at: int):
    """Otherwise it would never be replayed."""
    states = [copied(each) for each in trained.states[at]]
    states[part].popitem()
    trained.states[at] = (states[0], states[1])
    assert "do not fit its block" in trained.replay().fault


def test_a_worker_that_commits_to_no_moments_after_its_steps_is_at_fault(trained: Trained):
    trained.states[-1] = (trained.states[-1][0], {})
    assert "made no step" in trained.replay().fault
