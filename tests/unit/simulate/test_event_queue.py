"""The virtual clock: events happen in order, whatever page they are on."""

from hypothesis import given
from hypothesis import strategies as st

from blocktrain.simulate.simulation import EventQueue

times = st.lists(st.floats(0.0, 10.0), max_size=30)


@given(times, times)
def test_events_happen_by_time_and_then_in_the_order_they_were_scheduled_in(
    scheduled: list[float], delays: list[float]
):
    """Some are scheduled at the start, some by other events."""
    events, seen, more = EventQueue(), [], iter(delays)
    numbers = iter(range(1000))

    def schedule(time: float) -> None:
        events.at(time, happen, time, next(numbers))

    def happen(time: float, number: int) -> None:
        assert events.now == time
        seen.append((time, number))
        if (delay := next(more, None)) is not None:
            schedule(time + delay)

    for time in scheduled:
        schedule(time)
    events.run(until=1e6)
    assert seen == sorted(seen)
    assert len(seen) == len(scheduled) + len(delays) - len(list(more))
    assert events.handled == len(seen)
    assert events.now == 1e6


def test_events_after_the_end_do_not_happen():
    events, seen = EventQueue(), []
    for time in (1.0, 2.0, 2.5, 700.0):
        events.at(time, seen.append, time)
    events.run(until=2.0)
    assert (seen, events.now) == ([1.0, 2.0], 2.0)


def test_an_event_can_stop_the_clock():
    events, seen = EventQueue(), []
    events.at(1.0, events.stop)
    events.at(1.0, seen.append, "after the stop")
    events.run(until=5.0)
    assert (seen, events.now) == ([], 1.0)
