"""Nothing a coordinator does takes longer because much has happened before."""

import asyncio
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sql
from tests.support.coordinator import Made, Member, SetClock, join, running

from blocktrain.codec.dense import Bf16
from blocktrain.codec.frames import encode
from blocktrain.coordinator.service import Service
from blocktrain.protocol.check_messages import Check
from blocktrain.protocol.messages import Lease, LeaseProgress, LeaseReturn, Receipt
from blocktrain.protocol.status_messages import Score

NUMBERS = 24  # of a block
GROWING = ("leases", "updates", "checks", "events")  # tables with a row for all that ever was
# Indexes of what is not over, and one that is read from its newest end to a limit.
SMALL = (
    "leases_by_worker", "leases_by_deadline", "leases_expired", "updates_by_state", "checks_due",
    "updates_scored",
)  # fmt: skip


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture(params=[False, True], ids=["unchecked", "checked"])
def service(tmp_path: Path, clock: SetClock, request: pytest.FixtureRequest) -> Iterator[Service]:
    checks = {"requires_checks": request.param}
    with running(tmp_path, clock, swarm__codec="bf16", **checks) as service:
        yield service


@pytest.fixture
def statements(service: Service) -> set[str]:
    """Every statement from here on, without its parameters: the planner does not know them."""
    statements: set[str] = set()

    @sql.event.listens_for(service.run.ledger.engine, "before_cursor_execute")
    def executed(connection: Any, cursor: Any, text: str, *rest: Any) -> None:
        statements.add(text)

    return statements


def made(member: Member, lease: Lease) -> Made:
    coder = Bf16()
    assert coder is not None
    data = b"".join(encode(np.ones(NUMBERS, np.float32), coder))
    return member.signer.update_of_bytes(lease, data, codec="bf16")


def send_whole(member: Member, update: Made) -> Receipt:
    """As a small one is sent: offer and bytes in one request."""
    service = member.service
    data = memoryview(b"".join(update.chunks.values()))

    async def receive() -> Receipt:
        service.executor.start()
        try:
            return await service.updates.receive_whole(member.caller, update.offer, data)
        finally:
            service.executor.stop()

    return asyncio.run(receive())


def scans(database: Path, statements: set[str]) -> set[str]:
    """Statements that read all of a table that grows, by SQLite's account."""
    connection = sqlite3.connect(database)
    found = set()
    for statement in statements:
        if statement.split()[0] not in ("SELECT", "UPDATE", "DELETE", "INSERT"):
            continue
        nothing = [None] * statement.count("?")
        plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", nothing)]
        read = [step.split() for step in plan if step.startswith("SCAN ")]
        if any(words[1] in GROWING and words[-1] not in SMALL for words in read):
            found.add(statement)
    return found


def test_no_table_that_grows_is_read_as_a_whole(
    service: Service, statements: set[str], tmp_path: Path, clock: SetClock
):
    ann, bob, judge = join(service), join(service), join(service, "evaluate")
    validator = join(service, "validate")

    def make_round() -> None:
        service.round()
        while isinstance(validator.request_check(), Check):
            validator.score()
        service.round()

    first = ann.lease()
    second = ann.lease(held_block=first.block, trained=first.lease, steps_per_second=1.0)
    assert second.continues == first.lease
    assert ann.send(made(ann, first)).state == "pending"
    make_round()
    assert send_whole(ann, made(ann, second)).state == "pending"
    make_round()
    held = bob.lease()
    service.leases.progress(bob.caller, held.lease, LeaseProgress(fence=held.fence, steps_done=1))
    service.leases.give_back(bob.caller, held.lease, LeaseReturn(fence=held.fence, reason="enough"))
    bob.lease()
    clock.forward(1e6)
    make_round()  # takes it back
    bob.lease()
    service.operator.ban(bob.id)
    score = Score(block=0, versions=(1,), split="valid", windows="windows0", ce=1.0)
    service.reports.score(judge.caller, score)
    service.collector.collect()
    service.reports.status()
    service.reports.events(service.reports.last_event() - 1, 10)
    assert len(statements) > 40
    assert scans(tmp_path / "ledger.db", statements) == set()
