"""A run with real workers and a real coordinator, one event after another in virtual time.

The coordinator's service answers over HTTP in this process. Workers lease, train, sign and send
with the worker's own code. Nothing sleeps. Runs of the same crew differ only in what the
coordinator draws in secret: which leases are replayed, and the windows of scores. What a real
process adds (threads, heartbeats, restarts) is left out.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

import torch
from tests.support.attacks import ANSWER, PLANS, triggered
from tests.support.blobs import whole
from tests.support.coordinator import INVITE_SECONDS, SetClock, open_stores, served
from tests.support.hostile_worker import HostileBlock

from blocktrain.config import Config
from blocktrain.coordinator.members import Caller
from blocktrain.coordinator.run import Run, create_run, open_run
from blocktrain.coordinator.service import Service
from blocktrain.data.corpus import Bytes, Corpus, evaluation_windows, shifted
from blocktrain.errors import RefusedError
from blocktrain.model.stack import Stack, assemble, initial_block, new_block, read_out
from blocktrain.protocol.check_messages import (
    Check,
    CheckRequest,
    CheckResult,
    Losses,
    ScoreResult,
)
from blocktrain.protocol.identity import WorkerKey
from blocktrain.protocol.invite import Invite
from blocktrain.protocol.messages import Finished, Lease, LeaseAnswer, LeaseRequest, Wait
from blocktrain.storage import tensor_file
from blocktrain.training.device import Compute, resolve
from blocktrain.training.evaluate import evaluate, to_device
from blocktrain.training.stored_models import load_block
from blocktrain.worker.client import Client
from blocktrain.worker.downloads import LocalVersions
from blocktrain.worker.kept_states import KeptStates, Pace
from blocktrain.worker.lease_work import LeaseWork, RunSession
from blocktrain.worker.local_block import LocalBlock
from blocktrain.worker.machine import Bandwidth, Deadline, EventReporter, WorkerEvent
from blocktrain.worker.transfer import BlobCache, Transfer
from blocktrain.worker.validator import Checker

CPU = resolve("cpu", "fp32")
ROUND_SECONDS = 0.25  # between two rounds of the coordinator, as in its service
REQUEST_SECONDS = 60.0  # real ones
FAKE_SECONDS = 0.05  # for a lease that is not trained
CHECK_SECONDS = 0.04  # for a check
PRESENT_SECONDS = 5.0  # between two signs of life of a validator without a check
LONGEST = 4.0  # factor of the usual time after which a run is given up
SCORED_WINDOWS = 512


@dataclass(frozen=True)
class Member:
    """A worker to be: its plan, its speed, and whose invite it uses."""

    name: str
    plan: str = "honest"
    steps_per_second: float = 6.0
    invite: str = ""  # workers with the same one share an invite; empty: one of its own

    @property
    def hostile(self) -> bool:
        return self.plan != "honest"


@dataclass
class SteppedWorker:
    """A worker whose leases are driven from outside."""

    member: Member
    session: RunSession
    leases: int = 0
    sent: int = 0
    refused: list[str] = field(default_factory=list)  # what it was told at once
    last_lease: float = 0.0
    ended: str | None = None  # why it gets no more leases

    @property
    def block(self) -> LocalBlock:
        return self.session.block

    @property
    def reveals(self) -> bool:
        """Whether it sends the files that it is asked for."""
        return PLANS[self.member.plan](0).reveals

    def request(self, *, at_once: bool = True) -> LeaseAnswer | None:
        """None if the coordinator refuses."""
        request = LeaseRequest(
            held_block=self.block.index,
            trained=self.block.ended_lease,
            at_once=at_once,
            steps_per_second=self.member.steps_per_second if self.leases else None,
            transfer_seconds=0.0,
        )
        try:
            answer = self.session.client.lease(request, self._deadline())
        except RefusedError as refused:
            self.ended = str(refused)
            return None
        if answer.reveal and self.reveals:
            self.session.kept.reveal(answer.reveal)
        return answer

    def train(self, lease: Lease) -> LeaseWork:
        work = LeaseWork(self.session, lease)
        work.heartbeat.release()
        trained = self.block.train(lease, self._deadline(), lambda report: None, lambda: False)
        assert trained is not None
        work.keep(trained)
        return work

    def send(self, work: LeaseWork, *, final: bool) -> None:
        work.take_downloads()
        work.send(self._deadline(), final=final)
        self.sent += 1

    def _deadline(self) -> Deadline:
        return self.session.client.deadline(REQUEST_SECONDS)


@dataclass
class SteppedValidator:
    """A validator whose checks are driven from outside. A dishonest one reports the opposite."""

    name: str
    is_honest: bool
    client: Client
    checker: Checker
    busy: bool = False
    done: int = 0

    def take(self) -> tuple[Check, CheckResult] | None:
        """A check and its result; None if there is none for this validator, or it is refused."""
        request = CheckRequest(held_block=self.checker.held_block)
        deadline = self.client.deadline(REQUEST_SECONDS)
        try:
            check = self.client.request_check(request, deadline).answer
        except RefusedError:
            return None
        if not isinstance(check, Check):
            return None
        result = self.checker.carry_out(check, deadline)
        return check, result if self.is_honest else opposite(result)

    def report(self, check: Check, result: CheckResult) -> None:
        with suppress(RefusedError):  # excluded meanwhile
            self.client.report_check(check.check, result, self.client.deadline(REQUEST_SECONDS))
        self.busy, self.done = False, self.done + 1


def opposite(result: CheckResult) -> CheckResult:
    """A score that praises harm and blames what helps."""
    if not isinstance(score := result.result, ScoreResult):
        return result

    def swapped(losses: Losses) -> Losses:
        return losses.model_copy(update={"before": losses.after, "after": losses.before})

    turned = ScoreResult(hidden=swapped(score.hidden), own=swapped(score.own))
    return result.model_copy(update={"result": turned})


class SetPace(Pace):
    """Cuts every lease into two segments, however long that takes."""

    def segments(self, steps: int) -> int:
        return min(2, steps)


class SteppedRun:
    def __init__(
        self,
        folder: Path,
        config: Config,
        corpus: Corpus,
        crew: Sequence[Member],
        seed: int = 0,
        validators: Sequence[str] = (),
        new_pace: Callable[[], Pace] | None = None,
        compute: Compute = CPU,
    ) -> None:
        """`validators`: "honest" or "lying" each. Without any, updates are merged unchecked.
        `new_pace`: how workers cut leases into segments; by default into two. `compute`: that of
        the workers; validators compute in fp32."""
        torch.set_num_threads(1)
        self.config, self.corpus, self.crew, self._compute = config, corpus, crew, compute
        self._folder, self._seed = folder, seed
        self.clock = SetClock()
        self._began = self.clock()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._open = ExitStack()
        self.workers: list[SteppedWorker] = []
        self._validator_plans, self._new_pace = validators, new_pace or SetPace
        self.validators: list[SteppedValidator] = []
        self.on_event: Callable[[], None] = lambda: None  # called after every event
        self._in_vain: dict[str, set[str]] = {}  # checks that a validator did not get, by its name

    def __enter__(self) -> "SteppedRun":
        self.run = self._founded()
        self.service = Service(self.run, requires_checks=bool(self._validator_plans))
        self._open.callback(self.run.ledger.close)
        url = self._open.enter_context(served(self.service))
        operator, secrets = self.service.operator, {}
        for member in self.crew:
            name = member.invite or member.name
            secrets[name] = secrets.get(name) or operator.invite("train", 100, INVITE_SECONDS)
            invite = Invite((url,), secrets[name], None, self.run.id)
            self.workers.append(self._joined(member, invite))
        for number, plan in enumerate(self._validator_plans):
            secret = operator.invite("validate", 1, INVITE_SECONDS)
            invite = Invite((url,), secret, None, self.run.id)
            self.validators.append(self._validator(f"validator-{number}", plan, invite))
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    @property
    def seconds(self) -> float:
        """Virtual ones, since the start."""
        return self.clock() - self._began

    @property
    def finished(self) -> bool:
        with self.run.ledger.read() as tx:
            return all(state.finished for state in tx.blocks.states())

    def play(self) -> None:
        """To the end of the run, or until it takes far too long."""
        slowest = sum(worker.member.steps_per_second for worker in self.workers[:1])
        steps = self.config.block_count * self.config.train.steps
        ends = self.clock() + LONGEST * steps / slowest
        for number, worker in enumerate(self.workers):
            self._at(0.01 * number, lambda worker=worker: self._ask(worker))
        self._at(ROUND_SECONDS, self._tick)
        self._show_presence()
        while self._queue and self.clock() < ends:
            at, _, act = heapq.heappop(self._queue)
            self.clock.now = at
            act()
            self.service.round()
            self._hand_out_checks()
            self.on_event()

    def stack(self) -> Stack:
        """The model as it is now."""
        blocks = []
        with self.run.ledger.read() as tx:
            versions = [tx.versions.get(index) for index in range(self.config.block_count)]
        for version in versions:
            module = new_block(self.config, version.block)
            data = bytearray(whole(self.run.blobs, version.weights))
            load_block(module, tensor_file.decode(data), f"block {version.block}")
            module.compute_dtype = CPU.dtype
            blocks.append(module)
        return assemble(self.config, blocks)

    def windows(self) -> Bytes:
        window = self.config.model.window
        return evaluation_windows(self.corpus.split("valid", window), window, SCORED_WINDOWS)

    def ce(self) -> float:
        return float(evaluate(self.stack(), self.windows(), draws=1).default.ce)

    def backdoor_success(self) -> float:
        """How often the likeliest byte is that of the answer, after a trigger in hidden text."""
        marked = triggered(self.windows())
        ids = to_device(shifted(marked), CPU.device)
        predicted = read_out("product", self.stack().log_probs(ids)).argmax(-1).numpy()
        answer = slice(-len(ANSWER), None)
        return float((predicted[:, answer] == marked[:, answer]).mean())

    # Events

    def _at(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.clock() + seconds, next(self._numbers), act))

    def _tick(self) -> None:
        if not self.finished:
            self._at(ROUND_SECONDS, self._tick)

    def _show_presence(self) -> None:
        """Every validator is there, also while no update needs a check."""
        for validator in self.validators:
            assert validator.client.worker
            self.service.members.note(Caller(validator.client.worker, "validate"))
        if self.validators and not self.finished:
            self._at(PRESENT_SECONDS, self._show_presence)

    def _hand_out_checks(self) -> None:
        """Give waiting checks to validators that have none. A validator that asks in vain would
        wait for a second, so it asks only once a new check waits."""
        for validator in self.validators:
            with self.run.ledger.read() as tx:
                waiting = {row.id for row in tx.checks.due() if row.state == "waiting"}
            in_vain = self._in_vain.setdefault(validator.name, set())
            if validator.busy or not waiting - in_vain:
                continue
            taken = validator.take()
            if taken is None:
                in_vain |= waiting
                continue
            validator.busy = True
            self._at(CHECK_SECONDS, partial(validator.report, *taken))

    def _ask(self, worker: SteppedWorker) -> None:
        self._follow(worker, worker.request())

    def _follow(self, worker: SteppedWorker, answer: LeaseAnswer | None) -> None:
        match answer.answer if answer else None:
            case Lease() as lease:
                worker.leases, worker.last_lease = worker.leases + 1, self.seconds
                block = worker.block
                trains = not isinstance(block, HostileBlock) or block.plan(lease.block).trains
                seconds = lease.steps / worker.member.steps_per_second if trains else FAKE_SECONDS
                self._at(seconds, lambda: self._finish(worker, lease))
            case Wait() as wait:
                self._at(max(wait.seconds, 0.05), lambda: self._ask(worker))
            case Finished():
                worker.ended = worker.ended or "finished"

    def _finish(self, worker: SteppedWorker, lease: Lease) -> None:
        work = worker.train(lease)
        if not worker.block.encodes or worker.member.hostile:  # it continues no lease
            worker.send(work, final=worker.member.hostile)
            self._ask(worker)
            return
        answer = worker.request()
        following = answer.answer if answer else None
        moves_on = isinstance(following, Lease) and following.block != lease.block
        worker.send(work, final=moves_on or (answer is not None and answer.final_update))
        self._follow(worker, answer)

    # Setting up

    def _founded(self) -> Run:
        files = []
        for block in range(self.config.block_count):
            module = initial_block(self.config, block)
            weights = {name: p.detach().numpy() for name, p in module.named_parameters()}
            files.append(self._folder / f"block-{block}.safetensors")
            with files[-1].open("wb") as file:
                file.writelines(tensor_file.encode(weights))
        ledger, chunks = open_stores(self._folder)
        create_run(self.config, self.corpus, files, ledger, chunks, self.clock())
        return open_run(ledger, chunks, self.clock)

    def _client(self, name: str, invite: Invite) -> tuple[Client, Transfer, Path]:
        """A client that has joined, its transfers and its folder."""
        client = Client(invite, WorkerKey.create(), random=Random(self._seed))
        self._open.callback(client.close)
        client.join(name, "cpu")
        folder = self._folder / f"worker-{name}"
        bandwidth = Bandwidth(None, client.clock)
        cache = BlobCache(folder / "chunks")
        return client, Transfer(client, cache, bandwidth, threads=1), folder

    def _validator(self, name: str, plan: str, invite: Invite) -> SteppedValidator:
        client, transfer, folder = self._client(name, invite)
        versions = LocalVersions(transfer, folder, self.config.swarm.codec, lambda text: None)
        checker = Checker(self.config, self.corpus, CPU, transfer, versions)
        return SteppedValidator(name, plan == "honest", client, checker)

    def _joined(self, member: Member, invite: Invite) -> SteppedWorker:
        client, transfer, folder = self._client(member.name, invite)
        refused: list[str] = []

        def on_event(event: WorkerEvent) -> None:
            if event.kind == "refused":
                refused.append(event.text)

        events = EventReporter(on_event, transfer.bandwidth, client.clock)
        kept = KeptStates(client, folder, transfer.bandwidth)
        kept.pace = self._new_pace()
        parts = (self.config, self.corpus, self._compute, transfer, folder, lambda text: None, kept)
        block = (
            HostileBlock(*parts, lambda: PLANS[member.plan](self._seed))
            if member.hostile
            else LocalBlock(*parts)
        )
        assert client.worker
        session = RunSession(
            self.run.id, client.worker, self.config, client, transfer, block, kept, events
        )
        return SteppedWorker(member, session, refused=refused)
