"""What a worker shows of the whole run."""

import time
from contextlib import closing
from pathlib import Path

import pytest
from tests.support.coordinator import SetClock, join, running, served

from blocktrain.cli.run_progress import RunProgress
from blocktrain.cli.worker_command import _event_display
from blocktrain.protocol.identity import WorkerKey
from blocktrain.protocol.invite import Invite
from blocktrain.worker.client import Client
from blocktrain.worker.machine import WorkerEvent


def test_a_worker_shows_how_far_the_run_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    clock = SetClock()
    with running(tmp_path, clock) as service, served(service) as address:
        join(service).work()
        clock.forward(60.0)
        service.round()
        secret = service.operator.invite("train", 1, 1e6)
        invite = Invite((address,), secret, None, service.run.id)
        with (
            closing(Client(invite, WorkerKey.create())) as client,
            RunProgress(client, first_seconds=0.01) as progress,
        ):
            ends = time.monotonic() + 10.0
            while not progress.text():
                assert time.monotonic() < ends
                time.sleep(0.01)
        with _event_display(as_json=False, about_run=progress.text) as show:
            show(WorkerEvent("waiting", "nothing to do"))
    first, second = capsys.readouterr().out.splitlines()
    assert first == "nothing to do"
    assert second.startswith("run: 12.5% done, about 7 min left, 2.67 tokens/s, ")
