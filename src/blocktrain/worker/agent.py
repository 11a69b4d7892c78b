"""A worker's life: join a run, and then lease, train, send, and again, until there is no more.

It holds one block in memory. While an update is made and goes up, the next lease is asked for and
begun; where updates are what was learned, it goes on from where the last one ended.
Whatever ends a lease early, it is given back, so that nobody waits for it. Shows nothing: what
happens is told as events.
"""

import math
import threading
import tomllib
from collections.abc import Callable
from typing import Any

from blocktrain.config import Config, from_toml
from blocktrain.errors import (
    BlocktrainError,
    ConfigError,
    DeviceError,
    DivergedError,
    ProtocolError,
    RefusedError,
    UnreachableError,
)
from blocktrain.protocol.messages import (
    Downloads,
    Finished,
    Lease,
    LeaseAnswer,
    LeaseRequest,
    Receipt,
    UpdateClaim,
    UpdateOffer,
    Wait,
)
from blocktrain.train.device import resolve
from blocktrain.train.estimation import memory_of
from blocktrain.worker.bandwidth import Throttle, TrafficCounter
from blocktrain.worker.client import Client
from blocktrain.worker.clock import LeaseTimer
from blocktrain.worker.heartbeat import LeaseHeartbeat
from blocktrain.worker.http import Patience
from blocktrain.worker.local_block import (
    EncodedUpdate,
    LearnedDelta,
    LeaseReport,
    LocalBlock,
    Trained,
)
from blocktrain.worker.machine import (
    Idleness,
    Kind,
    WorkerEvent,
    WorkerSettings,
    check_role,
    lock_folder,
    of_this_machine,
)
from blocktrain.worker.residual import settle_leftover_residuals
from blocktrain.worker.text import CorpusCache
from blocktrain.worker.transfer import Transfer, open_cache
from blocktrain.worker.uploader import Uploader

FINISH_SECONDS = 5.0  # a lease that ends within this is finished even when asked to stop
SEND_SECONDS = 15.0  # so much more for an update to be sent
LATEST_SEND_SECONDS = 1800.0  # after that nobody wants an update any more
ASK_SECONDS = 30.0
GIVE_UP_SECONDS = 3600.0  # without an answer from any coordinator
BUSY_SECONDS = 60.0  # others may use the machine before a lease is given back
MOST_FAILURES = 5  # leases in a row
WAIT_JITTER = 0.25
POLL_SECONDS = 0.1
TELL_SECONDS = 0.25  # between two events of training


class Agent:
    def __init__(
        self,
        client: Client,
        settings: WorkerSettings,
        on_event: Callable[[WorkerEvent], None],
        idleness: Idleness | None = None,
    ) -> None:
        """`on_event` may be called from several threads, but only from one at a time."""
        self.client, self.settings = client, settings
        self._clock = client.clock
        self._on_event, self._event_lock = on_event, threading.Lock()
        self._idleness = idleness
        if settings.idle_only and not idleness:
            self._idleness = of_this_machine(self._clock)
        self._traffic = TrafficCounter()
        cache = open_cache(settings.folder / "chunks")
        throttle = Throttle(settings.max_bandwidth, self._clock)
        self._transfer = Transfer(client, cache, throttle, self._traffic)
        self._uploader = Uploader(
            self._transfer,
            LATEST_SEND_SECONDS,
            self._on_receipt,
            self._on_send_failure,
            self._on_unsent,
        )
        self._trained: tuple[LearnedDelta, LeaseHeartbeat] | None = (
            None  # whose update is to be made yet
        )
        self._contribution = 0
        self._started_at = self._clock.monotonic()
        self._training_seconds = 0.0
        self._steps_per_second: float | None = None
        self._failures = 0  # since an update last got through
        self._last_failure: BlocktrainError | None = None
        self._silent_since: float | None = None
        self._told_at = -math.inf
        self._stop = False
        self._stop_seen_at: float | None = None
        self._asked_to_stop: Callable[[], bool] = lambda: False
        client.connection.on_silence = self._tell_silence

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Work until the run is over. False: stopped before that."""
        self._asked_to_stop = should_stop
        with lock_folder(self.settings.folder, self._transfer.cache):
            try:
                finished = self._work()
            finally:
                self._uploader.abandon("the worker ended")
                if self._trained:
                    self._give_back(self._trained[1], "the worker ended")
        if finished:
            self._tell("finished", "the run is finished")
        else:
            self._tell("stopped", self._stop_reason())
        return finished

    def stop(self) -> None:
        """Leave soon: finish what takes a few seconds, give the rest back. May be called by a
        signal handler or another thread."""
        self._stop = True

    def _work(self) -> bool:
        """Whether the run is over."""
        try:
            self._open()
        except UnreachableError:
            if self._stopping():
                return False
            raise
        finished = False
        while not finished and self._ready():
            told = self._ask()
            answer = told.answer if told else None
            self._send_learned(last_words=told is not None and self._is_last(told))
            finished = isinstance(answer, Finished)
            if isinstance(answer, Wait):
                self._wait(answer)
            elif isinstance(answer, Lease):
                self._take(answer)
        self._send_learned(last_words=True)
        if not self._uploader.finish(self._send_wanted):
            self._uploader.abandon(self._stop_reason())
        self._block.put_away()
        return finished

    def _open(self) -> None:
        """Join, and have everything here that every lease needs."""
        settings, patience = self.settings, self._while_wanted()
        device = resolve(settings.device, "auto").name
        joined = self.client.join(
            settings.name, device, self.client.patience(wanted=patience.wanted)
        )
        self._run, self._worker = joined.description.run, joined.worker
        self._tell("joined", f"joined run {self._run} as worker {self._worker}, on {device}")
        check_role(joined, "train", settings.folder)
        self._config = _config(joined.description.config, settings.device)
        self._blocks = self._fitting_blocks()
        compute = resolve(settings.device, self._config.train.precision)
        corpora = CorpusCache(
            self._transfer, settings.data, lambda text: self._tell("other_text", text)
        )
        corpus = corpora.open(joined.description, self._config.data, patience)
        self._tell("corpus", f"text: {corpus.source}, {len(corpus.splits['train']):,} bytes")
        scratch = settings.folder / self._run
        settle_leftover_residuals(scratch, self._was_accepted)
        self._block = LocalBlock(
            self._config,
            corpus,
            compute,
            self._transfer,
            scratch,
            lambda text: self._tell("astray", text),
        )

    def _was_accepted(self, lease: str) -> bool | None:
        """None where nobody can say, within a while in which others are answered."""
        wanted = self._while_wanted().wanted
        try:
            return self.client.was_accepted(lease, self.client.patience(ASK_SECONDS, wanted))
        except UnreachableError:
            if not wanted():
                raise
            return None

    def _fitting_blocks(self) -> tuple[int, ...] | None:
        """The blocks this machine may and can train; None: any."""
        settings, config = self.settings, self._config
        for block in settings.blocks or ():
            if not 0 <= block < config.block_count:
                raise ConfigError(
                    f"--blocks {block}: the run has blocks 0 to {config.block_count - 1}"
                )
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

    def _ready(self) -> bool:
        """Wait until it is time to ask for work; False: it is time to leave."""
        if self._last_failure and self._failures >= MOST_FAILURES:
            raise self._last_failure
        self._uploader.check()
        self._stand_back(math.inf)
        if not self._block.encodes:
            self._uploader.offered(self._while_wanted().wanted)
        return not self._stopping()

    def _ask(self) -> LeaseAnswer | None:
        """What to do next; None where nobody answered."""
        ended = self._block.ended
        request = LeaseRequest(
            blocks=self._blocks,
            held_block=self._block.index,
            trained=ended.lease if ended else None,
            at_once=self._trained is not None,
            steps_per_second=self._steps_per_second,
            transfer_seconds=self._block.fetch_seconds + self._uploader.send_seconds,
        )
        patience = self.client.patience(ASK_SECONDS, self._while_wanted().wanted)
        try:
            answer = self.client.lease(request, patience)
        except UnreachableError:
            now = self._clock.monotonic()
            self._silent_since = now if self._silent_since is None else self._silent_since
            if now - self._silent_since > GIVE_UP_SECONDS:
                raise
            return None
        self._silent_since = None
        return answer

    def _wait(self, answer: Wait) -> None:
        """As long as asked and a little longer, or until an update of ours has got through."""
        self._tell("waiting", answer.reason)
        seconds = answer.seconds * self.client.random.uniform(1.0, 1.0 + WAIT_JITTER)
        sending = self._uploader.busy
        self._sleep(seconds, lambda: not sending or self._uploader.busy)

    def _take(self, lease: Lease) -> None:
        """Train a lease and have its update sent, or give it back."""
        keeper = LeaseHeartbeat(self.client, lease)
        if not self._block.can_train(lease):
            self._give_back(keeper, "what it continues was lost when the worker started again")
            return
        try:
            trained = self._train(lease, keeper)
        except BlocktrainError as error:
            if isinstance(error, DivergedError):
                self._block.drop()
            if not keeper.lost and not self._stopping():
                self._give_back(keeper, str(error))
                self._count_failure(error)
                return
            trained = None
        except BaseException:
            keeper.release()
            raise
        if keeper.lost:
            self._tell("lost", f"lease lost: {keeper.lost}", lease)
        elif trained:
            self._hand_in(lease, trained, keeper)
        else:
            self._give_back(keeper, self._stop_reason())

    def _train(self, lease: Lease, keeper: LeaseHeartbeat) -> Trained | None:
        last = lease.first_batch + lease.steps - 1
        self._tell("leased", f"block {lease.block}, batches {lease.first_batch} to {last}", lease)
        course, trained_before = LeaseTimer(lease.steps, self._clock), self._training_seconds

        def on_report(report: LeaseReport) -> None:
            course.reached(report.steps_done)
            self._training_seconds = trained_before + course.seconds
            keeper.report(report.steps_done, report.loss)
            self._tell_training(lease, course, report)

        def should_stop() -> bool:
            course.begin()
            busy_too_long = not self._stand_back(BUSY_SECONDS, lambda: not keeper.lost)
            stopped = self._stopping() and not course.ends_within(FINISH_SECONDS)
            return bool(keeper.lost) or busy_too_long or stopped

        patience = self._while_wanted(lambda: not keeper.lost)
        sending = self._uploader.lease
        if self._block.encodes and not lease.continues and sending and sending.block == lease.block:
            self._uploader.finish(patience.wanted)  # only then is known what is owed
        trained = self._block.train(lease, patience, on_report, should_stop)
        self._steps_per_second = course.steps_per_second or self._steps_per_second
        if trained is None or not self._uploader.finish(self._send_wanted):
            return None
        self._forget_all_but(lease)
        return trained

    def _hand_in(self, lease: Lease, trained: Trained, keeper: LeaseHeartbeat) -> None:
        """See to it that an update is made. One that is encoded is made while the block is trained
        on, and says more if nothing of its block is left: so that is asked first."""
        if self._block.encodes:
            self._trained = (self._block.take_learned(lease, trained), keeper)
        else:
            update, keeper.downloads = self._block.write(trained), self._take_downloads()
            self._uploader.start(lambda: self._offer(keeper, update), keeper)

    def _is_last(self, told: LeaseAnswer) -> bool:
        """Whether what is to be sent may be this worker's last update of its block: nothing of that
        is left, or it goes on with another and may never come back."""
        learned, answer = self._trained[0] if self._trained else None, told.answer
        moves = learned and isinstance(answer, Lease) and answer.block != learned.lease.block
        return told.last_words or bool(moves)

    def _send_learned(self, *, last_words: bool) -> None:
        if self._trained is None:
            return
        (learned, keeper), self._trained = self._trained, None
        keeper.downloads = self._take_downloads()

        def prepare() -> UpdateOffer:
            return self._offer(keeper, self._block.encode(learned, last_words=last_words))

        self._uploader.start(prepare, keeper)

    def _offer(self, keeper: LeaseHeartbeat, update: EncodedUpdate) -> UpdateOffer:
        lease = keeper.lease
        claim = UpdateClaim(
            run=self._run,
            worker=self._worker,
            lease=lease.lease,
            fence=lease.fence,
            block=lease.block,
            base_version=lease.base_version,
            codec=self._config.swarm.codec,
            recipe=update.recipe,
            loss=update.loss,
        )
        self._tell("trained", f"sending {update.blob.size:,} bytes", lease, loss=update.loss)
        return UpdateOffer(
            claim=claim,
            signature=self.client.key.sign_update(claim),
            downloads=keeper.downloads,
        )

    def _on_receipt(self, lease: Lease, receipt: Receipt) -> None:
        self._failures = 0
        self._block.settled(lease, accepted=receipt.state != "refused")
        if receipt.state == "refused":
            self._tell("refused", f"update refused: {receipt.reason}", lease)
        else:
            self._contribution += self._text_bytes(lease.steps)
            late = f" ({receipt.reason})" if receipt.reason else ""
            self._tell("accepted", f"block {lease.block}: {lease.steps} steps sent{late}", lease)

    def _on_send_failure(
        self, keeper: LeaseHeartbeat, error: BlocktrainError, may_count: bool
    ) -> None:
        self._block.settled(keeper.lease, accepted=None if may_count else False)
        self._failures, self._last_failure = self._failures + 1, error
        self._tell("refused", f"update not sent: {error}", keeper.lease)
        self._return(keeper, str(error))

    def _on_unsent(self, lease: Lease) -> None:
        self._block.settled(lease, accepted=False)

    def _give_back(self, keeper: LeaseHeartbeat, reason: str) -> None:
        keeper.downloads = self._take_downloads()
        self._return(keeper, reason)
        self._tell("returned", f"lease given back: {reason}", keeper.lease)

    def _return(self, keeper: LeaseHeartbeat, reason: str) -> None:
        """What was downloaded is told with it; where nobody hears that, with what comes next."""
        if not keeper.give_back(reason):
            self._block.versions.put_back(keeper.downloads)

    def _take_downloads(self) -> Downloads:
        return self._block.versions.take_downloads()

    def _count_failure(self, error: BlocktrainError) -> None:
        """Raise what no other lease would change; else pause before the next one."""
        if not isinstance(error, (DivergedError, UnreachableError, RefusedError)):
            raise error
        self._failures, self._last_failure = self._failures + 1, error
        self._sleep(self.client.random.uniform(0.0, 2.0**self._failures))

    def _forget_all_but(self, lease: Lease) -> None:
        """Called while nothing is sent or fetched."""
        needed = [lease.base, self._block.stands_at]
        needed += [predecessor.weights for predecessor in lease.predecessors]
        blocks = {lease.block, *(predecessor.block for predecessor in lease.predecessors)}
        needed += self._block.versions.held(blocks)
        self._transfer.keep_only(blob for blob in needed if blob)

    def _stopping(self) -> bool:
        """Whether to leave: asked by whoever started it, or because its time is over."""
        if not (self._stop or self._asked_to_stop() or self._is_late()):
            return False
        if self._stop_seen_at is None:
            self._stop_seen_at = self._clock.monotonic()
        return True

    def _is_late(self) -> bool:
        return self.settings.is_late(self._clock.wall())

    def _stop_reason(self) -> str:
        if not self._stopping():
            return "others use the machine"
        return "the worker's time is over" if self._is_late() else "the worker was stopped"

    def _send_wanted(self) -> bool:
        if not self._stopping() or self._stop_seen_at is None:
            return True
        return self._clock.monotonic() - self._stop_seen_at < FINISH_SECONDS + SEND_SECONDS

    def _while_wanted(self, wanted: Callable[[], bool] = lambda: True) -> Patience:
        return Patience(math.inf, lambda: wanted() and not self._stopping())

    def _stand_back(self, most: float, wanted: Callable[[], bool] = lambda: True) -> bool:
        """Wait while others use the machine; False: they did for longer than `most` seconds."""
        if not self._idleness or not self._idleness.busy():
            return True
        self._tell("paused", "others use the machine")
        ends = self._clock.monotonic() + most
        while self._idleness.busy() and wanted() and not self._stopping():
            if self._clock.monotonic() >= ends:
                return False
            self._sleep(1.0, wanted)
        return True

    def _sleep(self, seconds: float, wanted: Callable[[], bool] = lambda: True) -> None:
        ends = self._clock.monotonic() + seconds
        while wanted() and not self._stopping():
            left = ends - self._clock.monotonic()
            if left <= 0.0:
                return
            self._clock.sleep(min(left, POLL_SECONDS))

    def _tell_training(self, lease: Lease, course: LeaseTimer, report: LeaseReport) -> None:
        now = self._clock.monotonic()
        if now - self._told_at < TELL_SECONDS and report.steps_done < lease.steps:
            return
        self._told_at = now
        speed = (course.steps_per_second or 0.0) * self._text_bytes(1)
        self._tell(
            "training", "", lease, step=report.steps_done, loss=report.loss, bytes_per_s=speed
        )

    def _tell_silence(self, reason: str, seconds: float) -> None:
        """From whichever thread has found it out."""
        if not self._stopping():
            self._tell("unreachable", f"{reason}; waiting for the coordinator")

    def _tell(self, kind: Kind, text: str, lease: Lease | None = None, **facts: Any) -> None:
        with self._event_lock:
            event = WorkerEvent(
                kind,
                text,
                block=lease.block if lease else None,
                steps=lease.steps if lease else 0,
                bytes_down=self._traffic.down,
                bytes_up=self._traffic.up,
                contribution=self._contribution,
                seconds=self._clock.monotonic() - self._started_at,
                training_seconds=self._training_seconds,
                **facts,
            )
            self._on_event(event)

    def _text_bytes(self, steps: int) -> int:
        return steps * self._config.bytes_per_step


def _config(toml: str, device: str) -> Config:
    try:
        return from_toml(toml).with_settings(train__device=device)
    except tomllib.TOMLDecodeError as error:
        raise ProtocolError(f"the run's settings are not valid TOML: {error}") from None
