"""A worker with the evaluate role: scores every block and the assembled model as versions appear.

These are the cross entropies in a run's status, always on the same windows of the valid split. It
trains nothing.
"""

import math
from collections.abc import Callable

from blocktrain.config import Config, from_toml
from blocktrain.data.corpus import Bytes
from blocktrain.data.windows import evaluation_windows
from blocktrain.errors import RefusedError, UnreachableError
from blocktrain.model.stack import Stack, assemble, new_block
from blocktrain.protocol.messages import Score, Status
from blocktrain.storage import tensor_file
from blocktrain.train.device import Compute, resolve
from blocktrain.train.evaluate import Evaluation, evaluate
from blocktrain.train.loading import load_block
from blocktrain.worker.blob_cache import BlobCache
from blocktrain.worker.client import Client
from blocktrain.worker.corpus_cache import CorpusCache
from blocktrain.worker.events import EventReporter, WorkerEvent
from blocktrain.worker.machine import WorkerSettings, check_role, lock_folder
from blocktrain.worker.timing import Deadline, StopCondition
from blocktrain.worker.transfer import Bandwidth, Transfer
from blocktrain.worker.versions import Versions

SCORED_WINDOWS = 256
POLL_SECONDS = 2.0  # between two requests for new versions


class Evaluator:
    def __init__(
        self,
        client: Client,
        settings: WorkerSettings,
        on_event: Callable[[WorkerEvent], None],
        windows: int = SCORED_WINDOWS,
    ) -> None:
        self.client, self.settings, self.windows = client, settings, windows
        bandwidth = Bandwidth(settings.max_bandwidth, client.clock)
        self._transfer = Transfer(client, BlobCache(settings.folder / "chunks"), bandwidth)
        self._events = EventReporter(on_event, bandwidth, client.clock)
        self._stop = StopCondition(client.clock, settings.until)
        client.http.on_unreachable = lambda reason, seconds: self._events.report(
            "unreachable", f"{reason}; waiting for the coordinator"
        )

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Score until the run is over and its last versions are scored. False: stopped before."""
        self._stop.also = should_stop
        with lock_folder(self.settings.folder, self._transfer.cache):
            try:
                finished = self._work()
            except UnreachableError:
                if not self._stop.reached():
                    raise
                finished = False
        if finished:
            self._events.report("finished", "the run is finished and scored")
        else:
            self._events.report("stopped", self._stop.reason)
        return finished

    def _work(self) -> bool:
        """Whether everything is scored."""
        deadline, report = self._stop.deadline(), self._events.report
        joined = self.client.join(
            self.settings.name, resolve(self.settings.device, "auto").name, deadline
        )
        check_role(joined, "evaluate", self.settings.folder)
        report("joined", f"joined run {joined.description.run} as worker {joined.worker}")
        config = from_toml(joined.description.config)
        compute = resolve(self.settings.device, config.train.precision)
        folder = self.settings.folder / joined.description.run
        self._versions = Versions(
            self._transfer, folder, config.swarm.codec, lambda text: report("astray", text)
        )
        corpora = CorpusCache(
            self._transfer, self.settings.data, lambda text: report("other_text", text)
        )
        corpus = corpora.open(joined.description, config.data, deadline)
        window = config.model.window
        windows = evaluation_windows(corpus.split("valid", window), window, self.windows)
        scored: tuple[int, ...] = ()
        while not self._stop.reached():
            status = self.client.status(deadline)
            versions = _versions_of(status)
            if versions != scored:
                report("scoring", f"scoring {_named(versions)}")
                if self._score(config, compute, status, windows, deadline):
                    scored = versions
                    report("waiting", "waiting for newer versions")
            elif status.state == "finished":
                return True
            else:
                self.client.clock.sleep(POLL_SECONDS)
        return False

    def _score(
        self,
        config: Config,
        compute: Compute,
        status: Status,
        windows: Bytes,
        deadline: Deadline,
    ) -> bool:
        """False: a version was replaced and deleted before all of them were downloaded."""
        versions = _versions_of(status)
        try:
            stack = self._stack(config, compute, status, deadline)
        except RefusedError as refused:
            if refused.code != "not_found" or self._newest(deadline) == versions:
                raise
            return False
        evaluation = evaluate(stack, windows, draws=1)
        for block, version in enumerate(versions):
            self._report(block, (version,), evaluation, _block_ce(evaluation, block), deadline)
        self._report(None, versions, evaluation, evaluation.default.ce, deadline)
        return True

    def _newest(self, deadline: Deadline) -> tuple[int, ...]:
        return _versions_of(self.client.status(deadline))

    def _stack(self, config: Config, compute: Compute, status: Status, deadline: Deadline) -> Stack:
        blocks = []
        for block in status.blocks:
            module = new_block(config, block.index)
            data = self._versions.read(block.index, block.version, block.weights, deadline)
            named = f"version {block.version} of block {block.index}"
            load_block(module, tensor_file.decode(data), named)
            module.compute_dtype = compute.dtype
            blocks.append(module.to(compute.device))
        self._transfer.cache.keep_only(block.weights for block in status.blocks)
        return assemble(config, blocks)

    def _report(
        self,
        block: int | None,
        versions: tuple[int, ...],
        evaluation: Evaluation,
        ce: float,
        deadline: Deadline,
    ) -> None:
        """Send a score to the coordinator. One that is not finite cannot be sent: it is only
        reported to the user."""
        if not math.isfinite(ce):
            what = _named(versions) if block is None else f"block {block}, version {versions[0]}"
            self._events.report("diverged", f"{what}: CE {ce}, the model has diverged; not sent")
            return
        score = Score(
            block=block,
            versions=versions,
            split="valid",
            windows=evaluation.digest,
            ce=ce,
            downloads=self._versions.take_downloads(),
        )
        self.client.score(score, deadline)
        if block is None:
            self._events.report("scored", f"{_named(versions)}: CE {ce:.4f}")


def _versions_of(status: Status) -> tuple[int, ...]:
    return tuple(block.version for block in status.blocks)


def _named(versions: tuple[int, ...]) -> str:
    return f"versions {', '.join(map(str, versions))}"


def _block_ce(evaluation: Evaluation, block: int) -> float:
    """Of the block's own head; in a run of one block, the final one."""
    named = {
        score.readout: score.ce
        for score in evaluation.scores
        if score.start != "noise" and score.draws == 1
    }
    return named.get(f"block {block}", named["final"])
