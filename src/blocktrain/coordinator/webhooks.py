"""Tells web services of events that an operator wants to know of: a POST request with JSON each.

A service that does not answer delays nothing: requests are made in a thread of their own, and if
too many wait, the oldest are dropped.
"""

import logging
import threading
from collections import deque
from collections.abc import Sequence

import httpx

from blocktrain.protocol.status_messages import Event, EventKind

NOTIFIED: tuple[EventKind, ...] = ("finished", "lost", "refused")
MOST_WAITING = 100
TRIES, FIRST_PAUSE = 4, 1.0  # the pause in seconds grows fourfold
TIMEOUT = 10.0

log = logging.getLogger(__name__)


class Webhooks:
    """Sends notifications from entering the context until it is left."""

    def __init__(self, run: str, urls: Sequence[str], first_pause: float = FIRST_PAUSE) -> None:
        self._run, self._urls, self._first_pause = run, urls, first_pause
        self._waiting: deque[tuple[Event, str]] = deque(maxlen=MOST_WAITING)
        self._changed, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="webhooks", daemon=True)

    def __enter__(self) -> "Webhooks":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._changed.set()
        self._thread.join(TIMEOUT)

    def notify(self, event: Event, text: str) -> None:
        """Queue a notification, if the event is of a kind that is sent. `text`: a sentence."""
        if self._urls and event.kind in NOTIFIED:
            self._waiting.append((event, text))
            self._changed.set()

    def _work(self) -> None:
        with httpx.Client(timeout=TIMEOUT) as client:
            while not (self._stop.is_set() and not self._waiting):
                self._changed.wait()
                self._changed.clear()
                while self._waiting:
                    event, text = self._waiting.popleft()
                    body: dict[str, object] = {
                        "run": self._run,
                        "text": text,
                        "event": event.model_dump(),
                    }
                    for url in self._urls:
                        self._send(client, url, body)

    def _send(self, client: httpx.Client, url: str, body: dict[str, object]) -> None:
        host = httpx.URL(url).host  # the rest of an address may be a secret
        for attempt in range(TRIES):
            if attempt and self._stop.wait(self._first_pause * 4 ** (attempt - 1)):
                return
            try:
                status = client.post(url, json=body).status_code
            except httpx.HTTPError as error:
                problem = str(error) or type(error).__name__
            else:
                if status < 300:
                    return
                problem = f"it answered {status}"
                if 400 <= status < 500 and status != 429:
                    break
        log.warning("cannot notify the webhook at %s: %s", host, problem)
