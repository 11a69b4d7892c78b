"""Checks of updates, what they found, and what they say about workers."""

from typing import NamedTuple

from sqlalchemy import Insert, bindparam, delete, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from blocktrain.ledger.schema import (
    DUE,
    CheckRow,
    Statements,
    UpdateRow,
    checks,
    in_state,
    leases,
    runs,
    the_block,
    the_check,
    the_lease,
    the_worker,
    trained,
    updates,
)


def _adding_to(row: postgresql.Insert | sqlite.Insert) -> Insert:
    """Insert a row of `trained`, or add its steps to the existing row."""
    steps = trained.c.steps + row.excluded.steps
    return row.on_conflict_do_update(
        index_elements=list(trained.primary_key), set_={"steps": steps}
    )


ADD_TRAINED = {  # by dialect
    "postgresql": _adding_to(postgresql.insert(trained)),
    "sqlite": _adding_to(sqlite.insert(trained)),
}


class ScoredUpdate(NamedTuple):
    """An update whose gain was measured, and its place in the learning-rate schedule."""

    worker: str
    block: int
    steps: int
    gain: float
    own_gain: float
    state: str
    schedule_start: int
    schedule_stride: int


class VersionScore(NamedTuple):
    """A validator's result, and the version of the block that it measured."""

    version: int
    validator: str
    result: str


class CheckTable(Statements):
    ADD = insert(checks)
    GET = select(checks).where(checks.c.id == the_check)
    OF_LEASE = select(checks).where(checks.c.lease == the_lease).order_by(checks.c.created)
    ALL_DUE = select(checks).where(in_state(checks, *DUE)).order_by(checks.c.created, checks.c.id)

    def add(self, row: CheckRow) -> None:
        self.write(self.ADD, **vars(row))

    def get(self, check: str) -> CheckRow | None:
        return self.first(CheckRow, self.GET, the_check=check)

    def of_update(self, lease: str) -> list[CheckRow]:
        """An update's checks, oldest first."""
        return self.rows(CheckRow, self.OF_LEASE, the_lease=lease)

    def due(self) -> list[CheckRow]:
        """Checks without a result, oldest first."""
        return self.rows(CheckRow, self.ALL_DUE)

    SET = update(checks).where(checks.c.id == the_check)
    ASSIGN = SET.where(in_state(checks, *DUE)).values(
        state="assigned",
        validator=the_worker,
        version=bindparam("against"),
        deadline=bindparam("until"),
    )

    def assign(self, check: str, validator: str, version: int, deadline: float) -> None:
        self.write(
            self.ASSIGN, the_check=check, the_worker=validator, against=version, until=deadline
        )

    OVERDUE = update(checks).where(
        in_state(checks, "assigned"), checks.c.deadline < bindparam("now")
    )
    RELEASE_OVERDUE = OVERDUE.values(state="waiting", validator=None, deadline=None)

    def release_overdue(self, now: float) -> int:
        """Take checks back from validators that did not answer in time. Returns how many."""
        return self.write(self.RELEASE_OVERDUE, now=now)

    FINISH = SET.where(in_state(checks, "assigned"), checks.c.validator == the_worker).values(
        state="done", seconds=bindparam("spent"), result=bindparam("found")
    )

    def finish(self, check: str, validator: str, seconds: float, result: str) -> bool:
        """Record a result; False if the check is no longer assigned to this validator."""
        return bool(
            self.write(
                self.FINISH, the_check=check, the_worker=validator, spent=seconds, found=result
            )
        )

    DROP = delete(checks).where(checks.c.id == the_check, in_state(checks, *DUE))

    def drop(self, check: str) -> None:
        """Remove a check that has no result and needs none."""
        self.write(self.DROP, the_check=check)

    # Replays, which need files of the update's worker

    HIDDEN = select(checks).where(in_state(checks, "hidden")).order_by(checks.c.created)
    HIDDEN_OF = HIDDEN.join(leases, leases.c.id == checks.c.lease).where(
        leases.c.worker == the_worker
    )

    def hidden(self) -> list[CheckRow]:
        """Replays whose files have not arrived, oldest first."""
        return self.rows(CheckRow, self.HIDDEN)

    def hidden_of(self, worker: str) -> CheckRow | None:
        """The oldest replay that waits for this worker's files."""
        return self.first(CheckRow, self.HIDDEN_OF.limit(1), the_worker=worker)

    ASK = SET.where(in_state(checks, "hidden")).values(deadline=bindparam("until"))

    def ask_for_files(self, check: str, deadline: float) -> None:
        """Record until when the files must arrive."""
        self.write(self.ASK, the_check=check, until=deadline)

    REVEALED = SET.where(in_state(checks, "hidden")).values(
        state="waiting", deadline=None, created=bindparam("now")
    )

    def files_arrived(self, check: str, now: float) -> bool:
        """Let validators have a replay; False if its time is over."""
        return bool(self.write(self.REVEALED, the_check=check, now=now))

    REPLAYED = (
        select(updates)
        .join(checks, checks.c.lease == updates.c.lease)
        .where(in_state(checks, *DUE), checks.c.method == "replay")
    )

    def being_replayed(self) -> list[UpdateRow]:
        """Updates with a replay that has no result yet."""
        return self.rows(UpdateRow, self.REPLAYED)

    # What the checks of updates have found

    def count_trained(self, worker: str, block: int, steps: int) -> None:
        """Count batches of a block that a worker has trained."""
        statement = ADD_TRAINED[self.connection.dialect.name]
        self.write(statement, worker=worker, block=block, steps=steps)

    REQUIRED = select(runs.c.requires_checks)

    def required(self) -> bool:
        """Whether updates are merged only once they are checked."""
        return bool(self.connection.execute(self.REQUIRED).scalar())

    def require(self, required: bool) -> None:
        self.write(update(runs).values(requires_checks=required))

    UNCHECKED = select(updates).where(in_state(updates, "pending"), ~updates.c.checked)

    def unchecked(self) -> list[UpdateRow]:
        """Pending updates that are not checked yet."""
        return self.rows(UpdateRow, self.UNCHECKED)

    PASS = (
        update(updates)
        .where(updates.c.lease == the_lease, in_state(updates, "pending"))
        .values(checked=True)
    )

    def pass_update(self, lease: str) -> bool:
        """Let a pending update be merged; False if it is no longer pending."""
        return bool(self.write(self.PASS, the_lease=lease))

    NEWEST_SCORES = (
        select(checks.c.version, checks.c.validator, checks.c.result)
        .join(updates, updates.c.lease == checks.c.lease)
        .where(
            updates.c.gain.is_not(None),
            updates.c.block == the_block,
            checks.c.method == "score",
            checks.c.result.is_not(None),
        )
        .order_by(updates.c.committed.desc())
        .limit(bindparam("most"))
    )

    def newest_scores(self, block: int, most: int) -> list[VersionScore]:
        """What validators found when they scored the newest updates of a block."""
        rows = self.connection.execute(self.NEWEST_SCORES, {"the_block": block, "most": most})
        return [VersionScore(*row) for row in rows]

    SET_GAIN = (
        update(updates)
        .where(updates.c.lease == the_lease)
        .values(gain=bindparam("hidden"), own_gain=bindparam("own"))
    )

    def set_gain(self, lease: str, gain: float, own_gain: float) -> None:
        self.write(self.SET_GAIN, the_lease=lease, hidden=gain, own=own_gain)

    NEWEST_SCORED = (
        select(
            *updates.c["worker", "block", "steps", "gain", "own_gain", "state"],
            *leases.c["schedule_start", "schedule_stride"],
        )
        .join(leases, leases.c.id == updates.c.lease)
        .where(updates.c.gain.is_not(None))
        .order_by(updates.c.committed.desc())
        .limit(bindparam("most"))
    )
    NEWEST_OF_BLOCK = NEWEST_SCORED.where(updates.c.block == the_block)

    def newest_scored(self, most: int, block: int | None = None) -> list[ScoredUpdate]:
        """The newest updates of a block, or of all blocks, whose gain was measured."""
        if block is None:
            rows = self.connection.execute(self.NEWEST_SCORED, {"most": most})
        else:
            rows = self.connection.execute(self.NEWEST_OF_BLOCK, {"most": most, "the_block": block})
        return [ScoredUpdate(*row) for row in rows]
