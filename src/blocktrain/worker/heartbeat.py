"""Keeps a lease: says now and then that its work goes on, and learns when it is lost.

Works in a thread of its own from the moment the lease is given until its update is committed, so
that neither a download nor a pause lets it run out.
"""

import threading

from blocktrain.errors import BlocktrainError, RefusedError, UnreachableError
from blocktrain.protocol.messages import Downloads, Lease, LeaseProgress, LeaseReturn
from blocktrain.swarm.lease_terms import heartbeat_interval
from blocktrain.worker.client import Client

RETURN_SECONDS = 5.0
LONGEST_REASON = 500


class LeaseHeartbeat:
    def __init__(self, client: Client, lease: Lease) -> None:
        self.lease = lease
        self.lost: str | None = None  # why the lease is no longer ours
        self.downloads: Downloads = ()  # to be told with its update, or else with its return
        self._client = client
        self._progress = LeaseProgress(fence=lease.fence, steps_done=0)
        self._interval = heartbeat_interval(lease.seconds_left)
        self._released = threading.Event()
        threading.Thread(target=self._keep, daemon=True).start()

    def report(self, steps_done: int, loss: float | None) -> None:
        """What to say next time."""
        self._progress = LeaseProgress(fence=self.lease.fence, steps_done=steps_done, loss=loss)

    def release(self) -> None:
        """There is nothing left to keep."""
        self._released.set()

    def give_back(self, reason: str) -> bool:
        """Hand the lease back, so that somebody else can have it at once. False: nobody has said
        that they heard it, nor what was downloaded."""
        self.release()
        message = LeaseReturn(
            fence=self.lease.fence, reason=reason[:LONGEST_REASON], downloads=self.downloads
        )
        try:
            self._client.give_back(self.lease.lease, message, self._client.patience(RETURN_SECONDS))
        except (RefusedError, UnreachableError):
            return False  # it is lost anyway, or will run out by itself
        return True

    def _keep(self) -> None:
        while not self._released.wait(self._interval):
            wanted = self._client.patience(self._interval, lambda: not self._released.is_set())
            try:
                state = self._client.progress(self.lease.lease, self._progress, wanted)
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
