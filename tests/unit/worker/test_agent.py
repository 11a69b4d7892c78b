import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.fault_server import Fault, FaultServer
from tests.support.turned_clock import TurnedClock
from tests.support.worker_side import KEY, RUN, WORKER, described, described_run, joined

from blocktrain.config import Config
from blocktrain.data.corpus import Corpus
from blocktrain.errors import ConfigError, DeviceError, ProtocolError, RefusedError, RunError
from blocktrain.memory import FreeMemory
from blocktrain.protocol.identity import update_text, verify
from blocktrain.protocol.messages import (
    Blob,
    Downloaded,
    Finished,
    Lease,
    LeaseAnswer,
    LeaseProgress,
    LeaseRequest,
    LeaseReturn,
    LeaseState,
    Message,
    Predecessor,
    Receipt,
    UpdateClaim,
    UpdateOffer,
    UploadState,
    Wait,
)
from blocktrain.storage import tensor_file
from blocktrain.storage.chunks import name_of
from blocktrain.storage.tensor_file import Tensors
from blocktrain.training.device import resolve
from blocktrain.training.memory_check import Device
from blocktrain.training.trainer import BlockTrainer
from blocktrain.worker import lease_loop
from blocktrain.worker.agent import Agent, WorkerSettings, placed_in_memory
from blocktrain.worker.client import Client
from blocktrain.worker.machine import Idleness, WorkerEvent

CPU = resolve("cpu", "fp32")
SOON = Wait(seconds=0.02, reason="the last update is about to become a version")

Next = Callable[[], Lease | Wait | Finished]


class Script:
    """A coordinator that gives the answers a test wrote down, and records what it receives."""

    def __init__(self, server: FaultServer, config: Config, corpus: Corpus) -> None:
        self.server, self.config, self.corpus = server, config, corpus
        self.answers: list[Next] = []
        self.requests: list[LeaseRequest] = []
        self.offers: list[UpdateOffer] = []
        self.returns: list[LeaseReturn] = []
        self.open = LeaseState(open=True, seconds_left=60.0)
        self.receipt = Receipt(state="pending", weight=1.0)
        self._committed: set[str] = set()
        self._given = 0
        server.on("POST /v1/join", lambda body: self._joined())
        server.on("POST /v1/lease", self._lease)
        self.ended: list[int] = []  # steps of the leases that ended early
        server.on("POST /v1/lease/[^/]+/progress", self._progress)
        server.on("POST /v1/lease/[^/]+/return", self._take_back)
        server.on("POST /v1/updates", self._offer)
        server.on("POST /v1/updates/[^/]+/commit", self._commit)

    @property
    def returned(self) -> list[str]:
        """The reasons for which leases were given back."""
        return [returned.reason for returned in self.returns]

    @property
    def claims(self) -> list[UpdateClaim]:
        """Updates that were committed, in order."""
        return [o.claim for o in self.offers if o.claim.lease in self._committed]

    def result(self, number: int) -> Blob:
        recipe = self.claims[number].recipe
        return Blob(name=name_of(recipe.model_dump_json().encode()), size=recipe.size)

    def weights(self, number: int) -> Tensors:
        chunks = self.claims[number].recipe.chunks
        return tensor_file.decode(b"".join(self.server.chunks[name] for name in chunks))

    def first_weights(self, block: int = 0, config: Config | None = None) -> Blob:
        trainer = BlockTrainer(config or self.config, block, self.corpus, CPU, None)
        return self.server.hold(b"".join(tensor_file.encode(trainer.weights())))

    def lease(self, base: Blob, first: int, steps: int, **changes: Any) -> Lease:
        self._given += 1
        fields = {
            "block": 0, "base_version": 0, "schedule_start": first, "schedule_stride": 1,
            "seconds_left": 60.0, **changes,
        }  # fmt: skip
        return Lease(
            lease=f"lease{self._given:03d}", fence=self._given, base=base, first_batch=first,
            steps=steps, **fields,
        )  # fmt: skip

    def after(self, updates: int, then: Next) -> Next:
        """An answer that is given once this many updates were committed."""
        return lambda: then() if len(self.claims) >= updates else SOON

    def _joined(self) -> Message:
        return joined(description=described_run(self.server, self.config, self.corpus))

    def _lease(self, body: bytes) -> LeaseAnswer:
        self.requests.append(LeaseRequest.model_validate_json(body))
        answer = self.answers[0]() if self.answers else Finished()
        if answer is not SOON and self.answers:
            self.answers.pop(0)
        return LeaseAnswer(answer=answer)

    def _progress(self, body: bytes) -> LeaseState:
        told = LeaseProgress.model_validate_json(body)
        self.ended += [told.steps_done] if told.ends else []
        return self.open

    def _take_back(self, body: bytes) -> LeaseState:
        self.returns.append(LeaseReturn.model_validate_json(body))
        return LeaseState(open=False, seconds_left=0.0)

    def _offer(self, body: bytes) -> UploadState:
        offer = UpdateOffer.model_validate_json(body)
        if offer not in self.offers:
            self.offers.append(offer)
        chunks = dict.fromkeys(offer.claim.recipe.chunks)
        return UploadState(missing=tuple(n for n in chunks if n not in self.server.chunks))

    def _commit(self, body: bytes) -> Receipt:
        line = self.server.lines("POST /v1/updates/")[-1]
        self._committed.add(re.findall(r"lease\d+", line)[0])
        return self.receipt


@pytest.fixture
def script(
    server: FaultServer,
    config: Config,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Script:
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(tmp_path / "cache"))
    return Script(server, config.with_settings(data__source="text:/nowhere"), corpus)


class Watched:
    """An agent and its events."""

    def __init__(self, client: Client, folder: Path) -> None:
        self.client = client
        self.settings = WorkerSettings(folder / "worker", "cpu", name="tested")
        self.events: list[WorkerEvent] = []
        self.on_event: Callable[[WorkerEvent], None] = lambda event: None
        self.stopped = threading.Event()

    def make(self, **settings: Any) -> Agent:
        return Agent(self.client, replace(self.settings, **settings), self._hear)

    def run(self, **settings: Any) -> bool:
        return self.make(**settings).run(self.stopped.is_set)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events if event.kind not in ("training", "waiting")]

    def _hear(self, event: WorkerEvent) -> None:
        self.events.append(event)
        self.on_event(event)


@pytest.fixture
def watched(client: Client, tmp_path: Path) -> Watched:
    return Watched(client, tmp_path)


def assert_equal(a: Tensors, b: Tensors) -> None:
    assert a.keys() == b.keys()
    for name, array in a.items():
        assert np.array_equal(array, b[name]), name


def blob_requests(server: FaultServer, blob: Blob) -> int:
    return len(server.lines(f"GET /v1/blobs/{blob.name}"))


def test_a_workers_whole_life(script: Script, watched: Watched, server: FaultServer):
    """Leases in order, each merged alone: one download, and the weights of a local run."""
    first = script.first_weights()
    script.answers = [
        lambda: script.lease(first, 0, 5),
        script.after(1, lambda: script.lease(script.result(0), 5, 4, base_version=1)),
        script.after(2, lambda: script.lease(script.result(1), 9, 3, base_version=2)),
        script.after(3, Finished),
    ]
    assert watched.run()
    straight = BlockTrainer(script.config, 0, script.corpus, CPU, None)
    straight.train(lambda progress: None)
    assert_equal(straight.weights(), script.weights(2))

    assert blob_requests(server, first) == 1
    assert not any(blob_requests(server, script.result(n)) for n in range(3))
    assert script.requests[0].held_block is None
    assert script.requests[-1].held_block == 0
    assert 1 < (script.requests[-1].steps_per_second or 0) < 1e6
    assert script.requests[0].transfer_seconds == 0.0
    assert script.requests[-1].transfer_seconds > 0.0
    assert [claim.base_version for claim in script.claims] == [0, 1, 2]
    assert all(verify(KEY.public, update_text(o.claim), o.signature) for o in script.offers)
    assert {(claim.run, claim.worker) for claim in script.claims} == {(RUN, WORKER)}
    assert watched.kinds() == [
        "joined", "corpus", *["leased", "trained", "accepted"] * 3, "finished"
    ]  # fmt: skip
    last = watched.events[-1]
    assert last.contribution == 12 * 4 * 32
    assert last.bytes_up == 3 * first.size
    training = [event for event in watched.events if event.kind == "training"]
    assert training[-1].step == training[-1].steps == 3
    assert 0 < (training[-1].loss or 0) < 10
    assert training[-1].bytes_per_s > 0


def test_every_stage_of_a_lease_is_logged_with_its_id(
    script: Script, watched: Watched, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "blocktrain.worker")
    script.answers = [
        lambda: script.lease(script.first_weights(), 0, 2),
        script.after(1, Finished),
    ]
    assert watched.run()
    lines = [line for line in caplog.messages if "lease001" in line]
    assert [line.partition(":")[0] for line in lines] == [
        "lease lease001 leased", "lease lease001 trained", "lease lease001 accepted"
    ]  # fmt: skip


def test_only_steps_count_as_training(script: Script, watched: Watched):
    """Between two leases the worker is told to wait: that is its time, but no training."""
    script.answers = [
        lambda: script.lease(script.first_weights(), 0, 5),
        script.after(1, lambda: Wait(seconds=0.4, reason="nothing to do")),
        lambda: script.lease(script.result(0), 5, 5, base_version=1),
        script.after(2, Finished),
    ]
    assert watched.run()
    kinds = [event.kind for event in watched.events]
    waiting = kinds.index("waiting")
    leased = kinds.index("leased", waiting)
    before, after, last = (watched.events[n] for n in (waiting, leased, -1))
    assert after.seconds - before.seconds >= 0.4
    assert after.training_seconds == before.training_seconds > 0.0
    assert before.training_seconds < last.training_seconds < last.seconds - 0.4


def test_a_base_that_was_merged_with_others_is_fetched(
    script: Script, watched: Watched, server: FaultServer
):
    first, other = script.first_weights(), script.first_weights(1)
    script.answers = [
        lambda: script.lease(first, 0, 2),
        script.after(1, lambda: script.lease(other, 2, 2, base_version=1)),
    ]
    assert watched.run()
    assert blob_requests(server, other) == 1
    assert len(script.claims) == 2


def test_another_block_starts_afresh(script: Script, watched: Watched):
    """And the next lease of the first block finds its own update in the cache."""
    blocks = [script.first_weights(block) for block in (0, 1)]
    script.answers = [
        lambda: script.lease(blocks[0], 0, 2),
        lambda: script.lease(blocks[1], 0, 3, block=1),
        script.after(2, Finished),
    ]
    assert watched.run()
    alone = BlockTrainer(script.config, 1, script.corpus, CPU, None)
    for _ in range(3):
        alone.train_step()
    second = next(n for n, claim in enumerate(script.claims) if claim.block == 1)
    assert_equal(alone.weights(), script.weights(second))


def test_a_cascade_fetches_the_blocks_before(script: Script, watched: Watched, server: FaultServer):
    config = script.config.with_settings(objective__kind="cascade", objective__tail=1)
    script.config = config
    before = BlockTrainer(config, 0, script.corpus, CPU, None)
    before.train(lambda progress: None)
    held = server.hold(b"".join(tensor_file.encode(before.weights())))

    class Fixed:
        def version(self, block: int) -> int:
            return 4

        def weights(self, block: int) -> Any:
            return dict(before.module.named_parameters())

    straight = BlockTrainer(config, 1, script.corpus, CPU, None, Fixed())
    first = server.hold(b"".join(tensor_file.encode(straight.weights())))
    straight.train(lambda progress: None)
    named = (Predecessor(block=0, version=4, weights=held),)
    script.answers = [
        lambda: script.lease(first, 0, 7, block=1, predecessors=named),
        script.after(1, lambda: script.lease(script.result(0), 7, 5, block=1, predecessors=named)),
        script.after(2, Finished),
    ]
    assert watched.run()
    assert_equal(straight.weights(), script.weights(1))
    assert blob_requests(server, held) == 1


def test_the_next_lease_is_asked_for_while_the_update_goes_up(
    script: Script, watched: Watched, server: FaultServer
):
    """The upload hangs until the second lease is being trained."""
    blocks = [script.first_weights(block) for block in (0, 1)]
    begun = threading.Event()
    server.faults = [Fault("PUT /v1/chunks", wait=begun)]
    script.answers = [
        lambda: script.lease(blocks[0], 0, 2),
        lambda: script.lease(blocks[1], 0, 2, block=1),
        script.after(2, Finished),
    ]
    watched.on_event = lambda e: begun.set() if (e.kind, e.block) == ("training", 1) else None
    assert watched.run()
    kinds = [(event.kind, event.block) for event in watched.events]
    assert kinds.index(("leased", 1)) < kinds.index(("accepted", 0))


def test_a_lost_lease_is_dropped(script: Script, watched: Watched):
    script.config = script.config.with_settings(train__steps=100_000)
    first = script.first_weights()
    script.open = LeaseState(open=False, seconds_left=0.0, reason="this lease is expired")
    script.answers = [lambda: script.lease(first, 0, 100_000, seconds_left=0.5)]
    assert watched.run()
    assert watched.kinds() == ["joined", "corpus", "leased", "lost", "finished"]
    assert "this lease is expired" in watched.events[-2].text
    assert not script.offers and not script.returned


def test_shortly_before_its_deadline_a_worker_sends_what_it_has(script: Script, watched: Watched):
    script.config = script.config.with_settings(train__steps=100_000)
    first = script.first_weights()
    script.open = LeaseState(open=True, seconds_left=0.5)
    script.answers = [
        lambda: script.lease(first, 0, 100_000, seconds_left=2.0), script.after(1, Finished)
    ]  # fmt: skip
    assert watched.run()
    (steps,) = script.ended
    trainer = BlockTrainer(script.config, 0, script.corpus, CPU, None)
    trainer.run(0, steps)
    assert_equal(script.weights(0), trainer.weights())
    (accepted,) = (event.text for event in watched.events if event.kind == "accepted")
    assert f"update of {steps} steps accepted" in accepted
    assert not script.returned


def test_a_stop_gives_a_long_lease_back(script: Script, watched: Watched):
    script.config = script.config.with_settings(train__steps=1_000_000)
    first = script.first_weights()
    script.answers = [lambda: script.lease(first, 0, 1_000_000)]
    watched.on_event = lambda event: watched.stopped.set() if event.kind == "training" else None
    assert not watched.run()
    assert script.returned == ["the worker was stopped"]
    assert watched.kinds()[-2:] == ["returned", "stopped"]
    assert not script.offers


def test_a_stop_lets_a_short_lease_finish(script: Script, watched: Watched):
    first = script.first_weights()
    script.answers = [lambda: script.lease(first, 0, 40)]
    watched.on_event = lambda event: watched.stopped.set() if event.kind == "training" else None
    assert not watched.run()
    assert not script.returned
    assert len(script.claims) == 1
    assert watched.kinds()[-2:] == ["accepted", "stopped"]


def test_a_stop_ends_a_wait(script: Script, watched: Watched):
    script.answers = [lambda: Wait(seconds=1000.0, reason="everything is handed out")]
    watched.on_event = lambda event: watched.stopped.set() if event.kind == "waiting" else None
    began = time.monotonic()
    assert not watched.run()
    assert time.monotonic() - began < 3.0
    assert watched.events[-2].text == "everything is handed out"


def test_no_wait_is_endless(script: Script, watched: Watched, monkeypatch: pytest.MonkeyPatch):
    """Whatever a coordinator says, it is asked again."""
    monkeypatch.setattr(lease_loop, "LONGEST_WAIT", 0.02)
    script.answers = [lambda: Wait(seconds=1e300, reason="wait"), Finished]
    assert watched.run()


@pytest.mark.parametrize(("block", "predecessors"), [(99, ()), (1, (0, 0)), (0, (1,))])
def test_a_lease_of_blocks_that_the_run_does_not_have_ends_the_worker(
    script: Script, watched: Watched, block: int, predecessors: tuple[int, ...]
):
    base = script.first_weights()
    named = tuple(Predecessor(block=each, version=0, weights=base) for each in predecessors)
    script.answers = [lambda: script.lease(base, 0, 2, block=block, predecessors=named)]
    with pytest.raises(ProtocolError, match="blocks that the run does not have"):
        watched.run()
    assert "blocks that the run does not have" in script.returned[0]


def test_its_time_may_be_over(script: Script, watched: Watched):
    script.answers = [lambda: Wait(seconds=1000.0, reason="nothing")]
    assert not watched.run(until=time.time() + 0.5)
    assert watched.events[-1].text == "the worker's time is over"


def test_training_that_diverges_is_given_back(script: Script, watched: Watched):
    healthy = script.first_weights()
    start = BlockTrainer(script.config, 0, script.corpus, CPU, None).weights()
    ruined = {name: np.full_like(array, np.nan) for name, array in start.items()}
    broken = script.server.hold(b"".join(tensor_file.encode(ruined)))
    script.answers = [
        lambda: script.lease(broken, 0, 3),
        lambda: script.lease(healthy, 0, 3),
        script.after(1, Finished),
    ]
    assert watched.run()
    assert "non-finite" in script.returned[0]
    assert len(script.claims) == 1


def test_five_failed_leases_in_a_row_end_the_worker(script: Script, watched: Watched):
    gone = Blob(name="ab" * 32, size=100)
    script.answers = [lambda: script.lease(gone, 0, 3)] * 9
    with pytest.raises(RefusedError, match="no chunk"):
        watched.run()
    assert len(script.returned) == 5


def test_weights_that_do_not_fit_end_the_worker(script: Script, watched: Watched):
    wide = script.first_weights(config=script.config.with_settings(model__width=64))
    script.answers = [lambda: script.lease(wide, 0, 3)]
    with pytest.raises(RunError, match="does not fit this model"):
        watched.run()
    assert "does not fit" in script.returned[0]


def test_work_goes_on_after_a_refused_update(script: Script, watched: Watched):
    first = script.first_weights()
    script.receipt = Receipt(state="refused", reason="the update is 9 versions behind, more than 4")
    script.answers = [
        lambda: script.lease(first, 0, 2),
        script.after(1, lambda: script.lease(first, 2, 2)),
        script.after(2, Finished),
    ]
    assert watched.run()
    told = [event.text for event in watched.events if event.kind == "refused"]
    assert told == ["update refused: the update is 9 versions behind, more than 4"] * 2
    assert watched.events[-1].contribution == 0


@pytest.mark.parametrize("heard", [False, True])
def test_downloads_are_reported_once_if_an_update_cannot_be_sent(
    script: Script, watched: Watched, server: FaultServer, heard: bool
):
    """With the lease's return, or where nobody hears that, with the next update."""
    first = script.first_weights()
    refusal = b'{"error": "forbidden", "reason": "not now"}'
    server.faults = [Fault("POST /v1/updates", status=403, body=refusal)]
    if not heard:
        server.faults += [Fault("POST /v1/lease/lease001/return", status=403, body=refusal)]
    script.answers = [
        lambda: script.lease(first, 0, 2),
        lambda: script.lease(first, 0, 2) if "refused" in watched.kinds() else SOON,
        script.after(1, Finished),
    ]
    assert watched.run()
    base = Downloaded(block=0, whole=first.size, differences=0, raw=first.size)
    assert [told.downloads for told in script.returns] == ([(base,)] if heard else [])
    assert [offer.downloads for offer in script.offers] == [() if heard else (base,)]


def test_a_worker_that_stops_before_its_update_is_sent_reports_its_downloads(
    script: Script, watched: Watched, server: FaultServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("blocktrain.worker.lease_loop.SEND_SECONDS", 0.1)
    monkeypatch.setattr("blocktrain.worker.lease_loop.FINISH_SECONDS", 0.1)
    server.faults = [Fault("PUT /v1/chunks", status=503, times=1000)]
    first = script.first_weights()
    script.answers = [lambda: script.lease(first, 0, 2), script.after(1, Finished)]
    watched.on_event = lambda event: watched.stopped.set() if event.kind == "trained" else None
    assert not watched.run()
    (told,) = script.returns
    assert told.downloads == (Downloaded(block=0, whole=first.size, differences=0, raw=first.size),)


def extending(script: Script, steps: int | None) -> Next:
    """Refuses to hand out work, and then describes a run that was extended (None: it was not)."""

    def refuse() -> Lease:
        script.answers.pop(0)
        if steps:
            script.config = script.config.extended_to(steps)
        raise RefusedError("conflict", "the run was extended")

    return refuse


def test_a_worker_joins_an_extended_run_again(script: Script, watched: Watched):
    """It trains on with its moments: the weights are those of a local run that was extended."""
    first = script.first_weights()
    script.answers = [
        lambda: script.lease(first, 0, 12),
        extending(script, 15),
        script.after(1, lambda: script.lease(script.result(0), 12, 3, base_version=1)),
        script.after(2, Finished),
    ]
    assert watched.run()
    straight = BlockTrainer(script.config, 0, script.corpus, CPU, None)
    straight.train(lambda progress: None)
    assert_equal(straight.weights(), script.weights(1))
    assert (script.requests[0].run_steps, script.requests[-1].run_steps) == (None, 15)
    assert watched.kinds() == [
        "joined", "corpus", "leased", "trained", "accepted",
        "extended", "joined", "corpus", "leased", "trained", "accepted", "finished",
    ]  # fmt: skip


def test_a_worker_does_not_join_again_and_again(script: Script, watched: Watched):
    script.answers = [extending(script, 15), extending(script, None)]
    with pytest.raises(ProtocolError, match="describes it as before"):
        watched.run()


def test_a_coordinator_that_restarts_is_waited_for(
    script: Script, watched: Watched, server: FaultServer
):
    first = script.first_weights()
    script.answers = [lambda: script.lease(first, 0, 2), script.after(1, Finished)]
    server.faults = [
        Fault("POST /v1/lease", status=503, times=2),
        Fault("POST /v1/updates", cut_after=0),
    ]
    assert watched.run()
    assert len(script.claims) == 1


def test_it_pauses_while_others_use_the_machine(
    script: Script, watched: Watched, monkeypatch: pytest.MonkeyPatch
):
    first = script.first_weights()
    load = [0.0]
    idleness = Idleness(lambda: load[0], lambda: 0.0, TurnedClock().clock, 1)
    monkeypatch.setattr("blocktrain.worker.agent.idleness_of_this_machine", lambda clock: idleness)

    def on_event(event: WorkerEvent) -> None:
        if event.kind == "training" and event.step == 1:
            load[0] = 9.0
        if event.kind == "paused":
            threading.Timer(0.2, lambda: load.__setitem__(0, 0.0)).start()

    watched.on_event = on_event
    script.answers = [lambda: script.lease(first, 0, 3), script.after(1, Finished)]
    assert watched.run(idle_only=True)
    assert watched.kinds().count("paused") == 1
    assert len(script.claims) == 1


def test_blocks_that_do_not_fit_are_refused_before_any_work(script: Script, watched: Watched):
    with pytest.raises(DeviceError, match=r"needs about .* MB, but --memory allows 0.0 MB"):
        watched.run(memory_bytes=1000)
    with pytest.raises(ConfigError, match="the run has blocks 0 to 1"):
        watched.run(blocks=(2,))
    assert watched.run(memory_bytes=10**12, blocks=(1,))
    assert script.requests[-1].blocks == (1,)


def test_by_default_a_worker_uses_a_share_of_free_memory(
    script: Script, watched: Watched, monkeypatch: pytest.MonkeyPatch
):
    def set_free(count: float) -> None:
        free = FreeMemory(int(count), "this machine")
        monkeypatch.setattr("blocktrain.training.memory_check.free_memory", lambda: free)

    needed = max(Device.named("cpu").training_bytes(script.config, updates=True))
    set_free(0.9 * needed)
    with pytest.raises(DeviceError, match=r"more than is free on this machine .* --force"):
        watched.run(memory_bytes=10**12)
    set_free(1.2 * needed)
    with pytest.raises(DeviceError, match=r"more than 75% of the memory that is free .* --memory"):
        watched.run()
    assert watched.run(memory_bytes=10**12)
    assert watched.run(checks_memory=False)
    set_free(needed / 0.74)
    assert watched.run()
    assert script.requests[-1].blocks is None  # all fit, so it asks for any


def test_frozen_blocks_are_read_from_disk_if_more_blocks_fit_so(config: Config, tmp_path: Path):
    deep = config.with_settings(
        objective__kind="cascade", objective__tail=0, model__layers=8, model__blocks=8,
        model__depths=[1] * 8, model__width=256, train__batch=1,
    )  # fmt: skip
    resident = Device.named("cpu").training_bytes(deep, updates=True)

    def placed(memory_bytes: int | None, config: Config = deep) -> str:
        settings = WorkerSettings(tmp_path, "cpu", memory_bytes=memory_bytes, checks_memory=False)
        return placed_in_memory(settings, config).train.frozen_in

    assert placed(resident[-1] - 1) == "disk"
    assert [placed(resident[-1]), placed(1000), placed(None)] == ["memory"] * 3
    assert placed(1000, config) == "memory"  # denoising blocks read no others


def test_an_invite_for_another_role_is_refused(
    script: Script, watched: Watched, server: FaultServer
):
    server.on("POST /v1/join", lambda body: joined(role="evaluate"))
    with pytest.raises(
        ConfigError, match=r"for evaluation; .* use --evaluate; .* another --folder"
    ):
        watched.run()


def test_an_owners_copy_of_another_text_is_reported(
    script: Script, watched: Watched, tmp_path: Path
):
    (tmp_path / "own.txt").write_bytes(b"not what the run is about. " * 1000)
    assert watched.run(data=f"text:{tmp_path}/own.txt")
    assert watched.kinds() == ["joined", "other_text", "corpus", "finished"]


def test_settings_that_are_not_toml_are_refused(
    script: Script, watched: Watched, server: FaultServer
):
    server.on("POST /v1/join", lambda body: joined(description=described(config="[model")))
    with pytest.raises(ProtocolError, match="not valid TOML"):
        watched.run()


def test_a_banned_worker_ends(script: Script, watched: Watched, server: FaultServer):
    def banned(body: bytes) -> Message:
        raise RefusedError("forbidden", "this worker was banned from the run")

    server.on("POST /v1/lease", banned)
    with pytest.raises(RefusedError, match="banned"):
        watched.run()


def test_what_a_killed_worker_left_half_written_is_removed(script: Script, watched: Watched):
    agent = watched.make()
    half = watched.settings.folder / "chunks" / "partial" / "half"
    half.write_bytes(b"half a chunk")
    assert agent.run()
    assert not half.exists()


def test_two_workers_cannot_share_a_folder(script: Script, watched: Watched):
    script.answers = [lambda: Wait(seconds=1000.0, reason="nothing")]
    first, second = watched.make(), watched.make()
    waiting = threading.Event()
    watched.on_event = lambda event: waiting.set() if event.kind == "waiting" else None
    thread = threading.Thread(target=first.run, args=(watched.stopped.is_set,))
    thread.start()
    assert waiting.wait(10)
    with pytest.raises(RunError, match="another worker uses"):
        second.run()
    watched.stopped.set()
    thread.join()
