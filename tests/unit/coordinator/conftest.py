"""A coordinator of a new run, whose clock stands still until it is moved."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.coordinator import SetClock, running

from blocktrain.coordinator.service import Service


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def service(tmp_path: Path, clock: SetClock) -> Iterator[Service]:
    with running(tmp_path, clock) as service:
        yield service
