import numpy as np
import pytest

from blocktrain.errors import CacheFullError, MissingPrefixError
from blocktrain.serve.ring.activations import Row
from blocktrain.serve.ring.batch import SlotTable


def row(request: int, start: int = 0) -> Row:
    return Row(request, start, np.zeros(1, np.uint16), 1)


def test_low_slots_are_used_first():
    slots = SlotTable(4, 10.0)
    assert [owner.slot for owner in slots.admit([row(7), row(8), row(9)], 0.0)] == [0, 1, 2]
    slots.release(7)
    slots.release(7)
    assert [owner.slot for owner in slots.admit([row(5), row(6)], 0.0)] == [0, 3]
    assert set(slots.requests) == {8, 9, 5, 6}


def test_requests_whose_context_is_not_cached_are_named():
    slots = SlotTable(4, 10.0)
    slots.admit([row(1)], 0.0)[0].cached = 5
    with pytest.raises(MissingPrefixError) as missing:
        slots.admit([row(1, 5), row(2, 1), row(3)], 0.0)
    assert missing.value.requests == (2,)
    assert slots.requests == (1,)
    assert (slots.cached(1), slots.cached(2)) == (5, 0)


def test_the_request_idle_longest_loses_its_slot():
    slots = SlotTable(2, 10.0)
    slots.admit([row(1)], 0.0)
    slots.admit([row(2)], 5.0)
    with pytest.raises(CacheFullError, match="all 2 slots") as full:
        slots.admit([row(3)], 9.0)
    assert full.value.requests == (3,)
    slots.admit([row(3)], 12.0)
    assert set(slots.requests) == {2, 3}
    # A request that is in the step itself is not idle.
    with pytest.raises(CacheFullError):
        slots.admit([row(2), row(4)], 17.0)
    slots.admit([row(4)], 30.0)
    assert set(slots.requests) == {2, 4}
