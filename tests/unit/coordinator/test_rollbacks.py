"""A block whose loss on hidden text jumps is rolled back, by the coordinator itself."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.coordinator import Member, SetClock, join, running, weights_now

from blocktrain.coordinator.service import Service
from blocktrain.swarm.rollback import FEWEST, PAUSE_SECONDS

pytestmark = pytest.mark.usefixtures("workers_without_states_are_trusted")

SETTINGS = {"train__steps": 2000, "swarm__keep_updates": 16, "swarm__first_steps": 10}


@pytest.fixture
def service(tmp_path: Path, clock: SetClock) -> Iterator[Service]:
    with running(tmp_path, clock, requires_checks=True, **SETTINGS) as service:
        yield service


def make_version(service: Service, worker: Member, validator: Member, loss: float) -> None:
    """`loss`: what the validator measures of the version before."""
    worker.work(blocks=(0,))
    validator.score(before=loss)
    service.checks.reported()
    service.round()


def version(service: Service) -> int:
    with service.run.ledger.read() as tx:
        return tx.blocks.get(0).version


def rolled_back(service: Service) -> list[str]:
    return [each.detail for each in service.reports.events(0, 1000) if each.kind == "unmerged"]


def test_a_block_is_rolled_back_once_and_nobody_is_punished(service: Service, clock: SetClock):
    worker, validator = join(service), join(service, "validate")
    for number in range(FEWEST + 2):
        make_version(service, worker, validator, 2.5 - 0.01 * number)
    assert rolled_back(service) == []
    good, before = version(service) - 1, weights_now(service.run, 0)
    make_version(service, worker, validator, 7.0)  # of the newest version, `good` + 1
    (detail,) = rolled_back(service)
    assert f"to 7.000 after version {good}" in detail and "without 1 update (10 steps)" in detail
    (status,) = [each for each in service.reports.status().workers if each.worker == worker.id]
    assert status.trust and (status.trust.refused, status.trust.suspicion) == (0, 0)
    with service.run.ledger.read() as tx:
        state = tx.blocks.states()[0]
    assert (state.version, state.merged_batches, state.returned_batches) == (
        good + 3, 10 * good + 10, 10,
    )  # fmt: skip
    change = before["body.weight"] - weights_now(service.run, 0)["body.weight"]
    # An update of 1 was removed; another one was waiting, and counted half.
    np.testing.assert_allclose(change, 0.5, rtol=1e-5)
    # It jumps again, and again, but a block rests.
    for _ in range(3):
        make_version(service, worker, validator, 7.0)
    assert len(rolled_back(service)) == 1
    clock.forward(PAUSE_SECONDS + 1)
    validator.request_check()
    make_version(service, worker, validator, 7.0)
    assert len(rolled_back(service)) == 2


def test_a_run_without_checks_or_without_kept_updates_is_not_rolled_back(
    tmp_path: Path, clock: SetClock
):
    several = {**SETTINGS, "swarm__keep_updates": 0}
    with running(tmp_path, clock, requires_checks=True, **several) as service:
        worker, validator = join(service), join(service, "validate")
        for number in range(FEWEST + 2):
            make_version(service, worker, validator, 2.5 - 0.01 * number)
        make_version(service, worker, validator, 7.0)
        assert rolled_back(service) == []
