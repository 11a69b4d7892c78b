"""Makes and sends updates while the next lease is trained: one at a time, in its own thread."""

import threading
from collections.abc import Callable

from blocktrain import faults
from blocktrain.errors import BlocktrainError, ProtocolError, RefusedError, UnreachableError
from blocktrain.protocol.messages import Lease, Receipt, UpdateOffer
from blocktrain.worker.heartbeat import LeaseHeartbeat
from blocktrain.worker.transfer import Transfer

POLL_SECONDS = 0.2
END_SECONDS = 2.0  # for what was abandoned to come to its end

OnReceipt = Callable[[Lease, Receipt], None]
OnFailure = Callable[[LeaseHeartbeat, BlocktrainError, bool], None]
OnUnsent = Callable[[Lease], None]


class Uploader:
    def __init__(
        self,
        transfer: Transfer,
        seconds: float,
        on_receipt: OnReceipt,
        on_failure: OnFailure,
        on_unsent: OnUnsent,
    ) -> None:
        """`seconds`: for how long an update is worth trying to send. `on_failure`: told why it was
        not, and whether it may count all the same, because only the answer was lost; the lease is
        its to give back. `on_unsent`: told of what was abandoned, where it is certain that it does
        not count."""
        self._transfer, self._seconds = transfer, seconds
        self._on_receipt, self._on_failure = on_receipt, on_failure
        self._on_unsent = on_unsent
        self._thread: threading.Thread | None = None
        self._keeper: LeaseHeartbeat | None = None
        self._broken: Exception | None = None
        self._abandoned = False
        self._offered = threading.Event()
        self.send_seconds = 0.0  # what the last update took

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def lease(self) -> Lease | None:
        """Whose update is being made or sent."""
        keeper = self._keeper
        return keeper.lease if self.busy and keeper else None

    def start(self, prepare: Callable[[], UpdateOffer], keeper: LeaseHeartbeat) -> None:
        """Begin to send what `prepare` makes; the lease is kept until the update is committed."""
        assert not self.busy, "one update at a time"
        self._keeper = keeper
        self._offered.clear()
        self._thread = threading.Thread(target=self._send, args=(prepare, keeper), daemon=True)
        self._thread.start()

    def offered(self, wanted: Callable[[], bool] = lambda: True) -> bool:
        """Wait until the coordinator knows of the update; before that it would hand out the same
        lease again. False: it was no longer wanted."""
        while self.busy and not self._offered.wait(POLL_SECONDS):
            if not wanted():
                return False
        return True

    def finish(self, wanted: Callable[[], bool] = lambda: True) -> bool:
        """Wait until all is sent; False: it was no longer wanted before that. What no retry helps
        against, such as a full disk, is raised here, and by `check`."""
        while self._thread and self._thread.is_alive():
            if not wanted():
                return False
            self._thread.join(POLL_SECONDS)
        self.check()
        return True

    def check(self) -> None:
        """Raise what no retry helps against."""
        if self._broken:
            raise self._broken

    def abandon(self, reason: str) -> None:
        """Give up what is still being sent, and its lease with it."""
        if self._abandoned:
            return
        self._abandoned = True
        if self._thread and self._thread.is_alive() and self._keeper:
            self._keeper.give_back(reason)
            self._thread.join(END_SECONDS)

    def _send(self, prepare: Callable[[], UpdateOffer], keeper: LeaseHeartbeat) -> None:
        client = self._transfer.client
        patience = client.patience(self._seconds, lambda: not self._abandoned)
        began = client.clock.monotonic()
        committing = threading.Event()
        try:
            offer = prepare()
            if self._abandoned:
                raise UnreachableError("it was given up before it was sent")
            receipt = self._transfer.send(offer, patience, self._offered.set, committing.set)
            self.send_seconds = client.clock.monotonic() - began
            faults.reached("sent")
            self._on_receipt(keeper.lease, receipt)
        except (UnreachableError, RefusedError, ProtocolError) as error:
            may_count = committing.is_set() and not isinstance(error, RefusedError)
            if not self._abandoned:
                self._on_failure(keeper, error, may_count)
            elif not may_count:
                self._on_unsent(keeper.lease)
        except Exception as error:
            self._broken = error
            keeper.give_back(str(error))
        finally:
            keeper.release()
