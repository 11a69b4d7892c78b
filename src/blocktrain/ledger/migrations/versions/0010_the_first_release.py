"""The schema of release 0.1, from which later migrations start.

A new database gets the tables of `schema.py` and the newest revision instead.
"""

revision = "0010"
down_revision = None


def upgrade() -> None:
    """Nothing to do: a database of this revision has the tables."""
