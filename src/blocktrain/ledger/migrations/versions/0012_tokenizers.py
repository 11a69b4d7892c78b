"""The tokenizer of a run."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.add_column("runs", sa.Column("tokenizer", sa.Text()))
