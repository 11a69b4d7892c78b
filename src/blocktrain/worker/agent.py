"""A worker in one of its roles: an Agent trains blocks, an Evaluator scores their versions.

The third role is in validator.py. All join the run and fetch its text. They print nothing and
report what they do as events.
"""

import logging
import platform
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from blocktrain.config import Config, from_toml
from blocktrain.data.corpus import Corpus
from blocktrain.environment import cores
from blocktrain.errors import (
    ConfigError,
    DeviceError,
    ProtocolError,
    UnreachableError,
)
from blocktrain.memory import FreeMemory
from blocktrain.protocol.messages import Joined, Role
from blocktrain.training.device import Compute, resolve
from blocktrain.training.memory_check import (
    FORCE,
    WORKER_SHARE,
    Device,
    check_serving,
    gigabytes,
    too_large,
)
from blocktrain.worker.client import Client
from blocktrain.worker.downloads import (
    LocalVersions,
    most_bytes,
    open_corpus,
    open_tokenizer,
)
from blocktrain.worker.kept_states import KeptStates
from blocktrain.worker.lease_loop import REQUEST_SECONDS, LeaseLoop
from blocktrain.worker.lease_work import RunSession
from blocktrain.worker.local_block import LocalBlock, settle_leftover_residuals
from blocktrain.worker.machine import (
    Bandwidth,
    EventReporter,
    Outcome,
    StopCondition,
    WorkerEvent,
    idleness_of_this_machine,
    lock_folder,
)
from blocktrain.worker.model_scores import ModelScorer, versions_of
from blocktrain.worker.neighbours import Neighbours
from blocktrain.worker.transfer import BlobCache, Transfer

ACTIVITY: dict[Role, str] = {
    "train": "training", "evaluate": "evaluation", "validate": "validation",
}  # fmt: skip
POLL_SECONDS = 2.0  # between two polls for new versions

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerSettings:
    folder: Path  # for key, cache and residuals; one worker at a time
    device: str = "auto"
    blocks: tuple[int, ...] | None = None  # None: any
    memory_bytes: int | None = None  # None: no limit
    max_bandwidth: float | None = None  # bytes per second, both directions together
    until: float | None = None  # when the worker stops, in seconds since 1970
    idle_only: bool = False
    checks_memory: bool = True  # the limit is then a share of free memory, unless it is given
    neighbours: Neighbours | None = None  # to share the cores with; None: threads are given
    data: str | None = None  # this machine's copy of the run's text, written as data.source
    name: str = field(default_factory=platform.node)


class Worker(ABC):
    """Joins a run and works for it until the run is over or the worker is stopped."""

    role: Role
    finished: str  # text of the last event of a finished run

    def __init__(
        self, client: Client, settings: WorkerSettings, on_event: Callable[[WorkerEvent], None]
    ) -> None:
        """`on_event` may be called from several threads, but by one at a time."""
        self.client, self.settings = client, settings
        bandwidth = Bandwidth(settings.max_bandwidth, client.clock)
        self._transfer = Transfer(client, BlobCache(settings.folder / "chunks"), bandwidth)
        self._events = EventReporter(on_event, bandwidth, client.clock)
        self._stop = StopCondition(client.clock, settings.until)
        client.http.on_unreachable = self._report_unreachable

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Work until the run is over. Returns False if the worker was stopped before that. A
        training worker that must stop finishes a lease or upload that takes only a few more
        seconds; otherwise it gives the lease back."""
        self._stop.is_requested = should_stop
        self.share_cores()
        with lock_folder(self.settings.folder, self._transfer.cache):
            try:
                joined, config = self._join()
                outcome = self._work(joined, config)
                while outcome == "extended":
                    joined, config = self._join_extended(config)
                    outcome = self._work(joined, config)
            except UnreachableError:
                if not self._stop.reached():
                    raise
                outcome = "stopped"
        if outcome == "finished":
            self._events.report("finished", self.finished)
        else:
            self._events.report("stopped", self._stop.reason)
        return outcome == "finished"

    def share_cores(self) -> None:
        """Use as many threads as the other workers on this machine leave."""
        if self.settings.neighbours:
            torch.set_num_threads(self.settings.neighbours.threads(cores()))

    @abstractmethod
    def _work(self, joined: Joined, config: Config) -> Outcome:
        """Do the work of this role, until the run is over or extended, or the worker is
        stopped."""

    def _join(self) -> tuple[Joined, Config]:
        settings, device = self.settings, resolve(self.settings.device, "auto").name
        joined = self.client.join(settings.name, device, self._stop.deadline())
        text = f"joined run {joined.description.run} as worker {joined.worker}, on {device}"
        log.info(text)
        self._events.report("joined", text)
        if joined.role != self.role:
            activity, other = ACTIVITY[joined.role], ACTIVITY[self.role]
            leave_out = joined.role == "train"
            option = f"leave out --{self.role}" if leave_out else f"use --{joined.role}"
            raise ConfigError(
                f"the worker in {settings.folder} is registered for {activity}; to continue it,"
                f" {option}; for {other}, use an invite for {other} and another --folder"
            )
        try:
            config = from_toml(joined.description.config)
        except tomllib.TOMLDecodeError as error:
            raise ProtocolError(
                f"the run's settings are not valid TOML ({error}); tell the operator"
            ) from None
        self._transfer.most_bytes = most_bytes(config)
        return joined, config.with_settings(train__device=settings.device)

    def _join_extended(self, before: Config) -> tuple[Joined, Config]:
        """Join again, with the settings of the extended run."""
        self._events.report("extended", "the run was extended; joining it again")
        joined, config = self._join()
        if config.train.steps <= before.train.steps:
            raise ProtocolError(
                "the coordinator says that the run was extended, but describes it as before; tell"
                " the operator"
            )
        return joined, config

    def _open_corpus(self, joined: Joined, config: Config) -> Corpus:
        description, deadline = joined.description, self._stop.deadline()
        return open_corpus(
            description,
            config.data,
            open_tokenizer(description, config, self._transfer, deadline),
            self._transfer,
            deadline,
            self.settings.data,
            partial(self._events.report, "other_text"),
        )

    def _report_unreachable(self, reason: str, seconds: float) -> None:
        if not self._stop.reached():
            self._events.report(
                "unreachable",
                f"{reason}; waiting for the coordinator (if it has moved, start this worker again"
                " with --at and its address)",
            )


class Agent(Worker):
    """Trains blocks, lease by lease."""

    role = "train"
    finished = "the run is finished"

    def _work(self, joined: Joined, config: Config) -> Outcome:
        settings, events, run = self.settings, self._events, joined.description.run
        idleness = idleness_of_this_machine(self.client.clock) if settings.idle_only else None
        config = placed_in_memory(settings, config)
        blocks = fitting_blocks(settings, config)
        if config.train.frozen_in == "disk" and max(blocks or range(config.block_count)):
            events.report("frozen", "the frozen blocks are read from disk, to save memory")
        compute = resolve(settings.device, config.train.precision)
        corpus = self._open_corpus(joined, config)
        count, size = len(corpus.splits["train"]), joined.description.text_bytes.get("train")
        tokens = f"{count:,} bytes" if size is None else f"{count:,} tokens ({size:,} bytes)"
        events.report("corpus", f"text: {corpus.source}, {tokens}")
        scratch = settings.folder / run
        settle_leftover_residuals(scratch, self._was_accepted)
        kept = KeptStates(self.client, scratch, self._transfer.bandwidth)
        block = self.new_block(config, corpus, compute, scratch, kept)
        session = RunSession(
            run, joined.worker, config, self.client, self._transfer, block, kept, events
        )
        return LeaseLoop(session, blocks, self._stop, idleness, self.share_cores).run()

    def new_block(
        self,
        config: Config,
        corpus: Corpus,
        compute: Compute,
        scratch: Path,
        kept: KeptStates | None,
    ) -> LocalBlock:
        """What trains the leases. `scratch`: the run's folder."""
        on_astray = partial(self._events.report, "astray")
        return LocalBlock(config, corpus, compute, self._transfer, scratch, on_astray, kept)

    def _was_accepted(self, lease: str) -> bool | None:
        deadline = self.client.deadline(REQUEST_SECONDS, self._stop.deadline().wanted)
        return self.client.was_accepted(lease, deadline)


class Evaluator(Worker):
    """Scores every block and the assembled model as versions appear, always on the same windows of
    the valid split. A run's status shows these cross entropies."""

    role = "evaluate"
    finished = "the run is finished and scored"

    def _work(self, joined: Joined, config: Config) -> Outcome:
        """Score versions as they appear, up to the final ones."""
        report, device = self._events.report, self.settings.device
        if self.settings.checks_memory:
            precision, blocks = config.train.precision, range(config.block_count)
            check_serving(config, device, precision, "full", blocks, 1)
        compute = resolve(device, config.train.precision)
        folder = self.settings.folder / joined.description.run
        versions = LocalVersions(
            self._transfer, folder, config.swarm.codec, partial(report, "astray")
        )
        corpus = self._open_corpus(joined, config)
        scorer = ModelScorer(
            config, corpus, compute, self._transfer, versions, self._events, self._stop
        )
        scored: tuple[int, ...] = ()
        while not self._stop.reached():
            status = self.client.status(self._stop.deadline())
            if versions_of(status) != scored:
                if scorer.score(status):
                    scored = versions_of(status)
                    report("waiting", "waiting for newer versions")
            elif status.state == "finished":
                return "finished"
            else:
                self.client.clock.sleep(POLL_SECONDS)
        return "stopped"


def placed_in_memory(settings: WorkerSettings, config: Config) -> Config:
    """The run's settings, but with the frozen blocks on disk if so this machine has memory for more
    blocks. Their bits do not depend on it."""
    place = Device.named(settings.device)
    on_disk = config.with_settings(train__frozen_in="disk")
    limit = _most_memory(settings, place)
    allowed = settings.blocks or range(config.block_count)
    if limit is None or not config.kind.reads_predecessors or max(allowed) >= config.block_count:
        return config

    def count(placed: Config) -> int:
        sizes = place.training_bytes(placed, updates=True)
        return sum(sizes[block] <= limit for block in allowed)

    return on_disk if count(on_disk) > count(config) else config


def fitting_blocks(settings: WorkerSettings, config: Config) -> tuple[int, ...] | None:
    """The blocks that this machine may train and has memory for; None: any."""
    for block in settings.blocks or ():
        if not 0 <= block < config.block_count:
            raise ConfigError(f"--blocks {block}: the run has blocks 0 to {config.block_count - 1}")
    place = Device.named(settings.device)
    limit = _most_memory(settings, place)
    if limit is None:
        return settings.blocks
    allowed = range(config.block_count) if settings.blocks is None else settings.blocks
    sizes = place.training_bytes(config, updates=True)
    fitting = tuple(block for block in allowed if sizes[block] <= limit)
    if not fitting:
        needed = min(sizes[block] for block in allowed)
        raise DeviceError(_no_room(needed, settings, place.free))
    return settings.blocks if len(fitting) == len(allowed) else fitting


def _most_memory(settings: WorkerSettings, place: Device) -> int | None:
    """Bytes that training may use; None: any number."""
    free = place.free.bytes if place.free and settings.checks_memory else None
    limit = settings.memory_bytes
    if free is not None:
        limit = int(WORKER_SHARE * free) if limit is None else min(limit, free)
    return limit


def _no_room(needed: int, settings: WorkerSettings, free: FreeMemory | None) -> str:
    what = "training a block of this run"
    if free and settings.checks_memory and needed > free.bytes:
        return f"{too_large(what, needed, free)}; use a larger machine; {FORCE}"
    if settings.memory_bytes is not None:
        allowed = f"--memory allows {gigabytes(settings.memory_bytes)}"
        return f"{what} needs about {gigabytes(needed)}, but {allowed}; raise --memory if you can"
    assert free
    return (
        f"{what} needs about {gigabytes(needed)}, more than {WORKER_SHARE:.0%} of the memory that"
        f" is free on {free.source} ({gigabytes(free.bytes)}); allow more with --memory"
    )
