"""Works on leases until the run is over: request, train, send.

While an update is encoded and sent, the next lease is requested and started. With a codec, training
continues from where the last lease ended. A lease that ends early is given back.
"""

import math
import threading
from collections.abc import Callable

from blocktrain.config import Config
from blocktrain.errors import BlocktrainError, DivergedError, RefusedError, UnreachableError
from blocktrain.protocol.messages import (
    Finished,
    Lease,
    LeaseAnswer,
    LeaseProgress,
    LeaseRequest,
    Wait,
)
from blocktrain.worker.lease_work import LeaseWork, RunSession
from blocktrain.worker.local_block import TrainedLease
from blocktrain.worker.machine import LONGEST_WAIT, Idleness, LeaseTimer, Outcome, StopCondition

FINISH_SECONDS = 5.0  # a worker that must stop finishes a lease that takes no longer
SEND_SECONDS = 15.0  # then it has this long to send the update
LATEST_SEND_SECONDS = 1800.0  # give up sending an update after this
REQUEST_SECONDS = 30.0
# A lease ends before its deadline by the time of this many steps and sends of an update, and a
# share of the time that it had at first.
STEP_ROOM, SEND_ROOM, ROOM_SHARE = 2.0, 2.0, 0.1
GIVE_UP_SECONDS = 3600.0  # end after no coordinator answered for this long
BUSY_SECONDS = 60.0  # give a lease back after others have used the machine for this long
MOST_FAILURES = 5  # end after so many consecutive leases failed
WAIT_JITTER = 0.25
REPORT_SECONDS = 0.25  # between two training events
POLL_SECONDS = 0.2
EXTENDED = "conflict"  # the code of a refusal of work under the settings before an extension
END_SECONDS = 2.0  # how long to wait for the thread of an abandoned upload


class LeaseLoop:
    def __init__(
        self,
        session: RunSession,
        blocks: tuple[int, ...] | None,
        stop: StopCondition,
        idleness: Idleness | None,
        before_lease: Callable[[], None] = lambda: None,
    ) -> None:
        """`blocks`: those that this machine can train; None: any."""
        self._session, self._blocks = session, blocks
        self._client, self._block = session.client, session.block
        self._clock = session.client.clock
        self._stop, self._idleness, self._before_lease = stop, idleness, before_lease
        self._failures: list[BlocktrainError] = []  # of consecutive leases
        self._uploader = Uploader(session, self._failures)
        self._unsent: LeaseWork | None = None  # a trained lease whose update is not being sent yet
        self._steps_per_second: float | None = None
        self._silent_since = math.inf
        self._reported_at = -math.inf

    def run(self) -> Outcome:
        """Work on leases until the run is over or extended, or the worker is stopped. After an
        error, gives unfinished work back."""
        try:
            return self._run()
        finally:
            self._uploader.abandon("the worker exited")
            if self._unsent:
                self._unsent.give_back("the worker exited")

    def _run(self) -> Outcome:
        outcome: Outcome = "stopped"
        while outcome == "stopped" and self._ready():
            try:
                answer = self._request_lease()
            except RefusedError as refused:
                if refused.code != EXTENDED:
                    raise
                outcome = "extended"
                continue
            self._send_unsent(final=self._is_final(answer))
            match answer.answer if answer else None:
                case Finished():
                    outcome = "finished"
                case Wait() as wait:
                    self._wait(wait)
                case Lease() as lease:
                    self._work_on(lease)
        self._send_unsent(final=True)
        if not self._uploader.finish(self._may_still_send):
            self._uploader.abandon(self._stop_reason())
        self._block.put_away()
        return outcome

    def _ready(self) -> bool:
        """Wait until a lease may be requested. Returns False if it is time to stop."""
        failures = self._failures[-MOST_FAILURES:]
        if len(failures) == MOST_FAILURES:
            raise failures[-1]
        self._uploader.check()
        self._pause_while_busy(math.inf)
        if not self._block.encodes:
            self._uploader.wait_until_offered(self._stop.deadline().wanted)
        return not self._stop.reached()

    def _request_lease(self) -> LeaseAnswer | None:
        """Request a lease. Returns None if no coordinator answers."""
        request = LeaseRequest(
            blocks=self._blocks,
            held_block=self._block.index,
            trained=self._block.ended_lease,
            at_once=self._unsent is not None,
            steps_per_second=self._steps_per_second,
            transfer_seconds=self._block.fetch_seconds + self._uploader.send_seconds,
            run_steps=run_steps(self._session.config),
        )
        deadline = self._client.deadline(REQUEST_SECONDS, self._stop.deadline().wanted)
        try:
            answer = self._client.lease(request, deadline)
        except UnreachableError:
            now = self._clock.monotonic()
            self._silent_since = min(self._silent_since, now)
            if now - self._silent_since > GIVE_UP_SECONDS:
                raise
            return None
        self._silent_since = math.inf
        if answer.reveal:
            self._session.kept.start_to_reveal(answer.reveal)
        return answer

    def _wait(self, wait: Wait) -> None:
        """Wait a little longer than the coordinator says, or until an update has been sent."""
        self._session.events.report("waiting", wait.reason)
        seconds = min(wait.seconds, LONGEST_WAIT) * self._client.random.uniform(
            1.0, 1.0 + WAIT_JITTER
        )
        sending = self._uploader.busy
        self._stop.sleep(seconds, lambda: not sending or self._uploader.busy)

    def _work_on(self, lease: Lease) -> None:
        """Train a lease and have its update sent, or give the lease back."""
        work = LeaseWork(self._session, lease)
        if lease.continues not in (None, self._block.ended_lease):
            work.give_back("the worker restarted and lost the weights to continue from")
            return
        try:
            trained = self._train(work)
        except BlocktrainError as error:
            if isinstance(error, DivergedError):
                self._block.drop()
            if not work.heartbeat.lost and not self._stop.reached():
                work.give_back(str(error))
                self._count_failure(error)
                return
            trained = None
        except BaseException:
            work.heartbeat.release()
            raise
        if work.heartbeat.lost:
            work.report("lost", f"lease lost: {work.heartbeat.lost}")
        elif trained:
            self._hand_in(work, trained)
        else:
            work.give_back(self._stop_reason())

    def _train(self, work: LeaseWork) -> TrainedLease | None:
        """Train a lease, and wait until the previous update is settled. Returns None if
        interrupted."""
        lease, heartbeat, events = work.lease, work.heartbeat, self._session.events
        timer, trained_before = LeaseTimer(lease.steps, self._clock), events.training_seconds

        def on_report(report: LeaseProgress) -> None:
            timer.reached(report.steps_done)
            events.training_seconds = trained_before + timer.seconds
            heartbeat.progress = report
            self._report_training(lease, timer, report, heartbeat.seconds_left)

        def should_stop() -> bool:
            timer.begin()
            busy_too_long = not self._pause_while_busy(BUSY_SECONDS, lambda: not heartbeat.lost)
            stopped = self._stop.reached() and not timer.ends_within(FINISH_SECONDS)
            return bool(heartbeat.lost) or busy_too_long or stopped

        self._before_lease()

        def ends_early() -> bool:
            """Whether the deadline is so near that another step might miss it."""
            step = 1.0 / timer.steps_per_second if timer.steps_per_second else math.inf
            send = SEND_ROOM * self._uploader.send_seconds + ROOM_SHARE * lease.seconds_left
            return bool(timer.steps_done) and heartbeat.seconds_left < STEP_ROOM * step + send

        deadline = self._stop.deadline(lambda: not heartbeat.lost)
        if self._block.encodes and not lease.continues and self._uploader.sends(lease.block):
            self._uploader.finish(deadline.wanted)  # it determines the residual
        trained = self._block.train(lease, deadline, on_report, should_stop, ends_early)
        self._steps_per_second = timer.steps_per_second or self._steps_per_second
        if trained and trained.steps < lease.steps and not work.shorten(trained):
            return None
        if trained is None or not self._uploader.finish(self._may_still_send):
            return None
        self._forget_other_blobs(lease)
        return trained

    def _hand_in(self, work: LeaseWork, trained: TrainedLease) -> None:
        """Send the update. With a codec, this waits for the answer to the next lease request, which
        tells whether the update is the final one of its block."""
        work.keep(trained)
        if self._block.encodes:
            self._unsent = work
        else:
            self._uploader.start(work, final=False)

    def _send_unsent(self, *, final: bool) -> None:
        """Start to send the update of the lease that was trained last, if it was not sent yet."""
        if self._unsent:
            work, self._unsent = self._unsent, None
            self._uploader.start(work, final=final)

    def _is_final(self, answer: LeaseAnswer | None) -> bool:
        """Whether the unsent update is the worker's last of its block: the block has no batches
        left, or the worker moves on to another block and may not come back."""
        if answer is None or self._unsent is None:
            return False
        lease = answer.answer
        moves_on = isinstance(lease, Lease) and lease.block != self._unsent.lease.block
        return answer.final_update or moves_on

    def _count_failure(self, error: BlocktrainError) -> None:
        """Pause before the next lease. Re-raise an error that would hit every lease."""
        if not isinstance(error, (DivergedError, UnreachableError, RefusedError)):
            raise error
        self._failures.append(error)
        self._stop.sleep(self._client.random.uniform(0.0, 2.0 ** len(self._failures)))

    def _forget_other_blobs(self, lease: Lease) -> None:
        """Delete all cached blobs but those of this lease, and versions that deltas may start from.
        Call this only while no transfer is running."""
        predecessors = lease.predecessors
        cached = self._block.versions.cached({lease.block, *(each.block for each in predecessors)})
        needed = [lease.base, *(each.weights for each in predecessors), *cached]
        self._session.transfer.cache.keep_only(needed)
        self._session.kept.collect()

    def _stop_reason(self) -> str:
        return self._stop.reason if self._stop.reached() else "others use the machine"

    def _may_still_send(self) -> bool:
        return not self._stop.reached_for(FINISH_SECONDS + SEND_SECONDS)

    def _pause_while_busy(self, seconds: float, wanted: Callable[[], bool] = lambda: True) -> bool:
        """Wait while others use the machine. Returns False if they still do after this many
        seconds."""
        if not self._idleness or not self._idleness.busy():
            return True
        self._session.events.report("paused", "others use the machine")
        ends = self._clock.monotonic() + seconds
        while self._idleness.busy() and wanted() and not self._stop.reached():
            if self._clock.monotonic() >= ends:
                return False
            self._stop.sleep(1.0, wanted)
        return True

    def _report_training(
        self, lease: Lease, timer: LeaseTimer, report: LeaseProgress, seconds_left: float
    ) -> None:
        now = self._clock.monotonic()
        if now - self._reported_at < REPORT_SECONDS and report.steps_done < lease.steps:
            return
        self._reported_at = now
        speed = (timer.steps_per_second or 0.0) * self._session.config.bytes_per_step
        self._session.events.report(
            "training",
            "",
            lease,
            step=report.steps_done,
            loss=report.loss,
            bytes_per_s=speed,
            seconds_left=seconds_left,
        )


def run_steps(config: Config) -> int | None:
    """What a request for work says about the settings that this worker has."""
    return config.train.steps if config.train.extended_at else None


class Uploader:
    """Encodes and sends one update at a time in a thread, while the next lease is trained."""

    def __init__(self, session: RunSession, failures: list[BlocktrainError]) -> None:
        """`failures`: the errors since the last successful update, in a list that the uploader
        keeps up to date."""
        self._client, self._failures = session.client, failures
        self._thread = threading.Thread()  # not started
        self._work: LeaseWork | None = None
        self._broken: Exception | None = None
        self._abandoned = False
        self.send_seconds = 0.0  # how long the last update took to encode and send

    @property
    def busy(self) -> bool:
        return self._thread.is_alive()

    def sends(self, block: int) -> bool:
        """Whether an update of this block is being encoded or sent."""
        return self.busy and self._work is not None and self._work.lease.block == block

    def start(self, work: LeaseWork, *, final: bool) -> None:
        assert not self.busy, "one update at a time"
        work.take_downloads()
        self._work = work
        self._thread = threading.Thread(target=self._send, args=(work, final), daemon=True)
        self._thread.start()

    def wait_until_offered(self, wanted: Callable[[], bool]) -> None:
        """Wait until the coordinator knows of the update. Before that, it would lease the same
        batches to this worker again."""
        while self.busy and self._work and wanted():
            if self._work.offered.wait(POLL_SECONDS):
                return

    def finish(self, wanted: Callable[[], bool]) -> bool:
        """Wait until the update is settled. Returns False if `wanted` became false before that."""
        while self.busy:
            if not wanted():
                return False
            self._thread.join(POLL_SECONDS)
        self.check()
        return True

    def check(self) -> None:
        """Raise the error that ended the last upload, if no retry can fix it (for example a full
        disk)."""
        if self._broken:
            raise self._broken

    def abandon(self, reason: str) -> None:
        """Stop sending, and give the lease back."""
        if self._abandoned:
            return
        self._abandoned = True
        if self.busy and self._work:
            self._work.hand_over(reason)
            self._thread.join(END_SECONDS)

    def _send(self, work: LeaseWork, final: bool) -> None:
        deadline = self._client.deadline(LATEST_SEND_SECONDS, lambda: not self._abandoned)
        began = self._client.clock.monotonic()
        try:
            if error := work.send(deadline, final=final):
                self._failures.append(error)
            else:
                self._failures.clear()
                self.send_seconds = self._client.clock.monotonic() - began
        except Exception as error:
            self._broken = error
            work.hand_over(str(error))
        finally:
            work.heartbeat.release()
