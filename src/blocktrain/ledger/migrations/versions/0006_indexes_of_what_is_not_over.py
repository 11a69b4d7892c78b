"""What is not over is found by its state, and the rest is in no index, however much it is"""

from alembic import op
from sqlalchemy import text

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

HELD = "state = 'open' OR state = 'sending'"
LIVE = "state = 'offered' OR state = 'pending'"
EXPIRED = "state = 'expired'"


def upgrade() -> None:
    _drop()
    op.drop_index("updates_by_worker", table_name="updates")
    _create("leases_by_worker", "leases", ["worker", "state"], HELD)
    _create("leases_by_deadline", "leases", ["state", "deadline"], HELD)
    _create("leases_expired", "leases", ["worker", "deadline"], EXPIRED)
    _create("updates_by_state", "updates", ["state", "worker"], LIVE)


def downgrade() -> None:
    _drop()
    op.drop_index("leases_expired", table_name="leases")
    op.create_index("leases_by_worker", "leases", ["worker", "state"])
    op.create_index("leases_by_deadline", "leases", ["state", "deadline"])
    op.create_index("updates_by_state", "updates", ["state"])
    op.create_index("updates_by_worker", "updates", ["worker", "state"])


def _drop() -> None:
    op.drop_index("leases_by_worker", table_name="leases")
    op.drop_index("leases_by_deadline", table_name="leases")
    op.drop_index("updates_by_state", table_name="updates")


def _create(name: str, table: str, columns: list[str], rows: str) -> None:
    op.create_index(name, table, columns, sqlite_where=text(rows), postgresql_where=text(rows))
