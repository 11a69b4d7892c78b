"""The statements that every lease and every update needs, built once: building one takes four
times as long as running it. Parameters are named after the ledger's own arguments."""

from collections.abc import Sequence

from sqlalchemy import (
    BindParameter,
    Column,
    ColumnElement,
    Insert,
    Table,
    and_,
    bindparam,
    func,
    insert,
    literal_column,
    or_,
    select,
    update,
)
from sqlalchemy.dialects import postgresql

from blocktrain.ledger.schema import (
    HELD,
    blocks,
    events,
    gaps,
    leases,
    traffic,
    updates,
    versions,
    workers,
)

COUNTS = [column for column in traffic.c if not column.primary_key]

# SQLAlchemy keeps a column's own name for its new value; the row that is meant has a longer one.
_the_block: BindParameter[int] = bindparam("of_block")
_the_lease: BindParameter[str] = bindparam("of_lease")
_the_version: BindParameter[int] = bindparam("of_version")
_the_worker: BindParameter[str] = bindparam("of_worker")


def in_state(table: Table, *states: str) -> ColumnElement[bool]:
    """With the words themselves in the statement: see the indexes of `schema`."""
    return or_(*(table.c.state == literal_column(f"'{state}'") for state in states))


def _added_up(table: Table, counts: Sequence[Column[int]]) -> Insert:
    """A row, or more of its counts where there is one. SQLite has the same words for it."""
    added = postgresql.insert(table)
    return added.on_conflict_do_update(
        index_elements=list(table.primary_key),
        set_={count.name: count + added.excluded[count.name] for count in counts},
    )


WORKER = select(workers).where(workers.c.id == _the_worker)
TOUCH_WORKER = update(workers).where(workers.c.id == _the_worker).values(seen=bindparam("now"))

LOCK_BLOCKS = select(blocks.c.block).order_by(blocks.c.block).with_for_update()
BLOCKS = select(blocks).order_by(blocks.c.block)
BLOCK = select(blocks).where(blocks.c.block == _the_block)
RETURNED = select(gaps.c.block, func.sum(gaps.c.steps).label("steps")).group_by(gaps.c.block)
FIRST_GAP = select(gaps).where(gaps.c.block == _the_block).order_by(gaps.c.first_batch).limit(1)
HAND_OUT = (
    update(blocks)
    .where(blocks.c.block == _the_block)
    .values(next_batch=bindparam("end"), fence=bindparam("token"))
)
COUNT_MET = (
    update(blocks).where(blocks.c.block == _the_block).values(leases_met=blocks.c.leases_met + 1)
)
COUNT_MISSED = (
    update(blocks)
    .where(blocks.c.block == _the_block)
    .values(leases_missed=blocks.c.leases_missed + 1)
)

LEASE = select(leases).where(leases.c.id == _the_lease)
ADD_LEASE = insert(leases)
HELD_LEASES = select(leases).where(in_state(leases, *HELD))
OVERDUE = select(leases).where(in_state(leases, *HELD), leases.c.deadline < bindparam("now"))
TRAINED_LEASE = (
    update(leases)
    .where(leases.c.id == _the_lease, leases.c.worker == _the_worker, in_state(leases, "open"))
    .values(state="sending")
)
SILENT = (
    select(leases)
    .join(workers, workers.c.id == leases.c.worker)
    .where(in_state(leases, *HELD), workers.c.seen + bindparam("silence") < bindparam("now"))
)
MOVE_DEADLINE = update(leases).where(leases.c.id == _the_lease).values(deadline=bindparam("until"))
EXPECT_LEASE = update(leases).where(leases.c.id == _the_lease).values(expected=bindparam("at"))
MOVE_LEASE = (
    update(leases)
    .where(leases.c.id == _the_lease, in_state(leases, *HELD))
    .values(state=bindparam("to"))
)

UPDATE = select(updates).where(updates.c.lease == _the_lease)
ADD_UPDATE = insert(updates)
PENDING = select(
    updates.c.lease,
    updates.c.worker,
    updates.c.block,
    updates.c.base_version,
    updates.c.steps,
    updates.c.committed,
    updates.c.continues,
).where(in_state(updates, "pending"))
WAITING = select(updates).where(updates.c.block == _the_block, in_state(updates, "pending"))
ACCEPT_UPDATE = (
    update(updates)
    .where(updates.c.lease == _the_lease, in_state(updates, "offered"))
    .values(
        state="pending",
        base_version=bindparam("base"),
        weight=bindparam("share"),
        committed=bindparam("now"),
    )
)
REBASE_UPDATE = (
    update(updates).where(updates.c.lease == _the_lease).values(base_version=bindparam("base"))
)

VERSION = select(versions).where(versions.c.block == _the_block, versions.c.version == _the_version)
NEWEST_VERSION = (
    select(versions)
    .where(versions.c.block == _the_block)
    .order_by(versions.c.version.desc())
    .limit(1)
)
NEWEST_VERSIONS = select(versions).join(
    blocks, and_(blocks.c.block == versions.c.block, blocks.c.version == versions.c.version)
)

# See `storage.standing`.
STANDING = (BLOCKS, NEWEST_VERSIONS, RETURNED, HELD_LEASES, PENDING)

COUNT_TRAFFIC = _added_up(traffic, COUNTS)

ADD_EVENT = insert(events)
