"""Threads that work through a list together; the first failure ends the work of all.

They are daemons, so that a program that was told to end does not wait for a network.
"""

import queue
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

POLL_SECONDS = 0.5  # a wait without an end cannot be interrupted on every system

Item = TypeVar("Item")


def side_by_side(
    work: Callable[[Item, Callable[[], bool]], None], items: Iterable[Item], threads: int
) -> None:
    """Call `work(item, still_wanted)` for every item; raise what the first failure raised."""
    todo = list(reversed(list(items)))
    members = min(threads, len(todo))
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    stopped = threading.Event()

    def serve() -> None:
        try:
            while not stopped.is_set():
                try:
                    item = todo.pop()
                except IndexError:
                    break
                work(item, lambda: not stopped.is_set())
        except BaseException as error:  # whatever it is, it belongs to the thread that waits
            ended.put(error)
        else:
            ended.put(None)

    try:
        for _ in range(members):
            threading.Thread(target=serve, daemon=True).start()
        for _ in range(members):
            if failure := _next(ended):
                raise failure
    finally:
        stopped.set()


def _next(ended: "queue.SimpleQueue[BaseException | None]") -> BaseException | None:
    while True:
        try:
            return ended.get(timeout=POLL_SECONDS)
        except queue.Empty:
            continue
