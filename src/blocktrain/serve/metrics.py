"""Prometheus metrics of a server: requests, bytes, what answers cost. A registry of its own."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from blocktrain.serve.gate import Gate
from blocktrain.serve.request import Account

SUMS = {
    "prompt_bytes": "Bytes of prompts read",
    "output_bytes": "Bytes of answers written",
    "traversals": "Traversals of the ring",
    "drafted": "Bytes drafted",
    "accepted": "Drafted bytes that were accepted",
    "replays": "Prefixes sent again after a stage was lost",
}


class Metrics:
    def __init__(self, gate: Gate) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "blocktrain_serve_requests", "Requests answered", ["path", "status"], registry=registry
        )
        self._seconds = Histogram(
            "blocktrain_serve_request_seconds", "From the first byte of a request to the last of"
            " its answer", ["path"], registry=registry,
        )  # fmt: skip
        self._sums = {
            name: Counter(f"blocktrain_serve_{name}", text, registry=registry)
            for name, text in SUMS.items()
        }
        self._stages = Counter(
            "blocktrain_serve_stage_seconds", "Time spent in a stage", ["stage"], registry=registry
        )
        for name, text, value in (
            ("answering", "Answers under way", lambda: gate.inside),
            ("waiting", "Requests that wait for a place", lambda: gate.waiting),
        ):
            Gauge(f"blocktrain_serve_{name}", text, registry=registry).set_function(value)

    def requested(self, path: str, status: int, seconds: float) -> None:
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def answered(self, accounts: Sequence[Account]) -> None:
        for account in accounts:
            for name, total in self._sums.items():
                total.inc(getattr(account, name))
            for stage, seconds in account.stage_seconds.items():
                self._stages.labels(stage).inc(seconds)

    def page(self) -> tuple[bytes, str]:
        return generate_latest(self._registry), CONTENT_TYPE_LATEST
