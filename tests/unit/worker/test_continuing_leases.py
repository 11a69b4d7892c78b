"""A worker that trains on while its update is made and travels."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.fault_server import Fault, FaultServer
from tests.support.worker_side import RUN
from tests.unit.worker.test_agent import CPU, SOON, Script, Watched

from blocktrain.codec.frames import UpdateDecoder
from blocktrain.config import Config
from blocktrain.data.corpus import Corpus
from blocktrain.errors import RefusedError
from blocktrain.protocol.messages import Blob, Downloaded, Finished, Lease, LeaseAnswer, Receipt
from blocktrain.storage import tensor_file
from blocktrain.storage.tensor_file import Tensors
from blocktrain.training.stored_models import load_block
from blocktrain.training.trainer import BlockTrainer
from blocktrain.worker.client import Client
from blocktrain.worker.lease_trainer import LeaseTrainer, Trained
from blocktrain.worker.local_block import ResidualFile
from blocktrain.worker.machine import WorkerEvent


class FinalUpdates(Script):
    """Says from which question on nothing of the block is left."""

    last_from = 1000

    def _lease(self, body: bytes) -> LeaseAnswer:
        answer = super()._lease(body)
        return answer.model_copy(update={"final_update": len(self.requests) >= self.last_from})


def learned(script: Script, number: int, like: Tensors) -> np.ndarray:
    data = b"".join(script.server.chunks[name] for name in script.claims[number].recipe.chunks)
    count = sum(array.size for array in like.values())
    decoder = UpdateDecoder(lambda at, size: data[at : at + size], len(data), count)
    return np.concatenate(list(decoder.frames()))


def row(weights: Tensors) -> np.ndarray:
    return np.concatenate([weights[name].reshape(-1) for name in sorted(weights)])


def shaped(numbers: np.ndarray, like: Tensors) -> Tensors:
    names = sorted(like)
    parts = np.split(numbers.astype(np.float32), np.cumsum([like[n].size for n in names])[:-1])
    return {name: part.reshape(like[name].shape) for name, part in zip(names, parts, strict=True)}


@pytest.fixture
def script(
    server: FaultServer,
    config: Config,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> FinalUpdates:
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(tmp_path / "cache"))
    encoded = config.with_settings(data__source="text:/nowhere", swarm__codec="bf16")
    return FinalUpdates(server, encoded, corpus)


@pytest.fixture
def watched(client: Client, tmp_path: Path) -> Watched:
    return Watched(client, tmp_path)


def straight(script: Script, steps: int) -> tuple[Tensors, Tensors]:
    """(weights at first, weights after so many steps in one go)."""
    trainer = BlockTrainer(script.config, 0, script.corpus, CPU, None)
    first = {name: array.copy() for name, array in trainer.weights().items()}
    for _ in range(steps):
        trainer.train_step()
    return first, trainer.weights()


def test_updates_of_leases_that_continue_add_up_to_training_in_one_go(
    script: FinalUpdates, watched: Watched, server: FaultServer
):
    """The first upload hangs until the second lease is being trained."""
    base, begun = script.first_weights(), threading.Event()
    server.faults = [Fault("PUT /v1/chunks", wait=begun)]
    script.answers = [
        lambda: script.lease(base, 0, 3),
        lambda: script.lease(base, 3, 3, continues="lease001"),
        script.after(2, Finished),
    ]
    watched.on_event = lambda e: begun.set() if (e.kind, e.steps) == ("training", 3) else None
    assert watched.run()
    assert [asked.trained for asked in script.requests[:3]] == [None, "lease001", "lease002"]
    first, last = straight(script, 6)
    told = sum(learned(script, number, first) for number in range(2))
    np.testing.assert_allclose(row(first) + told, row(last), atol=1e-4)
    moved = np.abs(row(last) - row(first)).max()
    assert moved > 1e-3  # or it would say little


def test_a_newer_base_is_used_while_the_own_update_is_sent(script: FinalUpdates, watched: Watched):
    base = script.first_weights()
    first, after_three = straight(script, 3)
    shifted = {name: array + np.float32(0.01) for name, array in first.items()}
    merged = script.server.hold(b"".join(tensor_file.encode(shifted)))
    script.answers = [
        lambda: script.lease(base, 0, 3),
        lambda: script.lease(merged, 3, 1, base_version=1, continues="lease001"),
        script.after(2, Finished),
    ]
    assert watched.run()
    trainer = BlockTrainer(script.config, 0, script.corpus, CPU, None)
    for _ in range(3):
        trainer.train_step()
    begun = {name: array + np.float32(0.01) for name, array in after_three.items()}
    load_block(trainer.module, begun, "a version and what was learned")
    trainer.train_step()
    expected = row(trainer.weights()) - row(begun)
    owed = (row(after_three) - row(first)) - learned(script, 0, first)
    np.testing.assert_allclose(learned(script, 1, first), expected + owed, rtol=0.02, atol=1e-5)


def test_a_merged_update_is_not_added_a_second_time(script: FinalUpdates, watched: Watched):
    """Each lease continues the one before; meanwhile the update before that one is merged, alone,
    so that the worker's own weights are what it should go on from."""
    script.config = script.config.with_settings(swarm__codec="int8")
    base = script.first_weights()
    first, _ = straight(script, 0)

    def version(updates: int) -> Blob:
        told = sum(learned(script, number, first) for number in range(updates))
        return script.server.hold(b"".join(tensor_file.encode(shaped(row(first) + told, first))))

    script.answers = [
        lambda: script.lease(base, 0, 2),
        lambda: script.lease(base, 2, 2, continues="lease001"),
        script.after(
            1, lambda: script.lease(version(1), 4, 2, base_version=1, continues="lease002")
        ),
        script.after(
            2, lambda: script.lease(version(2), 6, 2, base_version=2, continues="lease003")
        ),
        script.after(4, Finished),
    ]
    assert watched.run()
    _, last = straight(script, 8)
    told = sum(learned(script, number, first) for number in range(4))
    moved = np.linalg.norm(row(last) - row(first))
    assert np.linalg.norm(row(first) + told - row(last)) < 0.02 * moved


def test_a_lease_that_continues_a_forgotten_one_is_given_back(
    script: FinalUpdates, watched: Watched
):
    base = script.first_weights()
    script.answers = [
        lambda: script.lease(base, 3, 3, continues="lease777"),
        lambda: script.lease(base, 0, 3),
        script.after(1, Finished),
    ]
    assert watched.run()
    assert "worker restarted" in script.returned[0]
    assert len(script.claims) == 1


def test_a_worker_that_leaves_sends_what_it_has_trained(script: FinalUpdates, watched: Watched):
    base = script.first_weights()
    script.answers = [lambda: script.lease(base, 0, 3)]
    watched.on_event = lambda e: (
        watched.stopped.set() if e.kind == "training" and e.step == 3 else None
    )
    assert not watched.run()
    assert len(script.claims) == 1


def test_a_worker_that_ends_before_its_update_is_made_reports_its_downloads(
    script: FinalUpdates, watched: Watched, server: FaultServer
):
    base = script.first_weights()
    script.answers = [lambda: script.lease(base, 0, 3)]
    refusal = b'{"error": "forbidden", "reason": "this worker was banned"}'
    banned = Fault("POST /v1/lease", status=403, body=refusal, times=0)
    server.faults = [banned]

    def on_event(event: WorkerEvent) -> None:
        if event.kind == "training" and event.step == 3:
            banned.times = 1

    watched.on_event = on_event
    with pytest.raises(RefusedError, match="banned"):
        watched.run()
    (told,) = script.returns
    assert told.downloads == (Downloaded(block=0, whole=base.size, differences=0, raw=base.size),)


def test_a_disk_that_is_full_while_an_update_is_made_ends_the_worker(
    script: FinalUpdates, watched: Watched, monkeypatch: pytest.MonkeyPatch
):
    base = script.first_weights()
    script.answers = [lambda: script.lease(base, 0, 2)] + [lambda: SOON] * 50

    def full(*arguments, **options):  # type: ignore[no-untyped-def]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("blocktrain.worker.local_block.LocalBlock.encode", full)
    with pytest.raises(OSError, match="No space left"):
        watched.run()
    assert "No space left" in script.returned[0]


def test_the_update_before_a_change_of_block_is_a_final_one(script: FinalUpdates, watched: Watched):
    """It may never come back, and nobody else can tell what it owes."""
    script.config = script.config.with_settings(swarm__codec="sparse", swarm__top_k_per_4096=16)
    bases = [script.first_weights(block) for block in (0, 1)]
    script.answers = [
        lambda: script.lease(bases[0], 0, 3),
        lambda: script.lease(bases[0], 3, 3, continues="lease001"),
        lambda: script.lease(bases[1], 0, 3, block=1),
        script.after(3, Finished),
    ]
    assert watched.run()
    assert [claim.block for claim in script.claims] == [0, 0, 1]
    first, _ = straight(script, 0)
    kept = [np.count_nonzero(learned(script, number, first)) for number in range(2)]
    assert kept[1] > 8 * kept[0] > 0


def test_a_final_update_leaves_out_less(
    server: FaultServer, script: FinalUpdates, watched: Watched
):
    script.config = script.config.with_settings(swarm__codec="sparse", swarm__top_k_per_4096=16)
    base: Blob = script.first_weights()
    script.answers = [
        lambda: script.lease(base, 0, 3),
        lambda: script.lease(base, 3, 3, continues="lease001"),
        script.after(2, Finished),
    ]
    script.last_from = 3
    assert watched.run()
    first, _ = straight(script, 0)
    kept = [np.count_nonzero(learned(script, number, first)) for number in range(2)]
    assert kept[1] > 8 * kept[0] > 0


def test_a_restarted_worker_trains_from_its_residual_and_sends_it_once(
    script: FinalUpdates, watched: Watched, monkeypatch: pytest.MonkeyPatch
):
    """Begun from the version alone, it would learn a second time what it still owes."""
    script.config = script.config.with_settings(swarm__codec="sparse", swarm__top_k_per_4096=16)
    first, _ = straight(script, 0)
    starts, ends = [], []
    run = LeaseTrainer.run

    def watched_run(self: LeaseTrainer, lease: Lease, base: Tensors, *others: Any) -> Trained:
        starts.append(row(base))
        trained = run(self, lease, base, *others)
        assert trained
        ends.append(row(trained.weights))
        return trained

    def owed() -> np.ndarray:
        numbers = np.zeros_like(row(first))
        ResidualFile(watched.settings.folder / RUN, 0).add_to([numbers])
        return numbers

    monkeypatch.setattr(LeaseTrainer, "run", watched_run)
    script.answers = [
        lambda: script.lease(script.first_weights(), 0, 3),
        script.after(1, Finished),
    ]
    assert watched.run()
    owed_at_first = owed()
    version = row(first) + learned(script, 0, first)
    np.testing.assert_allclose(version + owed_at_first, ends[0], atol=1e-6)

    merged = script.server.hold(b"".join(tensor_file.encode(shaped(version, first))))
    script.answers = [
        lambda: script.lease(merged, 3, 3, base_version=1),
        script.after(2, Finished),
    ]
    assert watched.run()
    assert np.abs(owed_at_first).max() > 1e-4  # or it would say little
    np.testing.assert_array_equal(starts[1], version + owed_at_first)
    np.testing.assert_allclose(learned(script, 1, first) + owed(), ends[1] - version, atol=1e-6)


@pytest.mark.parametrize("became", ["pending", "refused", "unknown", "never told"])
def test_a_restarted_worker_asks_what_became_of_its_last_update(
    script: FinalUpdates,
    watched: Watched,
    server: FaultServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    became: str,
):
    """Only where that cannot be known it forgets what it owes, and it does not ask for ever."""
    script.config = script.config.with_settings(swarm__codec="sparse", swarm__top_k_per_4096=16)
    base = script.first_weights()
    script.answers = [lambda: script.lease(base, 0, 3), script.after(1, Finished)]
    assert watched.run()
    (owed,) = tmp_path.rglob("residual-0.safetensors")
    before, after = owed.read_bytes(), b"what is owed if it was accepted"
    waiting = owed.with_name(f"{owed.name}.lease002")
    waiting.write_bytes(after)
    if became == "unknown":
        server.faults = [Fault("POST /v1/updates/lease002/commit", status=400)]
    elif became == "never told":
        monkeypatch.setattr("blocktrain.worker.agent.REQUEST_SECONDS", 0.5)
        server.faults = [Fault("POST /v1/updates/lease002/commit", status=503, times=1000)]
    else:
        script.receipt = Receipt(state=became)  # type: ignore[arg-type]  # one of its states
    script.answers = [Finished]
    assert watched.run()
    assert not waiting.exists()
    known = {"pending": after, "refused": before}
    assert (owed.read_bytes() if owed.exists() else None) == known.get(became)


def test_a_worker_that_stops_before_its_update_arrived_keeps_the_old_residual(
    script: FinalUpdates,
    watched: Watched,
    server: FaultServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """It never came to the commit: so it is certain that the update does not count."""
    script.config = script.config.with_settings(swarm__codec="sparse", swarm__top_k_per_4096=16)
    monkeypatch.setattr("blocktrain.worker.lease_loop.SEND_SECONDS", 0.2)
    monkeypatch.setattr("blocktrain.worker.lease_loop.FINISH_SECONDS", 0.2)
    base, before = script.first_weights(), []

    def next_chunks_are_not_taken() -> Lease:
        server.faults = [Fault("PUT /v1/chunks", status=503, times=1000)]
        return script.lease(base, 3, 3)

    def on_event(event: WorkerEvent) -> None:
        if event.kind == "trained" and server.faults:
            before.extend(path.read_bytes() for path in tmp_path.rglob("residual-0.safetensors"))
            watched.stopped.set()

    script.answers = [
        lambda: script.lease(base, 0, 3),
        script.after(1, next_chunks_are_not_taken),
        script.after(2, Finished),
    ]
    watched.on_event = on_event
    assert not watched.run()
    assert script.returned == ["the worker was stopped"]
    (owed,) = tmp_path.rglob("residual-0.safetensors*")
    assert [owed.read_bytes()] == before


@pytest.mark.parametrize("lost", ["nothing", "offer", "receipt", "what it says"])
def test_the_residual_is_dropped_only_if_it_is_unknown_whether_the_update_counts(
    script: FinalUpdates,
    watched: Watched,
    server: FaultServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lost: str,
):
    """Told again, it would count twice."""
    script.config = script.config.with_settings(swarm__codec="sparse", swarm__top_k_per_4096=16)
    monkeypatch.setattr("blocktrain.worker.lease_loop.LATEST_SEND_SECONDS", 0.5)
    routes = {"offer": "POST /v1/updates", "receipt": "POST /v1/updates/lease002/commit"}
    base = script.first_weights()
    owed = watched.settings.folder / RUN / "residual-0.safetensors"
    before: list[bytes] = []

    def next_answers_are_cut() -> Lease:
        if lost in routes:
            server.faults = [Fault(routes[lost], cut_after=0, times=1000)]
        elif lost == "what it says":
            server.faults = [Fault(routes["receipt"], status=200, body=b"{}")]
        return script.lease(base, 3, 3)

    def on_event(event: WorkerEvent) -> None:
        if event.kind == "training" and owed.exists():
            before.append(owed.read_bytes())

    script.answers = [
        lambda: script.lease(base, 0, 3),
        script.after(1, next_answers_are_cut),
        Finished,
    ]
    watched.on_event = on_event
    assert watched.run()
    told = [event.text for event in watched.events if event.kind == "refused"]
    assert ["update not sent" in text for text in told] == ([] if lost == "nothing" else [True])
    assert owed.exists() == (lost in ("nothing", "offer"))
    if owed.exists():
        assert (owed.read_bytes() == before[-1]) == (lost == "offer")
    assert not list(owed.parent.glob("residual-0.safetensors.*"))
