"""What a coordinator survives: races, odd numbers, old bases, stores that fail, two of its kind."""

import dataclasses
import json
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import sqlalchemy as sql
from tests.support.coordinator import (
    Member,
    SetClock,
    commit,
    first_weights,
    join,
    make_corpus,
    make_run,
    open_stores,
    put_chunk,
    running,
    served,
    swarm_config,
)
from tests.support.once import once
from tests.support.postgres import fresh_database
from tests.support.statements import after_statement, before_statement

from blocktrain.coordinator.folder import CoordinatorFolder
from blocktrain.coordinator.merger import CLAIM_SECONDS
from blocktrain.coordinator.run import create_run, open_run
from blocktrain.coordinator.service import Service
from blocktrain.coordinator.verification import Finding, UpdateVerifier
from blocktrain.errors import BlocktrainError, ConfigError, NotFoundError, RefusedError
from blocktrain.ledger.ledger import Ledger
from blocktrain.protocol.identity import token_request_text
from blocktrain.protocol.messages import Lease, LeaseReturn, Refusal, TokenRequest
from blocktrain.protocol.status_messages import Event, Score

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        return fresh_database()
    return f"sqlite:///{tmp_path / 'ledger.db'}"


class Meddling:
    """A chunk store that does something else first, when a merge writes a chunk."""

    def __init__(self, chunks: Any, meddle: Callable[[], None]) -> None:
        self._chunks, self._meddle = chunks, meddle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chunks, name)

    def put(self, data: Any) -> str:
        self._meddle()
        return self._chunks.put(data)


@contextmanager
def meddled(service: Service, act: Callable[[], None]) -> Iterator[Service]:
    """The same run, where `act` happens once while a merge is under way."""
    with once("while a merge is under way", act) as meddle:
        chunks = Meddling(service.run.chunks, meddle)
        yield Service(dataclasses.replace(service.run, chunks=chunks))


# ban while a merge is under way


def test_a_ban_during_a_merge_stops_the_merge_not_the_coordinator(tmp_path, clock):
    with running(tmp_path, clock, swarm__quorum=2) as service:
        good, bad = join(service), join(service)
        leases = [good.lease(blocks=(0,)), bad.lease(blocks=(0,))]
        good.send(good.make(leases[0]))
        bad.send(bad.make(leases[1]))
        with meddled(service, lambda: service.operator.ban(bad.id)) as busy:
            assert busy.merger.merge_due() == 0
            clock.forward(1)
            assert busy.merger.merge_due() == 1, "the good update, soon after"


# a waiting update grows too old


def test_an_update_that_grew_too_old_while_it_waited_is_refused(tmp_path, clock):
    with pytest.raises(ConfigError):
        swarm_config(swarm__late_discount=0.0)  # the other way to a weight of 0
    with running(tmp_path, clock, swarm__most_stale=0) as service:
        first, second = join(service), join(service)
        leases = [first.lease(blocks=(0,)), second.lease(blocks=(0,))]
        first.send(first.make(leases[0]))
        with service.run.ledger.read() as tx:
            seen = tx.blocks.states()[0]
        second.send(second.make(leases[1]))  # arrives while the first is being merged
        assert service.merger.merge(seen, seen.pending)
        service.merger.merge_due()  # ValueError: a weight must be above 0
        with service.run.ledger.read() as tx:
            assert tx.updates.get(leases[1].lease).state == "refused"
            assert tx.blocks.states()[0].to_hand_out == 30


def test_with_the_default_settings_too(tmp_path, clock):
    with running(tmp_path, clock, train__steps=400) as service:
        late, quick = join(service), join(service)
        lease = late.lease(blocks=(0,))
        for _ in range(4):
            quick.work(blocks=(0,))
            service.merger.merge_due()
        quick.work(blocks=(0,))
        with service.run.ledger.read() as tx:
            seen = tx.blocks.states()[0]
        assert late.send(late.make(lease)).state == "pending"  # four behind: just allowed
        assert service.merger.merge(seen, seen.pending)
        service.merger.merge_due()


# the rounds thread dies of anything unforeseen


def test_the_rounds_go_on_after_an_unforeseen_error(tmp_path, clock):
    def fail() -> None:
        raise sql.exc.TimeoutError("QueuePool limit reached")  # no DBAPIError

    with running(tmp_path, clock) as service:
        member = join(service)
        member.work(blocks=(0,))
        with meddled(service, fail) as broken:
            broken.start()
            time.sleep(0.6)
            assert "rounds" in {thread.name for thread in threading.enumerate()}
            broken.stop()


# numbers that overflow in the merge


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates are let in unseen, as by a coordinator whose checks know less than the merge."""
    monkeypatch.setattr(UpdateVerifier, "examine", lambda *args: Finding(""))


def test_updates_that_cannot_be_merged_do_not_block_their_block_for_ever(tmp_path, clock, lenient):
    with running(tmp_path, clock, swarm__outer_rate=1.5) as service:
        bad, good = join(service), join(service)
        lease = bad.lease(blocks=(0,))
        huge = {n: np.full_like(t, 3e38) for n, t in first_weights(0).items()}
        assert bad.send(bad.signer.update(lease, huge)).state == "pending"  # all finite
        for _ in range(4):
            service.round()
            clock.forward(CLAIM_SECONDS + 1)
        with service.run.ledger.read() as tx:
            assert tx.updates.get(lease.lease).state == "refused"
        good.work(blocks=(0,))
        assert service.merger.merge_due() == 1


def test_a_block_that_cannot_be_merged_does_not_hold_up_the_others(tmp_path, clock, lenient):
    with running(tmp_path, clock, swarm__outer_rate=1.5) as service:
        bad, good = join(service), join(service)
        lease = bad.lease(blocks=(0,))
        huge = {n: np.full_like(t, 3e38) for n, t in first_weights(0).items()}
        bad.send(bad.signer.update(lease, huge))
        good.work(blocks=(1,))
        assert service.merger.merge_due() == 1
        with service.run.ledger.read() as tx:
            assert tx.blocks.states()[1].version == 1


# a read is not one moment (PostgreSQL)


def test_a_run_is_not_finished_because_a_lease_came_back_meanwhile(tmp_path, clock, url):
    with running(tmp_path, clock, url=url, train__steps=10) as service:
        member = join(service)
        member.work(blocks=(1,))
        service.round()
        lease = member.lease(blocks=(0,))
        other = Service(open_run(*open_stores(tmp_path, url), clock))

        def give_back() -> None:
            told = LeaseReturn(fence=lease.fence, reason="stopping")
            service.leases.give_back(member.caller, lease.lease, told)

        with after_statement(other.run.ledger, "FROM gaps", give_back):
            other.round()
        status = other.reports.status()
        other.run.ledger.close()
        assert status.state == "running"


def test_nobody_is_sent_home_because_a_lease_came_back_meanwhile(tmp_path, clock, url):
    if url.startswith("sqlite"):
        pytest.skip("there, a writer keeps every other writer out")
    with running(tmp_path, clock, url=url, train__steps=10) as service:
        member, second = join(service), join(service)
        member.work(blocks=(1,))
        service.round()
        lease = member.lease(blocks=(0,))
        other = Service(open_run(*open_stores(tmp_path, url), clock))
        told = LeaseReturn(fence=lease.fence, reason="stopping")
        threads = []

        def give_back() -> None:
            def call():
                return service.leases.give_back(member.caller, lease.lease, told)

            threads.append(threading.Thread(target=call))
            threads[0].start()
            threads[0].join(0.5)  # a give_back that locks the blocks waits here

        with after_statement(other.run.ledger, "FROM gaps", give_back):
            answer = Member(other, second.signer, second.joined).ask().answer
        threads[0].join()
        other.run.ledger.close()
        assert answer.kind != "finished"


# Before it has announced its own merge, and after it has read what it is about to merge.
@pytest.mark.parametrize("words", ["FROM updates", "updates.block = "])
def test_a_merge_by_another_coordinator_meanwhile_does_no_harm(tmp_path, clock, url, words):
    with running(tmp_path, clock, url=url) as service:
        join(service).work(blocks=(0,))
        other = Service(open_run(*open_stores(tmp_path, url), clock))

        def merge() -> None:
            clock.forward(CLAIM_SECONDS + 60)
            assert service.merger.merge_due() == 1

        try:
            with after_statement(other.run.ledger, words, merge):
                assert other.merger.merge_due() == 0  # RuntimeError: the rounds thread dies
        finally:
            other.run.ledger.close()
        with service.run.ledger.read() as tx:
            assert tx.blocks.states()[0].merged_batches == 10


# deadlocks (PostgreSQL)


@contextmanager
def pausing(
    ledger: Ledger, beginning: str, arrived: threading.Event, go_on: threading.Event
) -> Iterator[None]:
    """Stop once before a statement of this ledger, until told to go on."""

    def pause() -> None:
        arrived.set()
        go_on.wait(3)
        time.sleep(0.1)

    with before_statement(ledger, beginning, pause):
        yield


def both(tmp_path, clock, url, first, second, first_stops_before, second_arrives_at):
    """Run two things on two coordinators so that each holds a lock when it asks for the other."""
    with running(tmp_path, clock, url=url, swarm__quorum=2) as service:
        members = [join(service), join(service)]
        other = Service(open_run(*open_stores(tmp_path, url), clock))
        a_arrived, b_arrived = threading.Event(), threading.Event()
        prepared = first(service, members), second(other, members)

        def later():
            assert a_arrived.wait(3)
            return prepared[1]()

        try:
            with (
                pausing(service.run.ledger, first_stops_before, a_arrived, b_arrived),
                pausing(other.run.ledger, second_arrives_at, b_arrived, threading.Event()),
                ThreadPoolExecutor(2) as pool,
            ):
                results = [pool.submit(prepared[0]), pool.submit(later)]
                return [result.result() for result in results]
        finally:
            other.run.ledger.close()


def test_a_claim_and_a_publish_do_not_deadlock(tmp_path, clock):
    """claim: worker, then blocks. publish: block, then workers."""
    url = fresh_database()

    def first(service, members):
        members[0].work(blocks=(0,))
        clock.forward(60)  # a sign of life is written down again
        return lambda: members[0].ask(blocks=(1,))

    claimed, published = both(
        tmp_path,
        clock,
        url,
        first,
        lambda other, members: other.merger.merge_due,
        "SELECT blocks.block",
        "UPDATE workers",
    )
    assert isinstance(claimed.answer, Lease) and published == 1


def test_expiring_and_committing_do_not_deadlock(tmp_path, clock):
    """expire: lease, then block. commit: blocks, then lease."""
    url = fresh_database()

    def first(service, members):
        lease = members[0].lease(blocks=(0,))
        made = members[0].make(lease)
        service.updates.record_offer(members[0].caller, made.offer)
        for name, data in made.chunks.items():
            put_chunk(service, members[0].caller, lease.lease, name, data)
        clock.forward(121)
        return service.leases.expire

    def second(other, members):
        with other.run.ledger.read() as tx:
            (lease,) = tx.leases.of_worker(members[0].id, ("sending",))
        return lambda: commit(other, members[0].caller, lease.id)

    _, receipt = both(tmp_path, clock, url, first, second, "INSERT INTO gaps", "UPDATE leases")
    assert receipt.state == "pending"


def test_eight_workers_and_two_coordinators_on_postgresql(tmp_path):
    """All of it together, on real threads: nobody is turned away, nothing stands still."""
    url, clock = fresh_database(), time.time
    settings = {"swarm__most_stale": 1000, "swarm__late_discount": 1.0, "swarm__quorum": 2}
    config = swarm_config(train__steps=200, **settings)
    make_run(tmp_path, config, url=url).ledger.close()
    services = [Service(open_run(*open_stores(tmp_path, url), clock)) for _ in range(2)]
    members = [join(services[number % 2]) for number in range(8)]
    for service in services:
        service.start()

    def work(member: Member) -> int:
        done, deadline = 0, time.monotonic() + 30
        while time.monotonic() < deadline:
            answer = member.ask(steps_per_second=0.2).answer
            if isinstance(answer, Lease):
                assert member.send(member.make(answer)).state != "refused"
                done += answer.steps
            elif answer.kind == "finished":
                return done
            else:
                time.sleep(0.01)
        raise AssertionError("the run does not end")

    try:
        with ThreadPoolExecutor(len(members)) as pool:
            assert sum(pool.map(work, members)) == 400
    finally:
        for service in services:
            service.stop()
            service.run.ledger.close()


# two processes open a new SQLite ledger

OPEN_MANY = """
import sys, time
from blocktrain.ledger.ledger import Ledger
print("ready", flush=True)
start = float(sys.stdin.readline())
for number in range(40):
    time.sleep(max(0, start + 0.15 * number - time.time()))
    Ledger(f"sqlite:///{sys.argv[1]}/{number}/ledger.db").close()
"""


def test_processes_that_open_a_new_ledger_together(tmp_path):
    for number in range(40):
        (tmp_path / str(number)).mkdir()
    started = [
        subprocess.Popen(
            [sys.executable, "-c", OPEN_MANY, str(tmp_path)],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(3)
    ]
    for process in started:
        process.stdout.readline()
    start = time.time() + 0.2
    for process in started:
        process.stdin.write(f"{start}\n")
        process.stdin.flush()
    codes = [process.wait(60) for process in started]
    for process in started:
        process.stdin.close(), process.stdout.close()
    assert codes == [0, 0, 0]  # UnreachableError: database is locked


# an offer whose base is gone


def test_an_offer_on_a_version_that_is_forgotten_is_refused(tmp_path, clock):
    with running(tmp_path, clock, train__steps=400, swarm__keep_versions=1) as service:
        late, quick = join(service), join(service)
        lease = late.lease(blocks=(0,))
        made = late.make(lease)
        clock.forward(121)
        service.round()
        for _ in range(3):
            quick.work(blocks=(0,))
            service.round()
            clock.forward(1)
        service.collector.collect()
        with pytest.raises((RefusedError, NotFoundError)):
            late.send(made)  # sqlalchemy NoResultFound: a 500


# collecting after an old version went out of use


def test_collecting_after_an_old_version_went_out_of_use(tmp_path, clock):
    with running(tmp_path, clock, train__steps=400, swarm__keep_versions=1) as service:
        late, quick = join(service), join(service)
        lease = late.lease(blocks=(0,))
        made = late.make(lease)
        service.updates.record_offer(late.caller, made.offer)
        for name, data in made.chunks.items():
            put_chunk(service, late.caller, lease.lease, name, data)
        clock.forward(121)
        service.round()
        for _ in range(5):
            quick.work(blocks=(0,))
            service.round()
            clock.forward(1)
        service.collector.collect()  # forgets 1 to 4; 0 is in use
        assert commit(service, late.caller, lease.lease).state == "refused"
        service.collector.collect()  # KeyError: (0, 0)
        with service.run.ledger.read() as tx:
            assert sorted(v.version for v in tx.versions.all() if v.block == 0) == [5]


# deadlines without end


@pytest.mark.parametrize("speed", [1e-9, 1e-300, 5e-324])
def test_a_worker_that_says_it_is_endlessly_slow_does_not_hold_a_lease_for_ever(
    tmp_path, clock, speed
):
    with running(tmp_path, clock) as service:
        lease = join(service).lease(steps_per_second=speed)
        assert lease.seconds_left < 7 * 24 * 3600


def test_what_the_coordinator_answers_can_be_read(tmp_path, clock):
    with running(tmp_path, clock) as service:
        answer = join(service).ask(steps_per_second=5e-324)
        assert type(answer).model_validate_json(answer.model_dump_json()) == answer


# updates that are offered and never sent


@pytest.mark.parametrize("end", ["expired", "banned"])
def test_what_was_offered_and_never_sent_does_not_keep_its_base_for_ever(tmp_path, clock, end):
    with running(tmp_path, clock, train__steps=400, swarm__keep_versions=1) as service:
        gone, quick = join(service), join(service)
        lease = gone.lease(blocks=(0,))
        service.updates.record_offer(gone.caller, gone.make(lease).offer)
        if end == "banned":
            service.operator.ban(gone.id)
        clock.forward(121)
        service.round()
        for _ in range(10):
            quick.work(blocks=(0,))
            service.round()
            clock.forward(3600)
        clock.forward(7 * 24 * 3600)
        service.collector.collect()
        with service.run.ledger.read() as tx:
            assert 0 not in [v.version for v in tx.versions.all() if v.block == 0]


# text that PostgreSQL does not take


def test_a_reason_that_the_database_does_not_take_is_no_message():
    with pytest.raises(ValueError, match="pattern"):
        LeaseReturn(fence=1, reason="a\x00b")


# events that get lost (PostgreSQL)


def test_a_reader_of_events_misses_none(tmp_path, clock):
    url = fresh_database()
    with running(tmp_path, clock, url=url) as service:
        ledger = service.run.ledger
        held, release = threading.Event(), threading.Event()

        def slow() -> None:
            with ledger.write() as tx:
                tx.events.add(1.0, "joined", detail="slow")
                held.set()
                release.wait(1.0)

        def quick() -> None:
            with ledger.write() as tx:
                tx.events.add(2.0, "joined", detail="quick")

        seen: list[Event] = []
        threads = [threading.Thread(target=slow), threading.Thread(target=quick)]
        threads[0].start()
        held.wait()
        threads[1].start()
        threads[1].join(0.5)
        seen += service.reports.events(0, 100)
        release.set()
        for thread in threads:
            thread.join()
        seen += service.reports.events(seen[-1].number if seen else 0, 100)
        assert sorted(event.detail for event in seen) == ["quick", "slow"]


# token requests of impossible times


def test_a_token_request_of_an_impossible_time(tmp_path, clock):
    with running(tmp_path, clock) as service:
        member = join(service)
        time = 10**400
        try:
            request = TokenRequest(
                worker=member.id,
                time=time,
                signature=member.signer.key.sign(
                    token_request_text(service.run.id, member.id, time)
                ),
            )
        except ValueError:
            return
        with pytest.raises(RefusedError):
            service.members.renew(request)  # OverflowError


# the folder


def test_a_kill_between_making_the_invite_file_and_filling_it(tmp_path):
    home = CoordinatorFolder(tmp_path)
    (tmp_path / "invite-secret").touch()  # what is left of it
    assert home.invite_secret(lambda: "made") == "made"  # '' for ever


def test_a_ledger_elsewhere_is_found(tmp_path, clock):
    (tmp_path / "elsewhere").mkdir()
    make_run(tmp_path / "elsewhere", clock=clock).ledger.close()
    home = CoordinatorFolder(tmp_path / "here", f"sqlite:///{tmp_path / 'elsewhere' / 'ledger.db'}")
    home.open().ledger.close()


def test_two_that_found_a_run_at_once(tmp_path, clock, url):
    """Two coordinators with the same new database: one founds, the other finds."""
    files = []
    for block in range(2):
        from blocktrain.storage.tensor_file import encode

        files.append(tmp_path / f"{block}")
        files[-1].write_bytes(b"".join(encode(first_weights(block))))
    gate = threading.Barrier(2)
    ledger, chunks = open_stores(tmp_path, url)

    def found(_: int) -> str:
        gate.wait()
        with suppress(BlocktrainError):
            create_run(swarm_config(), make_corpus(), files, ledger, chunks, 0.0)
        return open_run(ledger, chunks, clock).id

    try:
        with ThreadPoolExecutor(2) as pool:
            assert len(set(pool.map(found, range(2)))) == 1  # IntegrityError
    finally:
        ledger.close()


# ledgers that are none


def test_a_file_that_is_no_ledger(tmp_path):
    (tmp_path / "ledger.db").write_bytes(b"not a database at all" * 100)
    with pytest.raises(BlocktrainError):
        Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")


@pytest.mark.parametrize("url", ["nonsense://x/y", "mysql://x/y"])
def test_a_database_of_another_kind(url):
    with pytest.raises(BlocktrainError):
        Ledger(url)


# what the status shows


def test_a_score_on_another_split_is_not_shown_as_the_models(tmp_path, clock):
    with running(tmp_path, clock) as service:
        judge = join(service, "evaluate")
        for split, ce in (("valid", 2.0), ("train", 0.1)):
            told = Score(block=None, versions=(0, 0), split=split, windows="w" * 8, ce=ce)
            service.reports.score(judge.caller, told)
        assert service.reports.status().ce == 2.0


def test_a_score_of_a_block_there_is_not(tmp_path, clock):
    with running(tmp_path, clock) as service:
        judge = join(service, "evaluate")
        told = Score(block=77, versions=(0, 0), split="valid", windows="w" * 8, ce=1.0)
        with pytest.raises(RefusedError):
            service.reports.score(judge.caller, told)


def test_the_reason_of_a_refusal_is_true(tmp_path, clock):
    try:
        swarm_config(swarm__late_discount=0.0)
    except ConfigError:
        return
    with running(tmp_path, clock, swarm__late_discount=0.0) as service:
        late, quick = join(service), join(service)
        lease = late.lease(blocks=(0,))
        quick.work(blocks=(0,))
        service.merger.merge_due()
        receipt = late.send(late.make(lease))
        assert receipt.reason != "the update is 1 versions behind, more than 4"


# a store that fails for a moment


def test_after_a_failed_merge_the_next_round_tries_again(tmp_path, clock):
    def fail() -> None:
        raise BlocktrainError("the store does not answer")

    with running(tmp_path, clock) as service:
        join(service).work(blocks=(0,))
        with meddled(service, fail) as broken:
            assert broken.merger.merge_due() == 0
            clock.forward(5)
            assert broken.merger.merge_due() == 1, "its own claim does not hold it up"


# Over HTTP


@pytest.fixture
def served_run(tmp_path, clock):
    with (
        running(tmp_path, clock) as service,
        served(service) as address,
        httpx.Client(base_url=address, timeout=10) as http,
    ):
        yield service, http, {"authorization": f"Bearer {join(service).joined.token}"}


def assert_refusal(answer: httpx.Response, *statuses: int) -> None:
    assert answer.status_code in statuses, (answer.status_code, answer.text)
    Refusal.model_validate_json(answer.content)


@pytest.mark.parametrize("asked", ["bytes=²-", "bytes=0-²", "bytes=" + "9" * 5000 + "-"])
def test_a_range_of_odd_digits(served_run, asked):
    """ "²".isdigit() is true and int("²") fails; so does int() of more than 4300 digits."""
    service, http, headers = served_run
    name = service.run.chunks.put(b"0123456789")
    answer = http.get(f"/v1/chunks/{name}", headers={**headers, "range": asked.encode("latin-1")})
    assert_refusal(answer, 422)


@pytest.mark.parametrize("told", ["²", "9" * 5000])
def test_an_event_number_of_odd_digits(served_run, told):
    _service, http, headers = served_run
    sent = {**headers, "last-event-id": told.encode("latin-1")}
    with http.stream("GET", "/v1/events", headers=sent) as answer:
        assert answer.status_code < 500


@pytest.mark.parametrize(
    ("query", "header"), [("?after=99999999999999999999", {}), ("", {"last-event-id": "9" * 20})]
)
def test_an_event_number_that_no_database_holds(served_run, query, header):
    """It must not be 200 and then a stream that breaks."""
    _service, http, headers = served_run
    with http.stream("GET", f"/v1/events{query}", headers={**headers, **header}) as answer:
        assert answer.status_code == 422 or next(answer.iter_lines())


def test_a_chunk_that_is_no_recipe_is_no_blob(served_run):
    service, http, headers = served_run
    name = service.run.chunks.put(b"just bytes")
    assert_refusal(http.get(f"/v1/blobs/{name}", headers=headers), 404, 422)  # 503: try for ever


def test_a_bug_of_the_coordinator_is_told_as_a_refusal(served_run, monkeypatch):
    service, http, headers = served_run

    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(service.reports, "status", fail)
    answer = http.get("/v1/status", headers=headers)
    assert_refusal(answer, 500)  # 'Internal Server Error' as plain text


def test_uploads_that_stand_still_do_not_stop_the_others(served_run):
    """Laptops that fell asleep while sending must not hold up those that are awake."""
    service, http, headers = served_run
    place = http.base_url
    sleeping = []
    for _ in range(8):
        line = socket.create_connection((place.host, place.port))
        head = f"PUT /v1/chunks/{'0' * 64}?lease=nothing0 HTTP/1.1\r\nhost: x\r\n"
        head += f"authorization: {headers['authorization']}\r\ncontent-length: 1000\r\n\r\n"
        line.sendall(head.encode() + b"x")
        sleeping.append(line)
    time.sleep(0.5)
    member = join(service)
    lease = member.lease()
    made = member.make(lease)
    service.updates.record_offer(member.caller, made.offer)
    ((name, data),) = made.chunks.items()
    try:
        answer = http.put(
            f"/v1/chunks/{name}?lease={lease.lease}",
            content=data,
            headers={"authorization": f"Bearer {member.joined.token}"},
            timeout=5,
        )
        assert answer.status_code == 204  # ReadTimeout
    finally:
        for line in sleeping:
            line.close()


def test_the_description_is_whole(served_run):
    _service, http, _headers = served_run
    text = http.get("/openapi.json").text
    document = json.loads(text)
    import re

    named = set(re.findall(r'"\$ref":\s*"#/components/schemas/(\w+)"', text))
    assert named <= set(document["components"]["schemas"])  # UpdateClaim is missing


def test_the_description_tells_what_a_refusal_looks_like(served_run):
    _service, http, _headers = served_run
    document = http.get("/openapi.json").json()
    assert "HTTPValidationError" not in json.dumps(document)  # it is a Refusal


def test_a_reason_that_the_database_does_not_take_is_no_outage(tmp_path, clock):
    url = fresh_database()
    with running(tmp_path, clock, url=url) as service, served(service) as address:
        member = join(service)
        lease = member.lease()
        answer = httpx.post(
            f"{address}/v1/lease/{lease.lease}/return",
            json={"fence": lease.fence, "reason": "a\x00b"},
            headers={"authorization": f"Bearer {member.joined.token}"},
        )
        assert answer.status_code in (200, 422), answer.text  # 503: the client tries for ever


def test_a_home_that_cannot_open_its_run_leaves_no_connection_behind(tmp_path):
    import gc

    url = fresh_database()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(BlocktrainError):
            CoordinatorFolder(tmp_path, db=url).open()
        gc.collect()
    assert not [w for w in caught if issubclass(w.category, ResourceWarning)]
