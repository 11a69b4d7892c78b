"""One lease, from its grant to the coordinator's answer about its update.

The main thread trains it, a second thread sends its update while the next lease is trained, and a
third sends heartbeats throughout.
"""

import logging
import threading
from dataclasses import dataclass

from blocktrain import faults
from blocktrain.config import Config
from blocktrain.errors import BlocktrainError, ProtocolError, RefusedError, UnreachableError
from blocktrain.protocol.identity import update_text
from blocktrain.protocol.messages import (
    Downloads,
    Lease,
    LeaseProgress,
    LeaseReturn,
    Receipt,
    Recipe,
    UpdateClaim,
    UpdateOffer,
)
from blocktrain.swarm.lease_terms import heartbeat_interval
from blocktrain.worker.client import Client
from blocktrain.worker.kept_states import KeptStates
from blocktrain.worker.local_block import LearnedDelta, LocalBlock, TrainedLease
from blocktrain.worker.machine import Deadline, EventKind, EventReporter
from blocktrain.worker.transfer import SendStage, Transfer

RETURN_SECONDS = 5.0
LONGEST_REASON = 500

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunSession:
    """What a worker needs for every lease after it has joined a run."""

    run: str
    worker: str
    config: Config
    client: Client
    transfer: Transfer
    block: LocalBlock
    kept: KeptStates
    events: EventReporter


class LeaseWork:
    def __init__(self, session: RunSession, lease: Lease) -> None:
        self.lease = lease
        self.offered = threading.Event()  # the coordinator knows of the update
        self.heartbeat = LeaseHeartbeat(session.client, lease)
        self._session = session
        self._result: LearnedDelta | Recipe | None = None
        self._loss = 0.0
        self._may_count = False  # the update may be accepted even if no answer arrives
        self._downloads: Downloads = ()  # reported with the update or with the return
        last = lease.first_batch + lease.steps - 1
        self.report("leased", f"block {lease.block}, batches {lease.first_batch} to {last}")

    def shorten(self, trained: TrainedLease) -> bool:
        """Tell the coordinator that the lease ends after the steps that were trained. Returns False
        if the lease is lost."""
        steps, client = trained.steps, self._session.client
        ended = LeaseProgress(fence=self.lease.fence, steps_done=steps, ends=True)
        try:
            state = client.progress(self.lease.lease, ended, client.deadline(RETURN_SECONDS))
        except BlocktrainError as error:
            self.heartbeat.lost = str(error)
            return False
        if not state.open:
            self.heartbeat.lost = state.reason
            return False
        self.lease = self.lease.model_copy(update={"steps": steps})
        return True

    def keep(self, trained: TrainedLease) -> None:
        """Copy the result out of the block, so that the block can be trained further. The previous
        update must be settled, because its residual is added here."""
        block, self._loss = self._session.block, trained.loss
        self._result = block.learned(trained) if block.encodes else block.write(trained)

    def take_downloads(self) -> None:
        """Assign the downloads so far to this lease. Call this before another thread calls
        `send`."""
        self._downloads = self._session.block.versions.take_downloads()

    def send(self, deadline: Deadline, *, final: bool) -> BlocktrainError | None:
        """Encode and send the update. Returns the error that prevented it, after giving the lease
        back, unless `deadline.wanted()` is false by then: in that case the caller gives the lease
        back. `final`: the update is probably this worker's last of the block."""
        try:
            offer = self._make_offer(final=final)
            if not deadline.wanted():
                raise UnreachableError("the update was abandoned before it was sent")
            receipt = self._session.transfer.send(offer, deadline, self._on_stage)
        except (UnreachableError, RefusedError, ProtocolError) as error:
            self._fail(error, give_back=deadline.wanted())
            return error
        faults.reached("sent")
        self._settle(receipt)
        return None

    def give_back(self, reason: str) -> None:
        """Return a lease whose update is not being sent, and report its downloads."""
        self.take_downloads()
        self.hand_over(reason)
        self.report("returned", f"lease given back: {reason}")

    def hand_over(self, reason: str) -> None:
        """Return the lease, so that another worker can have it at once. If this fails, the next
        update reports the downloads."""
        self.heartbeat.release()
        client, lease = self._session.client, self.lease
        message = LeaseReturn(
            fence=lease.fence, reason=reason[:LONGEST_REASON], downloads=self._downloads
        )
        try:
            client.give_back(lease.lease, message, client.deadline(RETURN_SECONDS))
        except (RefusedError, UnreachableError):  # the lease is lost already, or will expire
            self._session.block.versions.put_back(self._downloads)

    def report(self, kind: EventKind, text: str, loss: float | None = None) -> None:
        log.info("lease %s %s: %s", self.lease.lease, kind, text)
        self._session.events.report(kind, text, self.lease, loss=loss)

    def _on_stage(self, stage: SendStage) -> None:
        if stage == "offered":
            self.offered.set()
        self._may_count = stage == "committing"

    def _make_offer(self, *, final: bool) -> UpdateOffer:
        session, lease, recipe = self._session, self.lease, self._result
        if isinstance(recipe, LearnedDelta):
            recipe = self._result = session.block.encode(recipe, final=final)
        assert recipe is not None, "keep() has not been called"
        claim = UpdateClaim(
            run=session.run,
            worker=session.worker,
            lease=lease.lease,
            fence=lease.fence,
            block=lease.block,
            base_version=lease.base_version,
            codec=session.config.swarm.codec,
            recipe=recipe,
            loss=self._loss,
            commitment=session.block.commitment(lease),
        )
        self.report("trained", f"sending {recipe.size:,} bytes", loss=self._loss)
        signature = session.client.key.sign(update_text(claim))
        return UpdateOffer(claim=claim, signature=signature, downloads=self._downloads)

    def _settle(self, receipt: Receipt) -> None:
        session, lease = self._session, self.lease
        session.block.settle(lease, accepted=receipt.state != "refused")
        if receipt.state == "refused":
            self.report("refused", f"update refused: {receipt.reason}")
            return
        session.events.contribution += lease.steps * session.config.bytes_per_step
        note = f" ({receipt.reason})" if receipt.reason else ""
        self.report(
            "accepted", f"block {lease.block}: update of {lease.steps} steps accepted{note}"
        )

    def _fail(self, error: BlocktrainError, *, give_back: bool) -> None:
        block = self._session.block
        if not self._may_count or isinstance(error, RefusedError):
            block.settle(self.lease, accepted=False)
        elif give_back:  # otherwise the next process that uses this folder asks the coordinator
            block.settle(self.lease, accepted=None)
        if give_back:
            self.report("refused", f"update not sent: {error}")
            self.hand_over(str(error))


class LeaseHeartbeat:
    """Reports progress from the grant of a lease until its update is committed, so that neither a
    download nor a pause lets it expire. Notices when the lease is lost."""

    def __init__(self, client: Client, lease: Lease) -> None:
        self.lost: str | None = None  # the reason, once the lease is lost
        self._client, self._lease = client, lease
        self.progress = LeaseProgress(fence=lease.fence, steps_done=0)  # the next report
        self._deadline = client.clock.monotonic() + lease.seconds_left
        self._interval = heartbeat_interval(lease.seconds_left)
        self._released = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def seconds_left(self) -> float:
        """Time until the deadline, as of the last answer to a heartbeat."""
        return self._deadline - self._client.clock.monotonic()

    def release(self) -> None:
        """Stop sending heartbeats."""
        self._released.set()

    def _run(self) -> None:
        while not self._released.wait(self._interval):
            deadline = self._client.deadline(self._interval, lambda: not self._released.is_set())
            try:
                state = self._client.progress(self._lease.lease, self.progress, deadline)
            except UnreachableError:
                continue  # the coordinator may come back while the lease is still open
            except BlocktrainError as error:
                lost = str(error)
            else:
                self._deadline = self._client.clock.monotonic() + state.seconds_left
                lost = "" if state.open else state.reason or "the lease is no longer open"
            if lost and not self._released.is_set():
                self.lost = lost
                return
