"""The virtual clock: everything in its order, whatever page it stands on."""

from hypothesis import given
from hypothesis import strategies as st

from blocktrain.simulate.agenda import Agenda

times = st.lists(st.floats(0.0, 10.0), max_size=30)


@given(times, times)
def test_things_happen_in_the_order_of_their_times_and_then_of_their_planning(
    planned: list[float], delays: list[float]
):
    """Some are planned from the start, some as others happen."""
    agenda, seen, more = Agenda(), [], iter(delays)
    numbers = iter(range(1000))

    def plan(time: float) -> None:
        agenda.at(time, happen, time, next(numbers))

    def happen(time: float, number: int) -> None:
        assert agenda.now == time
        seen.append((time, number))
        if (delay := next(more, None)) is not None:
            plan(time + delay)

    for time in planned:
        plan(time)
    agenda.run(until=1e6)
    assert seen == sorted(seen)
    assert len(seen) == len(planned) + len(delays) - len(list(more))
    assert agenda.happened == len(seen)
    assert agenda.now == 1e6


def test_what_is_planned_for_later_than_the_end_does_not_happen():
    agenda, seen = Agenda(), []
    for time in (1.0, 2.0, 2.5, 700.0):
        agenda.at(time, seen.append, time)
    agenda.run(until=2.0)
    assert (seen, agenda.now) == ([1.0, 2.0], 2.0)


def test_whoever_ends_it_stops_the_clock():
    agenda, seen = Agenda(), []
    agenda.at(1.0, agenda.end)
    agenda.at(1.0, seen.append, "after the end")
    agenda.run(until=5.0)
    assert (seen, agenda.now) == ([], 1.0)
