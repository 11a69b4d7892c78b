"""One lease from its grant to the coordinator's answer about its update.

The lease's state is in one place, whichever thread works on it: the main thread trains, another
sends the update meanwhile, and a third sends heartbeats all the time.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from blocktrain import faults
from blocktrain.config import Config
from blocktrain.errors import BlocktrainError, ProtocolError, RefusedError, UnreachableError
from blocktrain.protocol.messages import (
    Downloads,
    Lease,
    LeaseProgress,
    LeaseReturn,
    Receipt,
    UpdateClaim,
    UpdateOffer,
)
from blocktrain.swarm.lease_terms import heartbeat_interval
from blocktrain.worker.client import Client
from blocktrain.worker.events import EventKind, EventReporter
from blocktrain.worker.local_block import (
    LearnedDelta,
    LeaseReport,
    LocalBlock,
    StoredUpdate,
    TrainedLease,
)
from blocktrain.worker.timing import Deadline
from blocktrain.worker.transfer import Transfer

RETURN_SECONDS = 5.0
LONGEST_REASON = 500

State = Literal[
    "leased",  # what it starts from is downloaded
    "training",
    "trained",  # its result is kept: the delta in memory, or the trained block in the cache
    "sending",  # its update is made and sent
    "offered",  # the coordinator knows of the update, its chunks are sent
    "committing",  # the update may count, even if no answer arrives
    "settled",  # the coordinator has answered, or the update cannot be sent
    "lost",  # it expired or was revoked before it was trained
    "returned",  # it was given back
]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunSession:
    """What a worker that has joined a run needs for every lease."""

    run: str
    worker: str
    config: Config
    client: Client
    transfer: Transfer
    block: LocalBlock
    events: EventReporter

    def text_bytes(self, steps: int) -> int:
        return steps * self.config.bytes_per_step


class LeaseWork:
    def __init__(self, session: RunSession, lease: Lease) -> None:
        self.lease = lease
        self.state: State = "leased"
        self.heartbeat = LeaseHeartbeat(session.client, lease)
        self._session = session
        self._result: LearnedDelta | StoredUpdate | None = None
        self._downloads: Downloads = ()  # reported with the update, or else with the return
        last = lease.first_batch + lease.steps - 1
        self._report("leased", f"block {lease.block}, batches {lease.first_batch} to {last}")

    @property
    def lost(self) -> str | None:
        """Why the lease is no longer this worker's."""
        return self.heartbeat.lost

    def train(
        self,
        deadline: Deadline,
        on_report: Callable[[LeaseReport], None],
        should_stop: Callable[[], bool],
    ) -> TrainedLease | None:
        """None: it was told to stop before the end."""
        self.state = "training"
        return self._session.block.train(self.lease, deadline, on_report, should_stop)

    def keep(self, trained: TrainedLease) -> None:
        """Take the result out of the block, which can be trained on then. The update before must be
        settled: its residual goes into this one."""
        block = self._session.block
        self._result = block.learned(trained) if block.encodes else block.write(trained)
        self.state = "trained"

    def start_sending(self) -> None:
        """Before `send` is called in another thread: what was downloaded until now is reported with
        this update."""
        self.state = "sending"
        self._take_downloads()

    def send(
        self, deadline: Deadline, on_offered: Callable[[], None], *, final: bool
    ) -> BlocktrainError | None:
        """Make the update and send it; returns why it could not be sent. `final`: it is probably
        the last update of its block from this worker. If the deadline ends it, the owner gives the
        lease back."""

        def offered() -> None:
            self.state = "offered"
            on_offered()

        def committing() -> None:
            self.state = "committing"

        try:
            offer = self._make_offer(final=final)
            if not deadline.wanted():
                raise UnreachableError("it was given up before it was sent")
            receipt = self._session.transfer.send(offer, deadline, offered, committing)
        except (UnreachableError, RefusedError, ProtocolError) as error:
            self._fail(error, give_back=deadline.wanted())
            return error
        faults.reached("sent")
        self._settle(receipt)
        return None

    def give_back(self, reason: str) -> None:
        """Return a lease whose update is not being sent, and report what was downloaded for it."""
        self.state = "returned"
        self._take_downloads()
        self.hand_over(reason)
        self._report("returned", f"lease given back: {reason}")

    def hand_over(self, reason: str) -> None:
        """Return the lease, so that another worker can have it at once. If the coordinator does not
        hear of the downloads now, the next update reports them."""
        if not self.heartbeat.give_back(reason, self._downloads):
            self._session.block.versions.put_back(self._downloads)

    def drop(self) -> None:
        """The lease was lost: nothing of it counts."""
        self.state = "lost"
        self._report("lost", f"lease lost: {self.lost}")

    def release(self) -> None:
        """Stop the heartbeats."""
        self.heartbeat.release()

    def _take_downloads(self) -> None:
        self._downloads = self._session.block.versions.take_downloads()

    def _make_offer(self, *, final: bool) -> UpdateOffer:
        session, lease = self._session, self.lease
        assert self._result is not None, "nothing is trained yet"
        if isinstance(self._result, LearnedDelta):
            self._result = session.block.encode(self._result, final=final)
        update = self._result
        claim = UpdateClaim(
            run=session.run,
            worker=session.worker,
            lease=lease.lease,
            fence=lease.fence,
            block=lease.block,
            base_version=lease.base_version,
            codec=session.config.swarm.codec,
            recipe=update.recipe,
            loss=update.loss,
        )
        self._report("trained", f"sending {update.blob.size:,} bytes", loss=update.loss)
        signature = session.client.key.sign_update(claim)
        return UpdateOffer(claim=claim, signature=signature, downloads=self._downloads)

    def _settle(self, receipt: Receipt) -> None:
        session, lease = self._session, self.lease
        self.state = "settled"
        session.block.settle(lease, accepted=receipt.state != "refused")
        if receipt.state == "refused":
            self._report("refused", f"update refused: {receipt.reason}")
            return
        session.events.contribution += session.text_bytes(lease.steps)
        note = f" ({receipt.reason})" if receipt.reason else ""
        self._report("accepted", f"block {lease.block}: {lease.steps} steps sent{note}")

    def _fail(self, error: BlocktrainError, *, give_back: bool) -> None:
        block = self._session.block
        if self.state != "committing" or isinstance(error, RefusedError):
            block.settle(self.lease, accepted=False)
        elif give_back:  # else the next process asks the coordinator
            block.settle(self.lease, accepted=None)
        if give_back:
            self.state = "settled"
            self._report("refused", f"update not sent: {error}")
            self.hand_over(str(error))

    def _report(self, kind: EventKind, text: str, loss: float | None = None) -> None:
        log.info("lease %s %s: %s", self.lease.lease, kind, text)
        self._session.events.report(kind, text, self.lease, loss=loss)


class LeaseHeartbeat:
    """Reports progress from the grant of a lease until its update is committed, so that neither a
    download nor a pause lets it expire; notices when the lease is lost."""

    def __init__(self, client: Client, lease: Lease) -> None:
        self.lost: str | None = None
        self._client, self._lease = client, lease
        self._progress = LeaseProgress(fence=lease.fence, steps_done=0)
        self._interval = heartbeat_interval(lease.seconds_left)
        self._released = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def update(self, steps_done: int, loss: float | None) -> None:
        """What to report next time."""
        self._progress = LeaseProgress(fence=self._lease.fence, steps_done=steps_done, loss=loss)

    def release(self) -> None:
        """Stop: there is nothing left to keep alive."""
        self._released.set()

    def give_back(self, reason: str, downloads: Downloads = ()) -> bool:
        """Stop, and return the lease. False: the coordinator has not confirmed it."""
        self.release()
        message = LeaseReturn(
            fence=self._lease.fence, reason=reason[:LONGEST_REASON], downloads=downloads
        )
        try:
            deadline = self._client.deadline(RETURN_SECONDS)
            self._client.give_back(self._lease.lease, message, deadline)
        except (RefusedError, UnreachableError):
            return False  # it is lost already, or will expire
        return True

    def _run(self) -> None:
        while not self._released.wait(self._interval):
            deadline = self._client.deadline(self._interval, lambda: not self._released.is_set())
            try:
                state = self._client.progress(self._lease.lease, self._progress, deadline)
            except UnreachableError:
                continue  # the coordinator may come back while the lease is still open
            except BlocktrainError as error:
                self._lose(str(error))
                return
            if not state.open:
                self._lose(state.reason or "the lease is no longer open")
                return

    def _lose(self, reason: str) -> None:
        if not self._released.is_set():
            self.lost = reason
