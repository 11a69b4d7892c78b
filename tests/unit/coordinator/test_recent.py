"""What was looked up a moment ago."""

from concurrent.futures import ThreadPoolExecutor

from blocktrain.coordinator.limits import LruCache


def test_what_is_remembered_is_known_until_it_is_forgotten():
    recent: LruCache[int] = LruCache(2)
    recent.remember("a", 1)
    assert (recent.get("a"), recent.get("b")) == (1, None)
    assert recent.forget("a") == 1
    assert recent.get("a") is None
    assert recent.forget("a") is None


def test_what_was_named_last_stays():
    recent: LruCache[int] = LruCache(2)
    for name in ("a", "b", "a", "c"):
        recent.remember(name, 1)
    assert [recent.get(name) for name in ("a", "b", "c")] == [1, None, 1]


def test_threads_do_not_disturb_each_other():
    recent: LruCache[int] = LruCache(8)

    def use(number: int) -> None:
        for turn in range(500):
            recent.remember(f"{number}-{turn}", turn)
            recent.forget(f"{number}-{turn - 3}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use, range(4)))
    kept = [recent.get(f"{number}-{turn}") for number in range(4) for turn in range(500)]
    assert len([turn for turn in kept if turn is not None]) <= 8
