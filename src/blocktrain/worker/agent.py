"""A worker that trains: it joins a run, prepares what every lease needs, and works on leases.

Shows nothing: what happens is reported as events.
"""

import logging
import tomllib
from collections.abc import Callable

from blocktrain.config import Config, from_toml
from blocktrain.errors import ConfigError, DeviceError, ProtocolError, UnreachableError
from blocktrain.train.device import resolve
from blocktrain.train.estimation import memory_of
from blocktrain.worker.blob_cache import BlobCache
from blocktrain.worker.client import Client
from blocktrain.worker.corpus_cache import CorpusCache
from blocktrain.worker.events import EventReporter, WorkerEvent
from blocktrain.worker.lease_loop import REQUEST_SECONDS, LeaseLoop
from blocktrain.worker.lease_work import RunSession
from blocktrain.worker.local_block import LocalBlock
from blocktrain.worker.machine import (
    Idleness,
    WorkerSettings,
    check_role,
    idleness_of_this_machine,
    lock_folder,
)
from blocktrain.worker.residual import settle_leftover_residuals
from blocktrain.worker.timing import StopCondition
from blocktrain.worker.transfer import Bandwidth, Transfer

log = logging.getLogger(__name__)


class Agent:
    def __init__(
        self,
        client: Client,
        settings: WorkerSettings,
        on_event: Callable[[WorkerEvent], None],
        idleness: Idleness | None = None,
    ) -> None:
        """`on_event` may be called from several threads, but from one at a time."""
        self.client, self.settings = client, settings
        bandwidth = Bandwidth(settings.max_bandwidth, client.clock)
        self._transfer = Transfer(client, BlobCache(settings.folder / "chunks"), bandwidth)
        self._events = EventReporter(on_event, bandwidth, client.clock)
        self._stop = StopCondition(client.clock, settings.until)
        self._idleness = idleness
        if settings.idle_only and not idleness:
            self._idleness = idleness_of_this_machine(client.clock)
        client.http.on_unreachable = self._report_unreachable

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Work until the run is over. False: stopped before that."""
        self._stop.also = should_stop
        with lock_folder(self.settings.folder, self._transfer.cache):
            finished = self._work()
        if finished:
            self._events.report("finished", "the run is finished")
        else:
            self._events.report("stopped", self._stop.reason)
        return finished

    def stop(self) -> None:
        """Stop soon: finish what takes a few seconds, give the rest back. May be called by a signal
        handler or another thread."""
        self._stop.request()

    def _work(self) -> bool:
        try:
            loop = self._join()
        except UnreachableError:
            if self._stop.reached():
                return False
            raise
        try:
            return loop.run()
        finally:
            loop.close("the worker ended")

    def _join(self) -> LeaseLoop:
        """Join, and have everything here that every lease needs."""
        settings, deadline, events = self.settings, self._stop.deadline(), self._events
        device = resolve(settings.device, "auto").name
        joined = self.client.join(settings.name, device, deadline)
        run = joined.description.run
        log.info("joined run %s as worker %s on %s", run, joined.worker, device)
        events.report("joined", f"joined run {run} as worker {joined.worker}, on {device}")
        check_role(joined, "train", settings.folder)
        config = _config(joined.description.config, settings.device)
        blocks = _fitting_blocks(settings, config)
        compute = resolve(settings.device, config.train.precision)
        corpora = CorpusCache(
            self._transfer, settings.data, lambda text: events.report("other_text", text)
        )
        corpus = corpora.open(joined.description, config.data, deadline)
        events.report("corpus", f"text: {corpus.source}, {len(corpus.splits['train']):,} bytes")
        scratch = settings.folder / run
        settle_leftover_residuals(scratch, self._was_accepted)
        block = LocalBlock(
            config, corpus, compute, self._transfer, scratch,
            lambda text: events.report("astray", text),
        )  # fmt: skip
        session = RunSession(run, joined.worker, config, self.client, self._transfer, block, events)
        return LeaseLoop(session, blocks, self._stop, self._idleness)

    def _was_accepted(self, lease: str) -> bool | None:
        """None: unknown, or the coordinator gave no answer to this in a time in which it answers
        other requests."""
        wanted = self._stop.deadline().wanted
        try:
            return self.client.was_accepted(lease, self.client.deadline(REQUEST_SECONDS, wanted))
        except UnreachableError:
            if not wanted():
                raise
            return None

    def _report_unreachable(self, reason: str, seconds: float) -> None:
        if not self._stop.reached():
            self._events.report("unreachable", f"{reason}; waiting for the coordinator")


def _fitting_blocks(settings: WorkerSettings, config: Config) -> tuple[int, ...] | None:
    """The blocks this machine may and can train; None: any."""
    for block in settings.blocks or ():
        if not 0 <= block < config.block_count:
            raise ConfigError(f"--blocks {block}: the run has blocks 0 to {config.block_count - 1}")
    if settings.memory_bytes is None:
        return settings.blocks
    allowed = range(config.block_count) if settings.blocks is None else settings.blocks
    needs = {block: memory_of(config, block) for block in allowed}
    fitting = tuple(block for block, size in needs.items() if size <= settings.memory_bytes)
    if not fitting:
        raise DeviceError(
            f"a block of this run needs about {min(needs.values()) / 1e6:,.0f} MB to train,"
            f" --memory allows {settings.memory_bytes / 1e6:,.0f} MB"
        )
    return fitting


def _config(toml: str, device: str) -> Config:
    try:
        return from_toml(toml).with_settings(train__device=device)
    except tomllib.TOMLDecodeError as error:
        raise ProtocolError(f"the run's settings are not valid TOML: {error}") from None
