"""Webhooks: what real web services get, and when they do not answer."""

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.support.coordinator import SetClock, join, running
from tests.support.web import serving

from blocktrain.cli.coordinator_commands import EventLog
from blocktrain.coordinator.webhooks import Webhooks


class Hook:
    """A service that answers with these statuses in turn, then always with the last."""

    def __init__(self, *statuses: int) -> None:
        self.statuses, self.bodies = list(statuses), list[dict[str, Any]]()
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                size = int(self.headers["content-length"])
                hook.bodies.append(json.loads(self.rfile.read(size)))
                status = hook.statuses.pop(0) if len(hook.statuses) > 1 else hook.statuses[0]
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *details: object) -> None:
                """Prints nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook/secret"


@contextmanager
def hook(*statuses: int) -> Iterator[Hook]:
    made = Hook(*statuses)
    with serving(made.server):
        yield made


def lose_a_lease(folder: Path, done: Callable[[], bool], *urls: str) -> None:
    """A worker joins and vanishes; `done` tells when all is said."""
    clock = SetClock()
    with (
        running(folder, clock) as service,
        Webhooks("run1", urls, first_pause=0.01) as hooks,
        EventLog(service, hooks.notify),
    ):
        join(service, name="ann").lease()
        clock.forward(1000.0)
        service.round()
        ends = time.monotonic() + 10.0
        while not done():
            assert time.monotonic() < ends
            time.sleep(0.01)


def test_a_service_hears_of_a_lost_lease_and_of_nothing_that_is_routine(tmp_path: Path):
    with hook(200) as first, hook(200) as second:
        lose_a_lease(tmp_path, lambda: bool(second.bodies), first.url, second.url)
    assert first.bodies == second.bodies
    (body,) = first.bodies
    assert body["run"] == "run1" and body["event"]["kind"] == "lost"
    assert body["text"].startswith("lost a lease of block 0 by worker ann: 10 steps")


def test_a_service_that_fails_is_asked_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING, "blocktrain")
    with hook(500, 429, 200) as flaky:
        lose_a_lease(tmp_path, lambda: len(flaky.bodies) == 3, flaky.url)
    assert len(flaky.bodies) == 3 and "cannot notify" not in caplog.text


def test_a_service_that_refuses_is_named_without_its_secret(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING, "blocktrain")
    with hook(404) as gone:
        lose_a_lease(tmp_path, lambda: "cannot notify" in caplog.text, gone.url)
    assert len(gone.bodies) == 1
    assert "cannot notify the webhook at 127.0.0.1: it answered 404" in caplog.text
    assert "secret" not in caplog.text
