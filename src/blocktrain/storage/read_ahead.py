"""Items that a thread of their own makes, while whoever asks for them works on those before.

Numpy, hashing and files let other threads run meanwhile, so that two processors are busy with one
merge. Knows nothing of what the items are.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")


def read_ahead(items: Iterator[Item], most: int) -> Iterator[Item]:
    """The same items in the same order, at most so many of them ahead; a failure comes where the
    item would have come."""
    with ThreadPoolExecutor(1) as thread:
        coming = deque(thread.submit(next, items, None) for _ in range(most))
        while (item := coming.popleft().result()) is not None:
            coming.append(thread.submit(next, items, None))
            yield item
