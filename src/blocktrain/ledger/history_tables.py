"""What has happened in a run, read in parts: merged updates, scores and events; and whether the
operator has paused the run."""

from collections.abc import Collection
from typing import NamedTuple

from sqlalchemy import bindparam, select, update

from blocktrain.ledger.schema import (
    ScoreRow,
    Statements,
    checks,
    events,
    in_state,
    runs,
    scores,
    the_block,
    updates,
)
from blocktrain.protocol.page_messages import Control
from blocktrain.protocol.status_messages import Event


class MergedUpdate(NamedTuple):
    """`check`: JSON of the result of its first score by a validator."""

    worker: str
    steps: int
    base_version: int
    version: int
    committed: float
    loss: float | None
    check: str | None


class HistoryTable(Statements):
    CONTROL = select(runs.c.control)

    def control(self) -> Control:
        control: Control = self.connection.execute(self.CONTROL).scalar_one()
        return control

    def set_control(self, control: Control) -> bool:
        """Returns False if this was the state before."""
        changed = update(runs).where(runs.c.control != control).values(control=control)
        return bool(self.write(changed))

    FIRST_SCORE = (
        select(checks.c.result)
        .where(
            checks.c.lease == updates.c.lease, checks.c.method == "score", checks.c.state == "done"
        )
        .order_by(checks.c.created)
        .limit(1)
        .scalar_subquery()
    )
    MERGED = (
        select(
            *updates.c["worker", "steps", "base_version", "merged_into", "committed", "loss"],
            FIRST_SCORE,
        )
        .where(
            in_state(updates, "merged"),
            updates.c.block == the_block,
            updates.c.merged_into > bindparam("after"),
            updates.c.merged_into <= bindparam("to"),
        )
        .order_by(updates.c.merged_into, updates.c.lease)
    )

    def merged(self, block: int, after: int, to: int) -> list[MergedUpdate]:
        """The updates of versions `after` + 1 to `to` of a block."""
        versions = {"the_block": block, "after": after, "to": to}
        rows = self.connection.execute(self.MERGED, versions)
        return [MergedUpdate._make(row) for row in rows]

    SCORES = (
        select(scores)
        .where(scores.c.number > bindparam("after"), scores.c.split == "valid")
        .order_by(scores.c.number)
        .limit(bindparam("most"))
    )

    def scores_after(self, number: int, most: int) -> list[ScoreRow]:
        return self.rows(ScoreRow, self.SCORES, after=number, most=most)

    def events_between(
        self,
        after: int,
        before: int,
        most: int,
        kinds: Collection[str] = (),
        worker: str | None = None,
        block: int | None = None,
    ) -> list[Event]:
        """Up to `most` events with numbers between these, newest first."""
        found = select(events).where(events.c.number > after, events.c.number < before)
        if kinds:
            found = found.where(events.c.kind.in_(kinds))
        if worker is not None:
            found = found.where(events.c.worker == worker)
        if block is not None:
            found = found.where(events.c.block == block)
        return self.rows(Event, found.order_by(events.c.number.desc()).limit(most))
