import numpy as np
import pytest

from blocktrain.errors import CacheFullError, MissingPrefixError
from blocktrain.serve.stage.batch import Row, SlotTable


def row(request: int, start: int = 0) -> Row:
    return Row(request, start, np.zeros(1, np.uint16), 1)


def test_slots_in_use_lie_together():
    tenants = SlotTable(4, 10.0)
    assert [t.slot for t in tenants.admit([row(7), row(8), row(9)], 0.0)] == [0, 1, 2]
    tenants.release(7)
    tenants.release(7)
    assert [t.slot for t in tenants.admit([row(5), row(6)], 0.0)] == [0, 3]
    assert set(tenants.requests) == {8, 9, 5, 6}


def test_what_does_not_begin_where_it_is_held_is_named():
    tenants = SlotTable(4, 10.0)
    tenants.admit([row(1)], 0.0)[0].held = 5
    with pytest.raises(MissingPrefixError) as missing:
        tenants.admit([row(1, 5), row(2, 1), row(3)], 0.0)
    assert missing.value.requests == (2,)
    assert tenants.requests == (1,)
    assert (tenants.held(1), tenants.held(2)) == (5, 0)


def test_the_one_idle_longest_makes_room_and_nobody_else():
    tenants = SlotTable(2, 10.0)
    tenants.admit([row(1)], 0.0)
    tenants.admit([row(2)], 5.0)
    with pytest.raises(CacheFullError, match="2 requests") as full:
        tenants.admit([row(3)], 9.0)
    assert full.value.requests == (3,)
    tenants.admit([row(3)], 12.0)
    assert set(tenants.requests) == {2, 3}
    # A request that is in the step itself is not idle.
    with pytest.raises(CacheFullError):
        tenants.admit([row(2), row(4)], 17.0)
    tenants.admit([row(4)], 30.0)
    assert set(tenants.requests) == {2, 4}
