"""A coordinator of a new run, whose clock stands still until it is moved."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.coordinator import SetClock, running

from blocktrain.coordinator.service import Service
from blocktrain.swarm import reputation


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def service(tmp_path: Path, clock: SetClock) -> Iterator[Service]:
    with running(tmp_path, clock) as service:
        yield service


@pytest.fixture
def workers_without_states_are_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests whose workers name no states to train their leases again from. test_replays.py is
    about those that are not trusted."""
    monkeypatch.setattr(reputation, "UNEXPLAINED", 0.0)
