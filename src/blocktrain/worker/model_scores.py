"""Scores of the assembled model and of its blocks: cross entropy on held-out text.

All who score a run use the same windows, so that their scores can be compared.
"""

from collections.abc import Callable
from functools import partial

from blocktrain.config import Config
from blocktrain.config.compute import forward_flops
from blocktrain.data.corpus import Corpus, evaluation_windows
from blocktrain.errors import BlocktrainError, DeviceError, RefusedError, UnreachableError
from blocktrain.memory import is_out_of_memory
from blocktrain.model.stack import Stack, assemble, new_block
from blocktrain.protocol.status_messages import MOST_CE, Score, Status
from blocktrain.storage import tensor_file
from blocktrain.training.device import Compute
from blocktrain.training.evaluate import Evaluation, evaluate
from blocktrain.training.stored_models import load_block
from blocktrain.worker.downloads import LocalVersions
from blocktrain.worker.machine import EventReporter, StopCondition
from blocktrain.worker.transfer import Transfer

MOST_WINDOWS, FEWEST_WINDOWS = 256, 16
MOST_FLOPS = 1e13  # of a score: with a large model fewer windows are scored
HEARTBEAT_SECONDS = 10.0  # between two signs of life while a model is scored
SHARE = 0.05  # of a validator's time that goes into scores, without the last one
LEAST_PAUSE = 10.0  # seconds between two looks for newer versions
UNABLE_PAUSE = 600.0  # after a score that failed


def scored_windows(config: Config) -> int:
    """How many windows are scored. Follows from the run's settings alone."""
    fitting = int(MOST_FLOPS / (config.model.window * forward_flops(config)))
    return max(FEWEST_WINDOWS, min(fitting, MOST_WINDOWS))


class ModelScorer:
    """Scores versions, always on the same windows of the valid split, and sends the scores."""

    def __init__(
        self,
        config: Config,
        corpus: Corpus,
        compute: Compute,
        transfer: Transfer,
        versions: LocalVersions,
        events: EventReporter,
        stop: StopCondition,
    ) -> None:
        self.config, self.compute = config, compute
        self._transfer, self._versions, self._events = transfer, versions, events
        self._client, self._stop, window = transfer.client, stop, config.model.window
        split = corpus.split("valid", window)
        self._windows = evaluation_windows(split, window, scored_windows(config))
        self._text_bytes = corpus.bytes_of(self._windows)
        self._seen = 0.0  # when the coordinator last heard of this worker

    def score(self, status: Status) -> bool:
        """Score the versions in this status. Returns False if a version was deleted before all of
        them were downloaded."""
        versions = versions_of(status)
        self._events.report("scoring", f"scoring {_listed(versions)}")
        try:
            stack = self._stack(status)
        except RefusedError as refused:
            if refused.code != "not_found":
                raise
            if versions == versions_of(self._client.status(self._stop.deadline())):
                raise
            return False
        evaluation = evaluate(
            stack, self._windows, draws=0, on_scored=self._show_life, text_bytes=self._text_bytes
        )
        for block, version in enumerate(versions):
            self._send(block, (version,), _block_ce(evaluation, block), evaluation.digest)
        ce = evaluation.ce
        if self._send(None, versions, ce, evaluation.digest):
            self._events.report("scored", f"{_listed(versions)}: CE {ce:.4f} nats/byte")
        return True

    def _show_life(self, windows: int) -> None:
        """Let the coordinator know, by a request, that this worker is still there."""
        now = self._client.clock.monotonic()
        if now - self._seen > HEARTBEAT_SECONDS:
            self._client.status(self._stop.deadline())
            self._seen = now

    def _stack(self, status: Status) -> Stack:
        deadline, blocks = self._stop.deadline(), []
        for block in status.blocks:
            module = new_block(self.config, block.index)
            data = self._versions.read(block.index, block.version, block.weights, deadline)
            name = f"version {block.version} of block {block.index}"
            load_block(module, tensor_file.decode(data), name)
            module.compute_dtype = self.compute.dtype
            blocks.append(module.to(self.compute.device))
        self._transfer.cache.keep_only(block.weights for block in status.blocks)
        return assemble(self.config, blocks)

    def _send(self, block: int | None, versions: tuple[int, ...], ce: float, windows: str) -> bool:
        """Send a score and return True. If the model has diverged, report that to the user instead
        and return False."""
        if not ce <= MOST_CE:  # NaN is not either
            what = _listed(versions) if block is None else f"block {block}, version {versions[0]}"
            self._events.report(
                "diverged", f"{what}: CE is {ce}, so the model has diverged; the score is not sent"
            )
            return False
        score = Score(
            block=block, versions=versions, split="valid", windows=windows, ce=ce,
            downloads=self._versions.take_downloads(),
        )  # fmt: skip
        self._client.score(score, self._stop.deadline())
        return True


class OccasionalScores:
    """The scores of a validator: now and then during the run, and of the final versions."""

    def __init__(
        self,
        scorer: ModelScorer,
        transfer: Transfer,
        events: EventReporter,
        stop: StopCondition,
        problem: Callable[[], str],
        make_room: Callable[[], None],
    ) -> None:
        """`problem`: why the model does not fit into memory, or empty. `make_room`: frees memory
        before the model is loaded."""
        self._scorer, self._events = scorer, events
        self._problem, self._make_room = problem, make_room
        self._clock = transfer.client.clock
        self._status = partial(transfer.client.status, stop.deadline())
        self._next_look = self._clock.monotonic()
        self._scored: tuple[int, ...] = ()

    def score_if_due(self) -> None:
        """Score the model if it has a new version and enough time has passed since the last score.
        If a worker with an evaluation invite is there, scores are left to it."""
        if self._clock.monotonic() < self._next_look:
            return
        self._next_look = self._clock.monotonic() + LEAST_PAUSE
        status = self._status()
        if any(versions_of(status)) and not _has_evaluator(status):
            self._score(status)

    def score_last(self) -> None:
        """Score the final versions, unless somebody has."""
        self._score(self._status())

    def _score(self, status: Status) -> None:
        versions = versions_of(status)
        told = status.checking.scored if status.checking else ()
        if versions in (self._scored, told):
            return
        began = self._clock.monotonic()
        try:
            if problem := self._problem():
                raise DeviceError(problem)
            self._make_room()
            if self._scorer.score(status):
                self._scored = versions
        except UnreachableError:
            raise
        except (BlocktrainError, RuntimeError, MemoryError) as error:
            if not isinstance(error, BlocktrainError) and not is_out_of_memory(error):
                raise
            self._events.report("unable", f"cannot score the model: {error}")
            pause = UNABLE_PAUSE
        else:
            pause = (self._clock.monotonic() - began) * (1 / SHARE - 1)
        self._next_look = self._clock.monotonic() + max(LEAST_PAUSE, pause)


def versions_of(status: Status) -> tuple[int, ...]:
    return tuple(block.version for block in status.blocks)


def _has_evaluator(status: Status) -> bool:
    return any(each.role == "evaluate" and each.state == "waiting" for each in status.workers)


def _listed(versions: tuple[int, ...]) -> str:
    return f"versions {', '.join(map(str, versions))}"


def _block_ce(evaluation: Evaluation, block: int) -> float:
    """The CE of the block's own head, or of the final readout if the run has one block."""
    by_readout = {score.readout: score.ce for score in evaluation.scores}
    return by_readout.get(f"block {block}", by_readout["final"])
