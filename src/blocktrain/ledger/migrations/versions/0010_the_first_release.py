"""The schema of release 0.1, from which later migrations start.

A new database gets the tables of `schema.py` and the number of the newest migration instead.
"""

revision = "0010"
down_revision = None


def upgrade() -> None:
    """Nothing to do: a database with this number has the tables."""
