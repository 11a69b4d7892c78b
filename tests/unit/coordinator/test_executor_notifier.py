import asyncio
import threading

from blocktrain.coordinator.executor import Notifier


def test_news_from_another_thread_is_heard_by_all_who_wait():
    async def wait() -> None:
        news = Notifier()
        expected = [news.next() for _ in range(3)]
        thread = threading.Thread(target=news.notify)
        thread.start()
        async with asyncio.timeout(10):
            await asyncio.gather(*expected)
        thread.join()
        later = news.next()
        await asyncio.sleep(0.01)
        assert not later.done(), "what was told before is no news"

    asyncio.run(wait())


def test_whoever_waits_no_longer_is_forgotten():
    async def leave() -> Notifier:
        news = Notifier()
        news.next().cancel()
        await asyncio.sleep(0)
        assert news.waiting == 0
        news.next()
        return news

    asyncio.run(leave()).notify()  # to a loop that has ended
