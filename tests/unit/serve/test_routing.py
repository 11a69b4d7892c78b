"""Routes cover every block after the router's, in order, through the stages with least to do."""

from hypothesis import given
from hypothesis import strategies as st

from blocktrain.serve.router.pipeline import StagePlace, choose, missing


def test_a_route_goes_through_every_block_in_order() -> None:
    places = [StagePlace("c", 3, 4), StagePlace("b", 1, 3)]
    assert choose(places, 4) == ("b", "c")


def test_the_replica_with_less_to_do_is_taken() -> None:
    places = [StagePlace("busy", 1, 2, load=3), StagePlace("idle", 1, 2, load=1)]
    assert choose(places, 2) == ("idle",)


def test_a_stage_that_leads_nowhere_is_not_taken() -> None:
    places = [
        StagePlace("dead end", 1, 3),
        StagePlace("b", 1, 2, load=9),
        StagePlace("c", 2, 4, load=9),
    ]
    assert choose(places, 4) == ("b", "c")


def test_stages_that_do_not_reach_each_other_are_kept_apart() -> None:
    places = [StagePlace("b", 1, 2), StagePlace("c", 2, 3), StagePlace("d", 2, 3, load=5)]
    assert choose(places, 3) == ("b", "c")
    assert choose(places, 3, broken={("b", "c")}) == ("b", "d")
    assert choose(places, 3, broken={("b", "c"), ("b", "d")}) is None


def test_a_model_of_one_block_needs_no_stage() -> None:
    assert choose([], 1) == ()
    assert missing([], 1) == []


def test_missing_blocks_are_named() -> None:
    assert choose([StagePlace("c", 2, 3)], 4) is None
    assert missing([StagePlace("c", 2, 3)], 4) == [1, 3]


@given(
    st.integers(2, 6),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3), st.integers(0, 9)), max_size=9),
)
def test_a_route_is_whole_or_there_is_none(blocks: int, held: list[tuple[int, int, int]]) -> None:
    places = [StagePlace(f"s{i}", a, a + n, load) for i, (a, n, load) in enumerate(held)]
    by_address = {place.address: place for place in places}
    route = choose(places, blocks)
    if route is None:
        assert not any(p.first == 1 and p.stop >= blocks for p in places)
        return
    at = 1
    for address in route:
        assert by_address[address].first == at
        at = by_address[address].stop
    assert at >= blocks
