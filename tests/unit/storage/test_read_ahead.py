import threading
from collections.abc import Iterator

import pytest

from blocktrain.storage.merging import read_ahead


def test_items_come_in_order_and_to_the_end():
    assert list(read_ahead(iter(range(1, 100)), 8)) == list(range(1, 100))
    assert list(read_ahead(iter([]), 8)) == []


def test_no_more_than_so_many_are_made_ahead():
    made = []

    def numbers() -> Iterator[int]:
        for number in range(1, 20):
            made.append(number)
            yield number

    items = read_ahead(numbers(), 3)
    assert next(items) == 1
    items.close()
    assert len(made) <= 1 + 3


def test_the_next_item_is_made_while_one_is_worked_on():
    second = threading.Event()

    def numbers() -> Iterator[int]:
        yield 1
        second.set()
        yield 2

    items = read_ahead(numbers(), 2)
    assert next(items) == 1
    assert second.wait(10), "made by another thread"
    assert list(items) == [2]


def test_a_failure_comes_where_the_item_would_have():
    def numbers() -> Iterator[int]:
        yield 1
        raise RuntimeError("no second one")

    items = read_ahead(numbers(), 4)
    assert next(items) == 1
    with pytest.raises(RuntimeError, match="second"):
        next(items)
