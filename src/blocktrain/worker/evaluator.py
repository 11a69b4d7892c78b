"""A worker with the evaluate role: scores every block and the assembled model as versions appear.

That is where the cross entropies in a run's status come from: honest ones, on the same windows of
valid every time. It trains nothing.
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
from blocktrain.worker.bandwidth import Throttle, TrafficCounter
from blocktrain.worker.client import Client
from blocktrain.worker.http import Patience
from blocktrain.worker.machine import Kind, WorkerEvent, WorkerSettings, check_role, lock_folder
from blocktrain.worker.text import CorpusCache
from blocktrain.worker.transfer import Transfer, open_cache
from blocktrain.worker.versions import Versions

SCORED_WINDOWS = 256
LOOK_SECONDS = 2.0  # between two looks for new versions


class Evaluator:
    def __init__(
        self,
        client: Client,
        settings: WorkerSettings,
        on_event: Callable[[WorkerEvent], None],
        windows: int = SCORED_WINDOWS,
    ) -> None:
        self.client, self.settings, self.windows = client, settings, windows
        self._on_event = on_event
        self._traffic = TrafficCounter()
        cache = open_cache(settings.folder / "chunks")
        throttle = Throttle(settings.max_bandwidth, client.clock)
        self._transfer = Transfer(client, cache, throttle, self._traffic)
        client.connection.on_silence = lambda reason, seconds: self._tell(
            "unreachable", f"{reason}; waiting for the coordinator"
        )

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Score until the run is over and its last versions are scored. False: stopped before."""

        def leaving() -> bool:
            return should_stop() or self._is_late()

        with lock_folder(self.settings.folder, self._transfer.cache):
            try:
                finished = self._work(leaving)
            except UnreachableError:  # a question that was given up
                if not leaving():
                    raise
                finished = False
        if finished:
            self._tell("finished", "the run is finished and scored")
        else:
            why = "the worker's time is over" if self._is_late() else "the worker was stopped"
            self._tell("stopped", why)
        return finished

    def _work(self, leaving: Callable[[], bool]) -> bool:
        """Whether all is scored."""
        patience = Patience(math.inf, lambda: not leaving())
        joined = self.client.join(
            self.settings.name, resolve(self.settings.device, "auto").name, patience
        )
        check_role(joined, "evaluate", self.settings.folder)
        self._tell("joined", f"joined run {joined.description.run} as worker {joined.worker}")
        config = from_toml(joined.description.config)
        compute = resolve(self.settings.device, config.train.precision)
        folder = self.settings.folder / joined.description.run
        self._versions = Versions(
            self._transfer, folder, config.swarm.codec, lambda text: self._tell("astray", text)
        )
        corpora = CorpusCache(
            self._transfer, self.settings.data, lambda text: self._tell("other_text", text)
        )
        corpus = corpora.open(joined.description, config.data, patience)
        window = config.model.window
        windows = evaluation_windows(corpus.split("valid", window), window, self.windows)
        scored: tuple[int, ...] = ()
        while not leaving():
            status = self.client.status(patience)
            versions = _versions_of(status)
            if versions != scored:
                self._tell("scoring", f"scoring {_named(versions)}")
                if self._score(config, compute, status, windows, patience):
                    scored = versions
                    self._tell("waiting", "waiting for newer versions")
            elif status.state == "finished":
                return True
            else:
                self.client.clock.sleep(LOOK_SECONDS)
        return False

    def _is_late(self) -> bool:
        return self.settings.is_late(self.client.clock.wall())

    def _score(
        self,
        config: Config,
        compute: Compute,
        status: Status,
        windows: Bytes,
        patience: Patience,
    ) -> bool:
        """False: some of it was replaced, and went, before all of it was here."""
        versions = _versions_of(status)
        try:
            stack = self._stack(config, compute, status, patience)
        except RefusedError as refused:
            if refused.code != "not_found" or self._newest(patience) == versions:
                raise
            return False
        evaluation = evaluate(stack, windows, draws=1)
        for block, version in enumerate(versions):
            self._report(block, (version,), evaluation, _block_ce(evaluation, block), patience)
        self._report(None, versions, evaluation, evaluation.default.ce, patience)
        return True

    def _newest(self, patience: Patience) -> tuple[int, ...]:
        return _versions_of(self.client.status(patience))

    def _stack(self, config: Config, compute: Compute, status: Status, patience: Patience) -> Stack:
        blocks = []
        for block in status.blocks:
            module = new_block(config, block.index)
            data = memoryview(bytearray(block.weights.size))
            self._versions.read(block.index, block.version, block.weights, patience, data)
            named = f"version {block.version} of block {block.index}"
            load_block(module, tensor_file.decode(data), named)
            module.compute_dtype = compute.dtype
            blocks.append(module.to(compute.device))
        self._transfer.keep_only(block.weights for block in status.blocks)
        return assemble(config, blocks)

    def _report(
        self,
        block: int | None,
        versions: tuple[int, ...],
        evaluation: Evaluation,
        ce: float,
        patience: Patience,
    ) -> None:
        """What was scored, to the coordinator; a score that is no number, which no message can
        say, only to whoever watches."""
        if not math.isfinite(ce):
            what = _named(versions) if block is None else f"block {block}, version {versions[0]}"
            self._tell("diverged", f"{what}: CE {ce}: it has diverged, which is not reported")
            return
        score = Score(
            block=block,
            versions=versions,
            split="valid",
            windows=evaluation.digest,
            ce=ce,
            downloads=self._versions.take_downloads(),
        )
        self.client.score(score, patience)
        if block is None:
            self._tell("scored", f"{_named(versions)}: CE {ce:.4f}")

    def _tell(self, kind: Kind, text: str) -> None:
        traffic = self._traffic
        self._on_event(WorkerEvent(kind, text, bytes_down=traffic.down, bytes_up=traffic.up))


def _versions_of(status: Status) -> tuple[int, ...]:
    return tuple(block.version for block in status.blocks)


def _named(versions: tuple[int, ...]) -> str:
    return f"versions {', '.join(map(str, versions))}"


def _block_ce(evaluation: Evaluation, block: int) -> float:
    """The block's own head; a run of one block has no other."""
    named = {
        score.readout: score.ce
        for score in evaluation.scores
        if score.start != "noise" and score.draws == 1
    }
    return named.get(f"block {block}", named["final"])
