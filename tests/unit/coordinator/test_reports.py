"""What can be seen of a run: status, events, scores, blobs."""

import re
from pathlib import Path

import pytest
from tests.support.coordinator import SetClock, join, running

from blocktrain.config import SwarmConfig
from blocktrain.coordinator.reports import (
    AWAY_SECONDS,
    EVALUATED,
    LONG_AWAY_SECONDS,
    NO_SCORER,
    SOON,
    UNSCORED,
    UNTRAINED,
)
from blocktrain.coordinator.service import Service
from blocktrain.errors import NotFoundError, RefusedError
from blocktrain.protocol.status_messages import BlockStatus, Moved, Score, Status, WorkerStatus

TIMEOUT = SwarmConfig().heartbeat_timeout


def score(block: int | None, ce: float) -> Score:
    versions = (0, 0) if block is None else (0,)
    return Score(block=block, versions=versions, split="valid", windows="windows0", ce=ce)


def worker_status(service: Service, worker: str) -> WorkerStatus:
    return next(w for w in service.reports.status().workers if w.worker == worker)


def block_status(service: Service, block: int = 0) -> BlockStatus:
    return service.reports.status().blocks[block]


# Status


def test_a_new_run(service: Service, clock: SetClock):
    clock.forward(12)
    status = service.reports.status()
    with service.run.ledger.read() as tx:
        weights = [tx.versions.get(block).weights for block in range(2)]
    assert status == Status(
        run=service.run.id,
        state="running",
        ce=None,
        ce_note=UNSCORED,
        codec="none",
        blocks=tuple(
            BlockStatus(
                index=index,
                version=0,
                weights=weights[index],
                ce=None,
                ce_note=UNSCORED,
                bytes_trained=0,
                progress=0.0,
                replicas=0,
                participation=None,
                pending_updates=0,
                moved=Moved(),
            )
            for index in range(2)
        ),
        workers=(),
        seconds=12.0,
    )


def test_a_block_that_is_trained(service: Service):
    first, second = join(service), join(service)
    first.work(blocks=(0,))
    service.round()
    first.work(blocks=(0,))
    second.lease(blocks=(0,))
    status = block_status(service)
    assert (status.version, status.bytes_trained, status.progress) == (1, 10 * 2 * 8, 0.25)
    assert (status.replicas, status.pending_updates) == (2, 1)
    with service.run.ledger.read() as tx:
        assert status.weights == tx.versions.get(0, 1).weights


def test_what_workers_do(service: Service, clock: SetClock):
    trains, waits, banned, lost, left = (join(service, name=name) for name in "abcde")
    service.operator.ban(banned.id)
    lost.lease()
    clock.forward(TIMEOUT + 1)
    waits.work(blocks=(0,))
    service.round()
    trains.lease(blocks=(1,))
    clock.forward(2)
    states = {w.name: w.state for w in service.reports.status().workers}
    assert states == {"a": "training", "b": "waiting", "c": "banned", "d": "lost", "e": "away"}
    assert worker_status(service, trains.id) == WorkerStatus(
        worker=trains.id, name="a", role="train", device="cpu", block=1, state="training",
        bytes_trained=0, updates=0, seconds_since_seen=2.0, moved=Moved(), lease_steps=10,
        seconds_left=118.0,
    )  # fmt: skip
    found = worker_status(service, waits.id)
    assert (found.block, found.bytes_trained, found.updates) == (None, 160, 1)
    assert worker_status(service, left.id).seconds_since_seen == TIMEOUT + 3


def test_a_worker_is_lost_as_soon_as_its_silence_ends_its_lease(service: Service, clock: SetClock):
    member = join(service)
    member.lease()
    clock.forward(TIMEOUT)
    assert worker_status(service, member.id).state == "training"
    clock.forward(0.1)
    assert worker_status(service, member.id).state == "lost"
    service.round()
    with service.run.ledger.read() as tx:
        assert not tx.leases.active()
    assert worker_status(service, member.id).state == "lost"
    member.ask()
    assert worker_status(service, member.id).state == "training"


def test_who_has_nothing_to_do_and_does_not_ask_is_away(service: Service, clock: SetClock):
    member, judge = join(service), join(service, "evaluate")
    clock.forward(AWAY_SECONDS)
    assert worker_status(service, member.id).state == "waiting"
    clock.forward(0.1)
    assert worker_status(service, member.id).state == "away"
    assert worker_status(service, judge.id).state == "waiting"  # it may be scoring
    clock.forward(LONG_AWAY_SECONDS)
    assert worker_status(service, judge.id).state == "away"
    service.members.note(judge.caller)
    assert worker_status(service, judge.id).state == "waiting"


def test_a_finished_run_has_taken_the_time_it_took(service: Service, clock: SetClock):
    member = join(service)
    clock.forward(30)
    for block in (0, 1):
        for _ in range(4):
            member.work(blocks=(block,))
            service.round()
    service.round()
    clock.forward(500)
    status = service.reports.status()
    assert (status.state, status.seconds) == ("finished", 30)
    assert status.workers[0].state == "away"


def test_participation_is_the_share_of_leases_met_in_time(service: Service, clock: SetClock):
    member = join(service)
    member.lease(blocks=(0,))
    assert block_status(service).participation is None
    clock.forward(121)
    service.round()
    assert block_status(service).participation == 0.0
    for _ in range(3):
        member.work(blocks=(0,))
        service.round()
    assert block_status(service).participation == 0.75
    assert block_status(service, 1).participation is None


def test_a_late_update_does_not_mend_participation(service: Service, clock: SetClock):
    member = join(service)
    lease = member.lease(blocks=(0,))
    clock.forward(121)
    service.round()
    assert member.send(member.make(lease)).state == "pending"
    assert block_status(service).participation == 0.0


# Scores


def test_scores_are_shown_with_the_newest_first(service: Service, clock: SetClock):
    judge = join(service, "evaluate")
    for told in (score(None, 2.0), score(1, 3.0), score(1, 2.5), score(None, 1.75)):
        service.reports.score(judge.caller, told)
    status = service.reports.status()
    assert (status.ce, status.ce_note) == (1.75, "")
    assert [(block.ce, block.ce_note) for block in status.blocks] == [(None, EVALUATED), (2.5, "")]
    event = service.reports.events(0, 100)[-1]
    assert (event.kind, event.worker, event.block) == ("scored", judge.id, None)
    assert event.detail == "CE 1.7500 nats/byte"


def test_a_validator_scores_too_and_the_status_says_which_versions(tmp_path: Path, clock: SetClock):
    with running(tmp_path, clock, requires_checks=True) as service:
        validator, worker = join(service, "validate"), join(service)
        worker.work(blocks=(1,))
        validator.score()
        service.round()
        told = Score(block=None, versions=(0, 1), split="valid", windows="windows0", ce=1.5)
        service.reports.score(validator.caller, told)
        status = service.reports.status()
        assert (status.ce, status.ce_note) == (1.5, "")
        assert status.checking is not None and status.checking.scored == (0, 1)


def test_what_has_no_score_says_why(tmp_path: Path, clock: SetClock):
    with running(tmp_path, clock, requires_checks=True) as service:
        assert service.reports.status().ce_note == NO_SCORER
        validator, worker = join(service, "validate"), join(service)
        assert service.reports.status().ce_note == UNTRAINED
        worker.work(blocks=(1,))
        validator.score()
        service.round()
        status = service.reports.status()
        assert [block.ce_note for block in status.blocks] == [SOON, SOON] == 2 * [status.ce_note]
        clock.forward(LONG_AWAY_SECONDS + 1)
        assert service.reports.status().ce_note == NO_SCORER
        join(service, "evaluate")
        assert service.reports.status().ce_note == EVALUATED


def test_workers_that_train_send_no_scores(service: Service):
    with pytest.raises(RefusedError, match="evaluate") as refused:
        service.reports.score(join(service, "train").caller, score(0, 1.0))
    assert refused.value.code == "forbidden"
    assert service.reports.status().ce is None


def test_a_banned_judge_scores_no_more(service: Service):
    judge = join(service, "evaluate")
    service.operator.ban(judge.id)
    with pytest.raises(RefusedError, match="banned"):
        service.reports.score(judge.caller, score(0, 1.0))
    assert block_status(service).ce_note == UNSCORED


# Events and blobs


def test_events_tell_a_run_in_order(service: Service, clock: SetClock):
    first, second = join(service, name="a"), join(service, name="b")
    lost = first.lease(blocks=(0,))
    clock.forward(121)
    service.round()
    second.work(blocks=(0,))
    service.round()
    assert first.send(first.make(lost)).state == "refused"
    service.operator.ban(first.id)
    events = service.reports.events(0, 100)
    assert [event.kind for event in events] == [
        "joined", "joined", "leased", "lost", "leased", "uploaded", "merged", "refused",
        "banned",
    ]  # fmt: skip
    assert [event.number for event in events] == list(range(1, 10))
    assert [event.time for event in events] == sorted(event.time for event in events)
    assert service.reports.events(7, 1) == events[7:8]
    assert service.reports.last_event() == 9


def test_a_blob_is_its_recipe(service: Service):
    blob = block_status(service).weights
    answer = service.reports.blob(blob.name)
    assert answer.recipe.size == blob.size
    assert answer.urls is None  # chunks on a disk have no address of their own
    assert {blob.name, *answer.recipe.chunks} == service.run.blobs.chunks_of(blob.name)
    with pytest.raises(NotFoundError):
        service.reports.blob("0" * 64)


@pytest.mark.parametrize(("block", "versions"), [(0, ()), (0, (1, 1)), (None, (1,)), (None, ())])
def test_a_score_names_a_version_for_each_block(
    service: Service, block: int | None, versions: tuple[int, ...]
):
    judge = join(service, "evaluate")
    told = Score(block=block, versions=versions, split="valid", windows="windows0", ce=1.0)
    with pytest.raises(RefusedError, match="versions"):
        service.reports.score(judge.caller, told)


@pytest.mark.parametrize(("block", "versions"), [(0, (1,)), (None, (0, 2**53))])
def test_a_score_is_of_versions_that_exist(
    service: Service, block: int | None, versions: tuple[int, ...]
):
    judge = join(service, "evaluate")
    told = Score(block=block, versions=versions, split="valid", windows="windows0", ce=1.0)
    with pytest.raises(RefusedError, match="has no version"):
        service.reports.score(judge.caller, told)


def test_a_clock_that_was_set_back_shows_no_negative_ages(service: Service, clock: SetClock):
    join(service)
    clock.forward(-3600)
    status = service.reports.status()
    assert (status.seconds, status.workers[0].seconds_since_seen) == (0.0, 0.0)


def test_names_that_an_earlier_release_accepted_are_shown(service: Service):
    member = join(service)
    with service.run.ledger.write() as tx:
        tx.members.rename_worker(member.id, "evil\u202egpj.exe", "cpu")
    assert worker_status(service, member.id).name == "evil\u202egpj.exe"


def test_the_dashboard_and_the_docs_name_the_metrics_that_exist(tmp_path: Path, clock: SetClock):
    docs = Path(__file__).resolve().parents[3] / "docs"
    with running(tmp_path, clock, requires_checks=True) as service:
        worker, validator = join(service), join(service, "validate")
        lease = worker.lease(blocks=(0,))
        clock.forward(5.0)
        worker.send(worker.make(lease))
        validator.score()
        service.round()
        evaluator = join(service, "evaluate")
        for block in (None, 0):
            score = Score(
                block=block, versions=(0, 0) if block is None else (0,), split="valid",
                windows="w" * 16, ce=1.25,
            )  # fmt: skip
            service.reports.score(evaluator.caller, score)
        page = service.metrics.page()[0].decode()
    metrics = {line.split("{")[0].split(" ")[0] for line in page.splitlines() if line[:1] != "#"}
    exported = {name for name in metrics if not name.endswith("_created")}
    board = set(re.findall(r"blocktrain_\w+", (docs / "grafana.json").read_text()))
    assert board - exported == set()
    told = re.findall(r"^\| `(\w+)` \|", (docs / "tutorials/run-page.md").read_text(), re.MULTILINE)
    assert set(told) == exported
