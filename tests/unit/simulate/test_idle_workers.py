"""Which waiting workers are considered when there is work again."""

from collections.abc import Callable, Collection, Mapping

from blocktrain.simulate.waiting import IdleWorkers


def idle_workers(*workers: str, awaited: int | None = None) -> IdleWorkers:
    idle = IdleWorkers()
    for worker in workers:
        idle.add(worker, 5.0, awaited)
    return idle


def awaits_nothing(worker: str) -> int | None:
    return None


def always(worker: str) -> bool:
    return True


class Counted:
    """What workers await; counts how often that was asked."""

    def __init__(self, awaited: Mapping[str, int]) -> None:
        self.awaited, self.asked = dict(awaited), 0

    def __call__(self, worker: str) -> int | None:
        self.asked += 1
        return self.awaited.get(worker)


def first_of(
    idle: IdleWorkers, awaits: Callable[[str], int | None], without_text: Collection[int] = ()
) -> str | None:
    return idle.first(lambda block: block not in without_text, awaits, always)


def test_the_first_worker_stays_first_until_it_is_removed():
    idle = idle_workers("a", "b")
    assert (first_of(idle, awaits_nothing), first_of(idle, awaits_nothing)) == ("a", "a")
    assert (idle.remove("a"), idle.remove("a")) == (5.0, None)
    assert first_of(idle, awaits_nothing) == "b"
    assert ("a" in idle, "b" in idle, len(idle)) == (False, True, 1)


def test_a_worker_without_work_is_considered_again():
    idle = idle_workers("a", "b")
    assert idle.first(lambda _: True, awaits_nothing, lambda worker: worker == "b") == "b"
    assert first_of(idle, awaits_nothing) == "a"


def test_a_worker_that_awaits_a_block_is_examined_once_until_the_block_changes():
    idle = idle_workers(*(f"w{number}" for number in range(100)), "free")
    awaits = Counted({f"w{number}": number % 2 for number in range(100)})
    assert [first_of(idle, awaits) for _ in range(10)] == ["free"] * 10
    assert awaits.asked == 110
    awaits.awaited.clear()
    assert first_of(idle, awaits) == "free"
    idle.remove("free")
    assert first_of(idle, awaits) is None
    assert len(idle) == 100
    idle.update_awaiting(1, awaits)
    assert first_of(idle, awaits) == "w1"


def test_a_worker_that_awaits_a_closed_block_is_considered():
    idle = idle_workers("a", "b", awaited=2)
    assert idle.awaiting(2) == ("a", "b")
    assert first_of(idle, awaits_nothing) is None
    assert first_of(idle, awaits_nothing, without_text=[2]) == "a"
    idle.remove("a")
    assert first_of(idle, awaits_nothing, without_text=[2]) == "b"
    assert (idle.awaiting(2), idle.awaiting(1)) == (("b",), ())


def test_a_removed_worker_is_not_considered():
    idle = idle_workers("a", "b")
    assert first_of(idle, Counted({"a": 0, "b": 0})) is None
    idle.remove("a")
    idle.update_awaiting(0, awaits_nothing)
    assert first_of(idle, awaits_nothing) == "b"


def test_an_updated_worker_joins_those_that_await_the_same_block():
    idle = idle_workers("a", "b", awaited=2)
    idle.update("a", awaits_nothing)
    idle.update("gone", awaits_nothing)
    assert (idle.awaiting(2), first_of(idle, awaits_nothing)) == (("b",), "a")
