"""Prometheus metrics: the run's state as it is when asked, and the bytes that passed through."""

import math
import threading
import time
from collections import Counter as Counted
from collections.abc import Callable, Iterator, Sequence
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from blocktrain.coordinator.reports import Reports
from blocktrain.protocol.messages import BlockStatus, WorkerState

FRESH_SECONDS = 1.0  # anybody may ask, and a page is a look at everything


class Metrics:
    def __init__(self, reports: Reports) -> None:
        self._page, self._made_at = b"", -math.inf
        self._one_at_a_time = threading.Lock()
        self._registry = CollectorRegistry()
        self._registry.register(_State(reports))
        moved = Counter(
            "blocktrain_chunk_bytes", "Chunk bytes moved", ["direction"], registry=self._registry
        )
        self._received, self._sent = moved.labels("received"), moved.labels("sent")

    def received(self, size: int) -> None:
        self._received.inc(size)

    def sent(self, size: int) -> None:
        self._sent.inc(size)

    def page(self) -> tuple[bytes, str]:
        with self._one_at_a_time:
            if time.monotonic() - self._made_at > FRESH_SECONDS:
                self._page, self._made_at = generate_latest(self._registry), time.monotonic()
            return self._page, CONTENT_TYPE_LATEST


BLOCK_GAUGES: dict[str, tuple[str, Callable[[BlockStatus], float | None]]] = {
    "version": ("Version a block stands at", lambda block: block.version),
    "bytes_trained": ("Bytes merged into a block", lambda block: block.bytes_trained),
    "replicas": ("Workers on a block", lambda block: block.replicas),
    "pending_updates": ("Updates waiting to be merged", lambda block: block.pending_updates),
    "participation": ("Share of leases met in time", lambda block: block.participation),
    "ce": ("Cross entropy on valid", lambda block: block.ce),
}


def _moved_bytes(blocks: Sequence[BlockStatus], codec: str) -> Iterator[Metric]:
    family = CounterMetricFamily(
        "blocktrain_moved_bytes",
        "Bytes of updates up and of versions down, as workers report these",
        labels=["block", "direction", "codec"],
    )
    raw = CounterMetricFamily(
        "blocktrain_moved_raw_bytes",
        "What the same would have been whole, in fp32",
        labels=["block", "direction"],
    )
    for block in blocks:
        moved, index = block.moved, str(block.index)
        counts = Counted({("up", codec): moved.up, ("down", "none"): moved.down_whole})
        counts["down", codec] += moved.down_differences
        for labels, count in counts.items():
            family.add_metric([index, *labels], count)
        raw.add_metric([index, "up"], moved.up_raw)
        raw.add_metric([index, "down"], moved.down_raw)
    yield family
    yield raw


class _State(Collector):
    def __init__(self, reports: Reports) -> None:
        self._reports = reports

    def describe(self) -> Iterator[Metric]:
        return iter(())  # nothing is read before somebody asks

    def collect(self) -> Iterator[Metric]:
        status = self._reports.status()
        for name, (text, value) in BLOCK_GAUGES.items():
            family = GaugeMetricFamily(f"blocktrain_block_{name}", text, labels=["block"])
            for block in status.blocks:
                found = value(block)
                if found is not None:
                    family.add_metric([str(block.index)], found)
            yield family
        yield from _moved_bytes(status.blocks, self._reports.run.config.swarm.codec)
        workers = GaugeMetricFamily("blocktrain_workers", "Workers by state", labels=["state"])
        for state in get_args(WorkerState):
            workers.add_metric([state], sum(w.state == state for w in status.workers))
        yield workers
