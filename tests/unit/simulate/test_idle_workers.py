"""Who waits, and who of them is looked at when there is work again."""

from collections.abc import Callable, Collection, Mapping

from blocktrain.simulate.waiting import IdleWorkers


def parked(*workers: str, awaited: int | None = None) -> IdleWorkers:
    parking = IdleWorkers()
    for worker in workers:
        parking.add(worker, 5.0, awaited)
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


def first_of(
    parking: IdleWorkers, awaits: Callable[[str], int | None], without_text: Collection[int] = ()
) -> str | None:
    return parking.first(lambda block: block not in without_text, awaits, anyone)


def test_the_first_that_came_is_found_first_and_stays_until_it_leaves():
    parking = parked("a", "b")
    assert (first_of(parking, nobody), first_of(parking, nobody)) == ("a", "a")
    assert (parking.remove("a"), parking.remove("a")) == (5.0, None)
    assert first_of(parking, nobody) == "b"
    assert ("a" in parking, "b" in parking, len(parking)) == (False, True, 1)


def test_who_may_not_take_it_is_looked_at_again():
    parking = parked("a", "b")
    assert parking.first(lambda _: True, nobody, lambda worker: worker == "b") == "b"
    assert first_of(parking, nobody) == "a"


def test_who_awaits_something_is_asked_once_until_something_happens_to_its_block():
    parking = parked(*(f"w{number}" for number in range(100)), "free")
    awaits = Counted({f"w{number}": number % 2 for number in range(100)})
    assert [first_of(parking, awaits) for _ in range(10)] == ["free"] * 10
    assert awaits.asked == 110
    awaits.awaited.clear()
    assert first_of(parking, awaits) == "free"
    parking.remove("free")
    assert first_of(parking, awaits) is None
    assert len(parking) == 100
    parking.update_awaiting(1, awaits)
    assert first_of(parking, awaits) == "w1"


def test_who_awaits_something_is_found_where_its_block_does_not_hold_it_back():
    parking = parked("a", "b", awaited=2)
    assert parking.awaiting(2) == ("a", "b")
    assert first_of(parking, nobody) is None
    assert first_of(parking, nobody, without_text=[2]) == "a"
    parking.remove("a")
    assert first_of(parking, nobody, without_text=[2]) == "b"
    assert (parking.awaiting(2), parking.awaiting(1)) == (("b",), ())


def test_who_has_left_is_not_found_again():
    parking = parked("a", "b")
    assert first_of(parking, Counted({"a": 0, "b": 0})) is None
    parking.remove("a")
    parking.update_awaiting(0, nobody)
    assert first_of(parking, nobody) == "b"


def test_who_is_reconsidered_stands_with_those_who_await_the_same():
    parking = parked("a", "b", awaited=2)
    parking.update("a", nobody)
    parking.update("gone", nobody)
    assert (parking.awaiting(2), first_of(parking, nobody)) == (("b",), "a")
