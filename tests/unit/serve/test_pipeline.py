"""Routes cover every block after the router's, in order, through the stages with least to do."""

from hypothesis import given
from hypothesis import strategies as st

from blocktrain.serve.router.pipeline import StageInfo, choose_route, missing_blocks


def test_a_route_goes_through_every_block_in_order() -> None:
    stages = [StageInfo("c", 3, 4), StageInfo("b", 1, 3)]
    assert choose_route(stages, 4) == ("b", "c")


def test_the_replica_with_less_to_do_is_taken() -> None:
    stages = [StageInfo("busy", 1, 2, load=3), StageInfo("idle", 1, 2, load=1)]
    assert choose_route(stages, 2) == ("idle",)


def test_a_stage_that_leads_nowhere_is_not_taken() -> None:
    stages = [
        StageInfo("dead end", 1, 3),
        StageInfo("b", 1, 2, load=9),
        StageInfo("c", 2, 4, load=9),
    ]
    assert choose_route(stages, 4) == ("b", "c")


def test_stages_that_do_not_reach_each_other_are_kept_apart() -> None:
    stages = [StageInfo("b", 1, 2), StageInfo("c", 2, 3), StageInfo("d", 2, 3, load=5)]
    assert choose_route(stages, 3) == ("b", "c")
    assert choose_route(stages, 3, broken={("b", "c")}) == ("b", "d")
    assert choose_route(stages, 3, broken={("b", "c"), ("b", "d")}) is None


def test_a_model_of_one_block_needs_no_stage() -> None:
    assert choose_route([], 1) == ()
    assert missing_blocks([], 1) == []


def test_missing_blocks_are_named() -> None:
    assert choose_route([StageInfo("c", 2, 3)], 4) is None
    assert missing_blocks([StageInfo("c", 2, 3)], 4) == [1, 3]


@given(
    st.integers(2, 6),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3), st.integers(0, 9)), max_size=9),
)
def test_a_route_is_whole_or_there_is_none(blocks: int, held: list[tuple[int, int, int]]) -> None:
    stages = [StageInfo(f"s{i}", a, a + n, load) for i, (a, n, load) in enumerate(held)]
    by_address = {stage.address: stage for stage in stages}
    route = choose_route(stages, blocks)
    if route is None:
        assert not any(p.first == 1 and p.stop >= blocks for p in stages)
        return
    at = 1
    for address in route:
        assert by_address[address].first == at
        at = by_address[address].stop
    assert at >= blocks
