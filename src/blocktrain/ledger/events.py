"""What is recorded about a run and decides nothing: events, scores, bytes moved."""

import json
from collections.abc import Collection

from sqlalchemy import Connection, Insert, func, insert, select
from sqlalchemy.dialects import postgresql, sqlite

from blocktrain.ledger.rows import ScoreRow, Statements
from blocktrain.ledger.schema import events, scores, traffic
from blocktrain.protocol.messages import Event, Moved

EVENT_LOCK = 726565  # the number names the lock in PostgreSQL and has no other meaning


def _adding_to(row: postgresql.Insert | sqlite.Insert) -> Insert:
    """Insert a row of traffic, or add its counts to those of the row that is there."""
    sums = {count: traffic.c[count] + row.excluded[count] for count in Moved.model_fields}
    return row.on_conflict_do_update(index_elements=list(traffic.primary_key), set_=sums)


COUNT_TRAFFIC = {  # by dialect
    "postgresql": _adding_to(postgresql.insert(traffic)),
    "sqlite": _adding_to(sqlite.insert(traffic)),
}


class Events(Statements):
    def __init__(self, connection: Connection, *, locked: bool) -> None:
        """`locked`: no other transaction adds an event until this one ends."""
        super().__init__(connection)
        self._locked = locked

    LOCK = select(func.pg_advisory_xact_lock(EVENT_LOCK))
    ADD = insert(events)

    def lock(self) -> None:
        """Events become visible in the order of their numbers, so that a reader that continues
        from the last number it saw misses none."""
        if not self._locked:
            self.connection.execute(self.LOCK)
            self._locked = True

    def add(
        self,
        now: float,
        kind: str,
        worker: str | None = None,
        block: int | None = None,
        detail: str = "",
    ) -> None:
        self.lock()
        self.write(self.ADD, time=now, kind=kind, worker=worker, block=block, detail=detail[:500])

    def after(self, number: int, most: int) -> list[Event]:
        """The next events after this number, oldest first."""
        later = select(events).where(events.c.number > number)
        return self.rows(Event, later.order_by(events.c.number).limit(most))

    def last_number(self) -> int:
        """0 if there are no events."""
        return self.connection.execute(select(func.max(events.c.number))).scalar() or 0

    def add_score(
        self,
        *,
        block: int | None,
        versions: Collection[int],
        split: str,
        windows: str,
        ce: float,
        worker: str,
        time: float,
    ) -> None:
        self.write(
            insert(scores),
            block=block,
            versions=json.dumps(list(versions)),
            split=split,
            windows=windows,
            ce=ce,
            worker=worker,
            time=time,
        )

    def newest_score(self, block: int | None, split: str = "valid") -> ScoreRow | None:
        """Of a block, or of the assembled model if `block` is None."""
        same = select(scores).where(scores.c.block.is_not_distinct_from(block))
        newest = same.where(scores.c.split == split).order_by(scores.c.number.desc())
        return self.first(ScoreRow, newest.limit(1))

    def count_traffic(self, worker: str, block: int, moved: Moved) -> None:
        """Add to the bytes that were moved between a worker and the run."""
        statement = COUNT_TRAFFIC[self.connection.dialect.name]
        self.write(statement, worker=worker, block=block, **moved.model_dump())

    def traffic(self) -> dict[tuple[str, int], Moved]:
        """Bytes moved, by worker and block."""
        rows = self.connection.execute(select(traffic)).mappings()
        return {
            (row["worker"], row["block"]): Moved(**{key: row[key] for key in Moved.model_fields})
            for row in rows
        }
