"""Every ledger that there is: SQLite's, and a real PostgreSQL's."""

from pathlib import Path

import pytest
from tests.support.postgres import fresh_database


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        return fresh_database()
    return f"sqlite:///{tmp_path / 'ledger.db'}"
