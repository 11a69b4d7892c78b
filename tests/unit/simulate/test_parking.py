"""Who waits, and who of them is looked at when there is work again."""

from collections.abc import Callable, Mapping

from blocktrain.simulate.parking import Parking


def parked(*workers: str) -> Parking:
    parking = Parking()
    for worker in workers:
        parking.park(worker, 5.0)
    return parking


def nobody(worker: str) -> int | None:
    return None


def anyone(worker: str) -> bool:
    return True


class Counted:
    """What workers await, and how often that was asked."""

    def __init__(self, awaited: Mapping[str, int]) -> None:
        self.awaited, self.asked = dict(awaited), 0

    def __call__(self, worker: str) -> int | None:
        self.asked += 1
        return self.awaited.get(worker)


def first_of(parking: Parking, awaits: Callable[[str], int | None]) -> str | None:
    return parking.first(awaits, anyone)


def test_the_first_that_came_is_found_first_and_stays_until_it_leaves():
    parking = parked("a", "b")
    assert (first_of(parking, nobody), first_of(parking, nobody)) == ("a", "a")
    assert (parking.leave("a"), parking.leave("a")) == (5.0, None)
    assert first_of(parking, nobody) == "b"
    assert ("a" in parking, "b" in parking, len(parking)) == (False, True, 1)


def test_who_may_not_take_it_is_looked_at_again():
    parking = parked("a", "b")
    assert parking.first(nobody, lambda worker: worker == "b") == "b"
    assert parking.first(nobody, anyone) == "a"


def test_who_awaits_something_is_asked_once_until_something_happens_to_its_block():
    parking = parked(*(f"w{number}" for number in range(100)), "free")
    awaits = Counted({f"w{number}": number % 2 for number in range(100)})
    assert [first_of(parking, awaits) for _ in range(10)] == ["free"] * 10
    assert awaits.asked == 110
    awaits.awaited.clear()
    assert first_of(parking, awaits) == "free"
    parking.leave("free")
    assert first_of(parking, awaits) is None
    assert len(parking) == 100
    parking.look_again(1)
    assert first_of(parking, awaits) == "w1"


def test_who_has_left_is_not_found_again():
    parking = parked("a", "b")
    assert first_of(parking, Counted({"a": 0, "b": 0})) is None
    parking.leave("a")
    parking.look_again(0)
    assert first_of(parking, nobody) == "b"
