"""Leases one after the other until the run is over: request, train, send, and so on.

While an update is made and sent, the next lease is requested and begun. With a codec, training goes
on from where the last lease ended. A lease that ends early, for whatever reason, is given back.
"""

import math
import threading
from collections.abc import Callable

from blocktrain.errors import (
    BlocktrainError,
    DivergedError,
    RefusedError,
    UnreachableError,
)
from blocktrain.protocol.messages import Finished, Lease, LeaseAnswer, LeaseRequest, Wait
from blocktrain.worker.lease_work import LeaseWork, RunSession
from blocktrain.worker.local_block import LeaseReport, TrainedLease
from blocktrain.worker.machine import Idleness
from blocktrain.worker.timing import LeaseTimer, StopCondition

FINISH_SECONDS = 5.0  # a lease that ends within this is finished before a stop
SEND_SECONDS = 15.0  # after that, for its update to be sent
LATEST_SEND_SECONDS = 1800.0  # an older update is not worth sending
REQUEST_SECONDS = 30.0
GIVE_UP_SECONDS = 3600.0  # without an answer from any coordinator
BUSY_SECONDS = 60.0  # for how long others may use the machine before a lease is given back
MOST_FAILURES = 5  # leases in a row
WAIT_JITTER = 0.25
REPORT_SECONDS = 0.25  # between two events of training
POLL_SECONDS = 0.2
END_SECONDS = 2.0  # for an abandoned upload to end


class LeaseLoop:
    def __init__(
        self,
        session: RunSession,
        blocks: tuple[int, ...] | None,
        stop: StopCondition,
        idleness: Idleness | None,
    ) -> None:
        """`blocks`: those this machine can train; None: any."""
        self._session, self._blocks = session, blocks
        self._client, self._block = session.client, session.block
        self._clock = session.client.clock
        self._stop, self._idleness = stop, idleness
        self._failures = FailureCount()
        self._uploader = Uploader(session, self._failures)
        self._last: LeaseWork | None = None  # the last lease that was trained to its end
        self._steps_per_second: float | None = None
        self._silent_since: float | None = None
        self._reported_at = -math.inf

    def run(self) -> bool:
        """Whether the run is over; otherwise the worker was stopped."""
        finished = False
        while not finished and self._ready():
            answer = self._request_lease()
            self._send_unsent(final=answer is not None and self._is_final(answer))
            match answer.answer if answer else None:
                case Finished():
                    finished = True
                case Wait() as wait:
                    self._wait(wait)
                case Lease() as lease:
                    self._work_on(lease)
        self._send_unsent(final=True)
        if not self._uploader.finish(self._may_still_send):
            self._uploader.abandon(self._stop_reason())
        self._block.put_away()
        return finished

    def close(self, reason: str) -> None:
        """Give back what is left after an error."""
        self._uploader.abandon(reason)
        if unsent := self._unsent():
            unsent.give_back(reason)

    def _ready(self) -> bool:
        """Wait until it is time to request a lease. False: it is time to stop."""
        self._failures.check()
        self._uploader.check()
        self._pause_while_busy(math.inf)
        if not self._block.encodes:
            self._uploader.wait_until_offered(self._stop.deadline().wanted)
        return not self._stop.reached()

    def _request_lease(self) -> LeaseAnswer | None:
        """None: no coordinator answered."""
        request = LeaseRequest(
            blocks=self._blocks,
            held_block=self._block.index,
            trained=self._block.ended_lease,
            at_once=self._unsent() is not None,
            steps_per_second=self._steps_per_second,
            transfer_seconds=self._block.fetch_seconds + self._uploader.send_seconds,
        )
        deadline = self._client.deadline(REQUEST_SECONDS, self._stop.deadline().wanted)
        try:
            answer = self._client.lease(request, deadline)
        except UnreachableError:
            now = self._clock.monotonic()
            self._silent_since = now if self._silent_since is None else self._silent_since
            if now - self._silent_since > GIVE_UP_SECONDS:
                raise
            return None
        self._silent_since = None
        return answer

    def _wait(self, wait: Wait) -> None:
        """As long as the coordinator says and a little longer, or until an update was sent."""
        self._session.events.report("waiting", wait.reason)
        seconds = wait.seconds * self._client.random.uniform(1.0, 1.0 + WAIT_JITTER)
        sending = self._uploader.busy
        self._stop.sleep(seconds, lambda: not sending or self._uploader.busy)

    def _work_on(self, lease: Lease) -> None:
        """Train a lease and have its update sent, or give it back."""
        work = LeaseWork(self._session, lease)
        if not self._block.can_train(lease):
            work.give_back("what it continues was lost when the worker started again")
            return
        try:
            trained = self._train(work)
        except BlocktrainError as error:
            if isinstance(error, DivergedError):
                self._block.drop()
            if not work.lost and not self._stop.reached():
                work.give_back(str(error))
                self._count_failure(error)
                return
            trained = None
        except BaseException:
            work.release()
            raise
        if work.lost:
            work.drop()
        elif trained:
            self._hand_in(work, trained)
        else:
            work.give_back(self._stop_reason())

    def _train(self, work: LeaseWork) -> TrainedLease | None:
        """None: interrupted. Otherwise the update before is settled."""
        lease, events = work.lease, self._session.events
        timer, trained_before = LeaseTimer(lease.steps, self._clock), events.training_seconds

        def on_report(report: LeaseReport) -> None:
            timer.reached(report.steps_done)
            events.training_seconds = trained_before + timer.seconds
            work.heartbeat.update(report.steps_done, report.loss)
            self._report_training(lease, timer, report)

        def should_stop() -> bool:
            timer.begin()
            busy_too_long = not self._pause_while_busy(BUSY_SECONDS, lambda: not work.lost)
            stopped = self._stop.reached() and not timer.ends_within(FINISH_SECONDS)
            return bool(work.lost) or busy_too_long or stopped

        deadline = self._stop.deadline(lambda: not work.lost)
        if self._block.encodes and not lease.continues and self._uploader.sends(lease.block):
            self._uploader.finish(deadline.wanted)  # the residual is not known before
        trained = work.train(deadline, on_report, should_stop)
        self._steps_per_second = timer.steps_per_second or self._steps_per_second
        if trained is None or not self._uploader.finish(self._may_still_send):
            return None
        self._forget_other_blobs(lease)
        return trained

    def _hand_in(self, work: LeaseWork, trained: TrainedLease) -> None:
        """With a codec, the update is made after the next lease was requested, because the answer
        tells whether it is the final one of its block."""
        work.keep(trained)
        self._last = work
        if not self._block.encodes:
            self._uploader.start(work, final=False)

    def _unsent(self) -> LeaseWork | None:
        """A trained lease whose update is not made yet."""
        return self._last if self._last and self._last.state == "trained" else None

    def _send_unsent(self, *, final: bool) -> None:
        if unsent := self._unsent():
            self._uploader.start(unsent, final=final)

    def _is_final(self, answer: LeaseAnswer) -> bool:
        """Whether the unsent update may be the last of its block from this worker: the block has no
        text left, or the worker goes on with another block and may not come back."""
        unsent, lease = self._unsent(), answer.answer
        moves_on = unsent and isinstance(lease, Lease) and lease.block != unsent.lease.block
        return answer.final_update or bool(moves_on)

    def _count_failure(self, error: BlocktrainError) -> None:
        """Pause before the next lease. Raise an error that every lease would meet."""
        if not isinstance(error, (DivergedError, UnreachableError, RefusedError)):
            raise error
        self._failures.add(error)
        self._stop.sleep(self._client.random.uniform(0.0, 2.0**self._failures.count))

    def _forget_other_blobs(self, lease: Lease) -> None:
        """Only while nothing is sent or downloaded."""
        needed = [lease.base, *(predecessor.weights for predecessor in lease.predecessors)]
        blocks = {lease.block, *(predecessor.block for predecessor in lease.predecessors)}
        needed += self._block.versions.cached(blocks)
        self._session.transfer.cache.keep_only(needed)

    def _stop_reason(self) -> str:
        return self._stop.reason if self._stop.reached() else "others use the machine"

    def _may_still_send(self) -> bool:
        return not self._stop.reached_for(FINISH_SECONDS + SEND_SECONDS)

    def _pause_while_busy(self, seconds: float, wanted: Callable[[], bool] = lambda: True) -> bool:
        """Wait while others use the machine. False: they still do after this many seconds."""
        if not self._idleness or not self._idleness.busy():
            return True
        self._session.events.report("paused", "others use the machine")
        ends = self._clock.monotonic() + seconds
        while self._idleness.busy() and wanted() and not self._stop.reached():
            if self._clock.monotonic() >= ends:
                return False
            self._stop.sleep(1.0, wanted)
        return True

    def _report_training(self, lease: Lease, timer: LeaseTimer, report: LeaseReport) -> None:
        now = self._clock.monotonic()
        if now - self._reported_at < REPORT_SECONDS and report.steps_done < lease.steps:
            return
        self._reported_at = now
        speed = (timer.steps_per_second or 0.0) * self._session.text_bytes(1)
        self._session.events.report(
            "training", "", lease, step=report.steps_done, loss=report.loss, bytes_per_s=speed
        )


class FailureCount:
    """Leases in a row whose update did not get through."""

    def __init__(self) -> None:
        self.count = 0
        self._last: BlocktrainError | None = None

    def add(self, error: BlocktrainError) -> None:
        self.count, self._last = self.count + 1, error

    def clear(self) -> None:
        self.count = 0

    def check(self) -> None:
        """Raise the last failure if there were too many."""
        if self._last and self.count >= MOST_FAILURES:
            raise self._last


class Uploader:
    """Makes and sends one update at a time in a thread of its own, while the next lease is
    trained."""

    def __init__(self, session: RunSession, failures: FailureCount) -> None:
        self._session, self._failures = session, failures
        self._thread: threading.Thread | None = None
        self._work: LeaseWork | None = None
        self._broken: Exception | None = None
        self._abandoned = False
        self._offered = threading.Event()
        self.send_seconds = 0.0  # how long the last update took

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def sends(self, block: int) -> bool:
        """Whether an update of this block is being made or sent."""
        return self.busy and self._work is not None and self._work.lease.block == block

    def start(self, work: LeaseWork, *, final: bool) -> None:
        assert not self.busy, "one update at a time"
        work.start_sending()
        self._work = work
        self._offered.clear()
        self._thread = threading.Thread(target=self._send, args=(work, final), daemon=True)
        self._thread.start()

    def wait_until_offered(self, wanted: Callable[[], bool]) -> None:
        """Until the coordinator knows of the update: before, it would lease the same text again."""
        while self.busy and wanted() and not self._offered.wait(POLL_SECONDS):
            pass

    def finish(self, wanted: Callable[[], bool]) -> bool:
        """Wait until the update is settled. False: no longer wanted before that."""
        while self._thread and self._thread.is_alive():
            if not wanted():
                return False
            self._thread.join(POLL_SECONDS)
        self.check()
        return True

    def check(self) -> None:
        """Raise an error that no retry helps against, such as a full disk."""
        if self._broken:
            raise self._broken

    def abandon(self, reason: str) -> None:
        """Stop sending, and give the lease back."""
        if self._abandoned:
            return
        self._abandoned = True
        if self._thread and self._thread.is_alive() and self._work:
            self._work.hand_over(reason)
            self._thread.join(END_SECONDS)

    def _send(self, work: LeaseWork, final: bool) -> None:
        client = self._session.client
        deadline = client.deadline(LATEST_SEND_SECONDS, lambda: not self._abandoned)
        began = client.clock.monotonic()
        try:
            if error := work.send(deadline, self._offered.set, final=final):
                self._failures.add(error)
            else:
                self._failures.clear()
                self.send_seconds = client.clock.monotonic() - began
        except Exception as error:
            self._broken = error
            work.hand_over(str(error))
        finally:
            work.release()
