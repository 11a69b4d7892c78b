"""Which blocks are open, and how many of their batches may be leased."""

import pytest
from tests.support.blocks import block as new_block
from tests.support.blocks import merged

from blocktrain.swarm.order import Order


def open_now(order: Order, *merged_batches: int) -> list[tuple[int, int]]:
    """Open blocks of 100 batches each, with the batches that may be leased."""
    blocks = [merged(index, count) for index, count in enumerate(merged_batches)]
    return [(block.index, order.available(block)) for block in order.open_blocks(blocks)]


@pytest.mark.parametrize(
    ("done", "expected"),
    [
        ((0, 0, 0), [(0, 30)]),
        ((29, 0, 0), [(0, 1)]),
        ((30, 0, 0), [(1, 30)]),
        ((30, 30, 12), [(2, 18)]),
        ((30, 30, 30), [(0, 30)]),
        ((100, 90, 90), [(1, 10)]),  # the last turn is shorter
        ((100, 100, 100), []),
    ],
)
def test_blocks_take_turns(done: tuple[int, ...], expected: list[tuple[int, int]]):
    assert open_now(Order(turn_steps=30), *done) == expected


def test_a_relay_has_one_turn_per_block():
    relay = Order(turn_steps=100)
    assert open_now(relay, 60, 0) == [(0, 40)]
    assert open_now(relay, 100, 0) == [(1, 100)]
    assert open_now(relay, 100, 100) == []


def test_returned_batches_of_a_turn_are_leased_again_before_the_next_turn():
    block = new_block(merged_batches=25, next_batch=30, returned_batches=5)
    assert Order(turn_steps=30).available(block) == 5


@pytest.mark.parametrize("order", [Order(turn_steps=100, inherits=True), Order(0.5, 0, True)])
def test_a_block_opens_only_after_it_has_inherited(order: Order):
    first, second = merged(0, 100), merged(1, 0, version=0)
    assert order.heirs([merged(0, 40), second]) == []
    assert order.heirs([first, second]) == [second]
    assert second not in order.open_blocks([first, second])
    heir = merged(1, 0, version=1)
    assert order.heirs([first, heir]) == []
    assert heir in order.open_blocks([first, heir])


def test_an_extended_relay_has_a_turn_per_block_and_phase():
    relay = Order(turn_steps=100, extended_at=(60,))
    assert open_now(relay, 20, 0) == [(0, 40)]
    assert open_now(relay, 60, 0) == [(1, 60)]
    assert open_now(relay, 60, 60) == [(0, 40)]
    assert open_now(relay, 100, 60) == [(1, 40)]


def test_turns_begin_anew_after_an_extension():
    order = Order(turn_steps=40, extended_at=(50,))
    assert open_now(order, 40, 40) == [(0, 10)]
    assert open_now(order, 50, 45) == [(1, 5)]
    assert open_now(order, 50, 50) == [(0, 40)]
    assert open_now(order, 90, 90) == [(0, 10)]
