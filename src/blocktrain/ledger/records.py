"""What is written down of a run and decides nothing: bytes moved, events, scores; inside of one
transaction."""

import json
from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, func, insert, select

from blocktrain.ledger import driver, statements
from blocktrain.ledger.prepared import Found
from blocktrain.ledger.schema import events, scores, traffic
from blocktrain.ledger.session import StatementSession
from blocktrain.protocol.messages import Event, Moved


class Records:
    def __init__(self, session: StatementSession) -> None:
        self._session = session

    def count_traffic(self, worker: str, block: int, moved: Moved) -> None:
        """Add to what was moved between a worker and the run."""
        self._session.tell(
            statements.COUNT_TRAFFIC, worker=worker, block=block, **moved.model_dump()
        )

    def traffic(self) -> dict[tuple[str, int], Moved]:
        """By worker and block."""
        return {
            (row.worker, row.block): Moved(**{c.name: row._mapping[c] for c in statements.COUNTS})
            for row in self._session.run(select(traffic))
        }

    def add_event(
        self,
        now: float,
        kind: str,
        worker: str | None = None,
        block: int | None = None,
        detail: str = "",
    ) -> None:
        if not self._session.alone:
            lock_events(self._session.connection)
        told = {"time": now, "kind": kind, "worker": worker, "block": block}
        self._session.tell(statements.ADD_EVENT, **told, detail=detail[:500])

    def events(self, after: int, most: int) -> list[Event]:
        chosen = select(events).where(events.c.number > after).order_by(events.c.number)
        return [Event(**row._mapping) for row in self._session.run(chosen.limit(most))]

    def last_event(self) -> int:
        return int(self._session.run(select(func.max(events.c.number))).scalar() or 0)

    def add_score(self, *, versions: Collection[int], **values: Any) -> None:
        self._session.run(insert(scores).values(**values, versions=json.dumps(list(versions))))

    def newest_score(self, block: int | None, split: str = "valid") -> Found | None:
        same = scores.c.block.is_(None) if block is None else scores.c.block == block
        chosen = select(scores).where(same, scores.c.split == split)
        return self._session.run(chosen.order_by(scores.c.number.desc()).limit(1)).first()


def lock_events(connection: Connection) -> None:
    """Numbers become visible in their order, so that a reader who goes on from one misses none;
    the number of the lock means nothing."""
    driver.tell(connection, "SELECT pg_advisory_xact_lock(726565)")
