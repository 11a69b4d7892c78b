"""What a server reports of its requests: metrics for Prometheus, a line about throughput, and a
request log. No report contains texts or keys."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, Protocol

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from starlette.responses import Response

from blocktrain.errors import ConfigError
from blocktrain.serve.router.decode import AnswerCost

REPORT = "answer"  # key in a request's scope: what its answer adds to the request log
THROUGHPUT_SECONDS = 10.0

log = logging.getLogger(__name__)

SUMS = {
    "prompt_tokens": "Tokens of prompts read",
    "cached_tokens": "Tokens of prompts whose context was copied from another request",
    "output_tokens": "Tokens of answers written",
    "traversals": "Traversals of the ring",
    "drafted": "Tokens drafted",
    "accepted": "Drafted tokens that were accepted",
    "replays": "Requests replayed after a stage or a cache lost their context",
}


class QueueState(Protocol):
    """How many answers are in progress, and how many requests wait."""

    @property
    def inside(self) -> int: ...

    @property
    def waiting(self) -> int: ...


@dataclass
class Counts:
    """What happened since the last line about throughput."""

    answers: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    traversals: int = 0
    drafted: int = 0
    accepted: int = 0


class ServerMetrics:
    """Metrics of all requests, a line in the log about their throughput, and a request log."""

    def __init__(
        self,
        queue: QueueState,
        request_log: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue, self._clock = queue, clock
        self._recent, self._since = Counts(), clock()
        self._request_log = request_log
        if request_log:
            _append(request_log, "")  # raises if it cannot be written
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "blocktrain_serve_requests", "Requests answered", ["path", "status"], registry=registry
        )
        self._seconds = Histogram(
            "blocktrain_serve_request_seconds", "From a request's headers to the end of the"
            " response", ["path"], registry=registry,
        )  # fmt: skip
        self._sums = {
            name: Counter(f"blocktrain_serve_{name}", text, registry=registry)
            for name, text in SUMS.items()
        }
        self._stages = Counter(
            "blocktrain_serve_stage_seconds", "Time spent in a stage", ["stage"], registry=registry
        )
        self._queue_seconds = Histogram(
            "blocktrain_serve_queue_seconds", "How long admitted requests waited for a place",
            registry=registry,
        )  # fmt: skip
        for name, text, value in (
            ("answering", "Answers in progress", lambda: queue.inside),
            ("waiting", "Requests waiting for a place", lambda: queue.waiting),
        ):
            Gauge(f"blocktrain_serve_{name}", text, registry=registry).set_function(value)

    def requested(self, path: str, status: int, seconds: float, facts: dict[str, Any]) -> None:
        """Count a request that has ended. `facts` become its line in the request log."""
        if self._request_log:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            line = {"time": now, "status": status, "seconds": round(seconds, 6), **facts}
            try:
                _append(self._request_log, json.dumps(line) + "\n")
            except ConfigError as error:
                log.warning("%s", error)
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def admitted(self, queue_seconds: float) -> None:
        self._queue_seconds.observe(queue_seconds)

    def wrote(self, tokens: int) -> None:
        self._recent.output_tokens += tokens

    def answered(self, costs: Sequence[AnswerCost]) -> None:
        recent = self._recent
        for cost in costs:
            recent.answers += 1
            recent.prompt_tokens += cost.prompt_tokens
            recent.traversals += cost.traversals
            recent.drafted += cost.drafted
            recent.accepted += cost.accepted
            for name, total in self._sums.items():
                total.inc(getattr(cost, name))
            for stage, seconds in cost.stage_seconds.items():
                self._stages.labels(stage).inc(seconds)

    async def log_throughput(self) -> NoReturn:
        while True:
            await asyncio.sleep(THROUGHPUT_SECONDS)
            if line := self.throughput():
                log.info("%s", line)

    def throughput(self) -> str:
        """What happened since the last call, in words; empty if nothing did."""
        now, recent, queue = self._clock(), self._recent, self._queue
        seconds, self._recent, self._since = now - self._since, Counts(), now
        if not (recent.answers or recent.output_tokens or queue.inside):
            return ""
        parts = [
            f"{recent.output_tokens / seconds:.1f} tokens/s written",
            f"{recent.prompt_tokens / seconds:.1f} tokens/s of prompts read",
            f"{recent.answers} answers ended in {seconds:.0f} s",
        ]
        if recent.drafted:
            parts.append(f"{recent.accepted / recent.drafted:.0%} of drafts accepted")
        return f"{', '.join(parts)}; {queue.inside} in progress, {queue.waiting} waiting"

    def page(self) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)


def _append(path: Path, line: str) -> None:
    """Opens the file for every line, so that it can be moved away while the server runs."""
    try:
        with path.open("a") as file:
            file.write(line)
    except OSError as error:
        raise ConfigError(f"--request-log {path}: {error.strerror}; use another file") from None
