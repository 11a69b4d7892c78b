"""Word of something new, from the thread that makes rounds to requests that wait for it.

Knows nothing of what is new. Only what this coordinator did itself is heard of: whoever waits looks
for itself now and then.
"""

import asyncio
import threading


class News:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected: set[asyncio.Future[None]] = set()

    def expected(self) -> "asyncio.Future[None]":
        """Done when there is news from now on. Not to be asked for by anything but a coroutine."""
        news = asyncio.get_running_loop().create_future()
        with self._lock:
            self._expected.add(news)
        news.add_done_callback(self._forget)
        return news

    def tell(self) -> None:
        """From any thread."""
        with self._lock:
            expected = list(self._expected)
        for news in expected:
            try:
                news.get_loop().call_soon_threadsafe(_settle, news)
            except RuntimeError:  # the loop has ended, and with it whoever waited
                self._forget(news)

    def _forget(self, news: "asyncio.Future[None]") -> None:
        with self._lock:
            self._expected.discard(news)


def _settle(news: "asyncio.Future[None]") -> None:
    if not news.done():
        news.set_result(None)
