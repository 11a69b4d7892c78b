"""Waking coroutines from other threads."""

import asyncio
import threading
import weakref

from blocktrain.coordinator.executor import Notifier


def test_a_notification_from_another_thread_wakes_all_that_wait():
    async def wait() -> None:
        notifier = Notifier()
        futures = [notifier.next() for _ in range(3)]
        thread = threading.Thread(target=notifier.notify)
        thread.start()
        async with asyncio.timeout(10):
            await asyncio.gather(*futures)
        thread.join()
        later = notifier.next()
        await asyncio.sleep(0.01)
        assert not later.done(), "notified before it was made"

    asyncio.run(wait())


def test_a_cancelled_future_is_forgotten():
    async def leave() -> Notifier:
        notifier = Notifier()
        future = notifier.next()
        future.cancel()
        cancelled = weakref.ref(future)
        del future
        await asyncio.sleep(0)
        assert cancelled() is None
        notifier.next()
        return notifier

    asyncio.run(leave()).notify()  # to a loop that has ended
