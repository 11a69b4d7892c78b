"""A validator: a worker that checks the updates of other workers, and trains nothing.

It scores an update by the loss of its block with and without it, on windows that nobody can
foresee; and it trains parts of leases again (replayer.py). The block stays in memory between
scores. Now and then it scores the assembled model (model_scores.py).
"""

import logging
from collections.abc import Callable
from functools import partial

import numpy as np

from blocktrain.config import Config
from blocktrain.data.corpus import Corpus
from blocktrain.data.tokenizer import Tokens
from blocktrain.errors import (
    BlocktrainError,
    DivergedError,
    ProtocolError,
    RefusedError,
    UnreachableError,
)
from blocktrain.memory import is_out_of_memory
from blocktrain.numerics import Doubles
from blocktrain.numerics.merge import Contribution, finite_floats
from blocktrain.protocol.check_messages import (
    Check,
    CheckRequest,
    CheckResult,
    Losses,
    ReplayCheck,
    ReplayResult,
    ScoreCheck,
    ScoreResult,
    Unable,
)
from blocktrain.protocol.messages import Blob, Joined, Predecessor, Wait
from blocktrain.storage import tensor_file
from blocktrain.storage.tensor_file import Tensors
from blocktrain.swarm import merging_rules
from blocktrain.training.device import Compute, resolve
from blocktrain.training.memory_check import serving_problem
from blocktrain.training.scoring import BlockScorer, hidden_windows, leased_windows
from blocktrain.worker.agent import Worker, fitting_blocks
from blocktrain.worker.downloads import LocalVersions
from blocktrain.worker.lease_loop import EXTENDED, run_steps
from blocktrain.worker.lease_trainer import LeasedVersions
from blocktrain.worker.lease_work import LONGEST_REASON
from blocktrain.worker.machine import LONGEST_WAIT, Deadline, Outcome
from blocktrain.worker.model_scores import ModelScorer, OccasionalScores
from blocktrain.worker.replayer import Replayer, decoded_change
from blocktrain.worker.transfer import Transfer

FILES_SIZE = 3.1  # most of a file of a replay, relative to the weights
LATE = ("gone", "not_found")  # refusals of a result that another validator has been asked for

log = logging.getLogger(__name__)


class Validator(Worker):
    """Requests checks, carries them out and reports the results."""

    role = "validate"
    finished = "the run is finished, every update is checked and the model is scored"

    def _work(self, joined: Joined, config: Config) -> Outcome:
        blocks = fitting_blocks(self.settings, config)
        compute = resolve(self.settings.device, config.train.precision)
        folder = self.settings.folder / joined.description.run
        versions = LocalVersions(
            self._transfer, folder, config.swarm.codec, lambda text: log.info("%s", text)
        )
        corpus = self._open_corpus(joined, config)
        checker = Checker(config, corpus, compute, self._transfer, versions)
        scores = OccasionalScores(
            ModelScorer(
                config, corpus, compute, self._transfer, versions, self._events, self._stop
            ),
            self._transfer,
            self._events,
            self._stop,
            partial(self._no_room, config),
            checker.free_memory,
        )
        self._transfer.most_bytes *= FILES_SIZE
        while not self._stop.reached():
            request = CheckRequest(
                blocks=blocks, held_block=checker.held_block, run_steps=run_steps(config)
            )
            try:
                answer = self.client.request_check(request, self._stop.deadline()).answer
            except RefusedError as refused:
                if refused.code != EXTENDED:
                    raise
                return "extended"
            if isinstance(answer, Check):
                self._carry_out(checker, answer)
            elif isinstance(answer, Wait):
                self._events.report("waiting", answer.reason)
                self._stop.sleep(min(answer.seconds, LONGEST_WAIT))
            else:
                scores.score_last()
                return "finished"
            scores.score_if_due()
        return "stopped"

    def _no_room(self, config: Config) -> str:
        """Why the assembled model does not fit into this machine's memory; empty if it does."""
        if not self.settings.checks_memory:
            return ""
        blocks, precision = range(config.block_count), config.train.precision
        return serving_problem(config, self.settings.device, precision, "full", blocks, 1)

    def _carry_out(self, checker: "Checker", check: Check) -> None:
        clock = self.client.clock
        deadline = Deadline(clock.monotonic() + check.seconds_left, self._stop.deadline().wanted)
        self._events.report("checking", f"checking an update of block {check.block}")
        result = checker.carry_out(check, deadline)
        try:
            self.client.report_check(check.check, result, deadline)
        except UnreachableError:  # it is handed out again
            self._events.report("waiting", "no coordinator took the result of a check")
        except RefusedError as refused:
            if refused.code not in LATE:
                raise


class Checker:
    """Carries out checks, one at a time."""

    def __init__(
        self,
        config: Config,
        corpus: Corpus,
        compute: Compute,
        transfer: Transfer,
        versions: LocalVersions,
    ) -> None:
        self.config, self.corpus, self.compute = config, corpus, compute
        self._transfer, self._versions = transfer, versions
        self._scorer: BlockScorer | None = None
        self._hidden_before: tuple[object, Doubles] | None = None  # losses, and of what

    @property
    def held_block(self) -> int | None:
        return self._scorer.block if self._scorer else None

    def free_memory(self) -> None:
        """Drop the block in memory. The next check loads it again."""
        self._scorer = None

    def carry_out(self, check: Check, deadline: Deadline) -> CheckResult:
        """Never fails: a check that this machine cannot carry out is reported as such."""
        clock = self._transfer.client.clock
        began = clock.monotonic()
        try:
            result: ScoreResult | ReplayResult | Unable = self._result(check, deadline)
        except (BlocktrainError, RuntimeError, MemoryError) as error:
            if not isinstance(error, BlocktrainError) and not is_out_of_memory(error):
                raise
            self.free_memory()
            log.warning("cannot check an update of block %d: %s", check.block, error)
            result = Unable(reason=str(error)[:LONGEST_REASON])
        return CheckResult(
            result=result,
            seconds=clock.monotonic() - began,
            device=self.compute.name,
            downloads=self._versions.take_downloads(),
        )

    def _result(self, check: Check, deadline: Deadline) -> ScoreResult | ReplayResult:
        current = [check.task.current] if isinstance(check.task, ScoreCheck) else []
        try:
            if isinstance(check.task, ScoreCheck):
                return self._score(check, check.task, deadline)
            self.free_memory()
            return self._replay(check, check.task, deadline)
        finally:
            self._forget_other_blobs(check, current)

    def _replay(self, check: Check, task: ReplayCheck, deadline: Deadline) -> ReplayResult:
        def read(blob: Blob) -> memoryview:
            return self._transfer.read(blob, deadline)

        parts = (self.config, self.corpus, self.compute, read, self._transfer.cache)
        return Replayer(*parts).replay(check, task, self._weights_of(deadline))

    def _weights_of(self, deadline: Deadline) -> Callable[[Predecessor], Tensors]:
        def weights_of(each: Predecessor) -> Tensors:
            data = self._versions.read(each.block, each.version, each.weights, deadline)
            return tensor_file.decode(data)

        return weights_of

    # Scores

    def _score(self, check: Check, task: ScoreCheck, deadline: Deadline) -> ScoreResult:
        before = tensor_file.decode(
            self._versions.read(check.block, check.version, task.current, deadline)
        )
        after = self._with_update(before, task, deadline)
        scorer = self._scorer_of(check, deadline)
        hidden, own = self._windows(check, task)

        def after_update(windows: Tokens, like: Doubles) -> Doubles:
            return scorer.losses(after, windows, task.seed) if after else np.full_like(like, np.nan)

        # Of several updates of one version, the loss of the version is measured only once.
        key = (task.current.name, task.seed, task.windows, check.text.predecessors)
        if self._hidden_before is None or self._hidden_before[0] != key:
            self._hidden_before = key, scorer.losses(before, hidden, task.seed)
        on_hidden, on_own = self._hidden_before[1], scorer.losses(before, own, task.seed)
        return ScoreResult(
            hidden=_losses(on_hidden, after_update(hidden, on_hidden)),
            own=_losses(on_own, after_update(own, on_own)),
        )

    def _windows(self, check: Check, task: ScoreCheck) -> tuple[Tokens, Tokens]:
        """Hidden text, and text of the lease."""
        config, text = self.config, check.text
        batches = range(text.first_batch, text.first_batch + text.steps)
        return (
            hidden_windows(self.corpus, config.model.window, task.windows, task.seed),
            leased_windows(
                config, check.block, self.corpus, batches, task.windows, task.seed
            ),
        )  # fmt: skip

    def _with_update(self, before: Tensors, task: ScoreCheck, deadline: Deadline) -> Tensors | None:
        """The weights after a merge of this update alone; None if they are not finite."""
        rule, is_encoded = merging_rules.merge_rule(self.config.swarm), self._is_encoded
        update = self._update(before, task, deadline)
        base = tensor_file.decode(self._transfer.read(task.base, deadline)) if task.base else {}
        if update.keys() != before.keys() or (base and base.keys() != before.keys()):
            raise ProtocolError("an update has other tensors than its block; tell the operator")
        after = {}
        try:
            for name, current in before.items():
                alone = Contribution(
                    "", update[name], 1.0, base.get(name), task.share, is_delta=is_encoded
                )
                after[name] = finite_floats(rule.combine(current, [alone], None)[0])
        except DivergedError:
            return None
        return after

    @property
    def _is_encoded(self) -> bool:
        return self.config.swarm.codec != "none"

    def _update(self, like: Tensors, task: ScoreCheck, deadline: Deadline) -> Tensors:
        """An update's weights or, with a codec, their change."""
        data = self._transfer.read(task.update, deadline)
        if not self._is_encoded:
            return tensor_file.decode(data)
        return decoded_change(data, like)

    def _scorer_of(self, check: Check, deadline: Deadline) -> BlockScorer:
        """The block in memory, with the frozen blocks that it trains with."""
        if self.held_block != check.block:
            self.free_memory()  # of the other block
            self._scorer = BlockScorer(self.config, check.block, self.corpus, self.compute)
        assert self._scorer
        if needed := self.config.frozen_blocks(check.block):
            named = check.text.predecessors
            self._scorer.build_on(
                LeasedVersions(check.block, needed, named, self._weights_of(deadline))
            )
        return self._scorer

    def _forget_other_blobs(self, check: Check, current: list[Blob]) -> None:
        """Keep the versions that the next check may need, or from which deltas lead to them."""
        predecessors = check.text.predecessors
        cached = self._versions.cached({check.block, *(each.block for each in predecessors)})
        self._transfer.cache.keep_only(
            [*current, *(each.weights for each in predecessors), *cached]
        )


def _losses(before: Doubles, after: Doubles) -> Losses:
    """Means over groups of windows, and the standard error of their difference."""
    gains = before - after
    count = len(gains)
    error = float(np.std(gains, ddof=1)) / count**0.5 if count > 1 else np.nan
    return Losses(before=_finite(before.mean()), after=_finite(after.mean()), error=_finite(error))


def _finite(number: float) -> float | None:
    return float(number) if np.isfinite(number) else None
