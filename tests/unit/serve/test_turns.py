"""What a turn reads of the prompts that wait."""

from hypothesis import given
from hypothesis import strategies as st

from blocktrain.serve.ring.turns import OLDEST_EVERY, PromptTurns


def test_a_turn_reads_one_chunk() -> None:
    turns = PromptTurns(8)
    assert turns.choose({1: 3}) == {1: 3}
    assert turns.choose({2: 20}) == {2: 8}
    assert turns.choose({}) == {}


def test_a_short_prompt_passes_a_long_one_that_began_earlier() -> None:
    turns = PromptTurns(8)
    for _ in range(3):
        turns.choose({1: 1000})
    assert turns.choose({1: 900, 2: 40}) == {2: 8}
    assert turns.choose({1: 900, 2: 17}) == {2: 8}
    assert turns.choose({1: 900, 2: 9}) == {2: 9}
    assert turns.choose({1: 900, 3: 3}) == {3: 3, 1: 5}


def test_what_is_left_of_a_chunk_is_not_used_for_a_few_positions() -> None:
    turns = PromptTurns(8)
    turns.choose({1: 1000})
    assert turns.choose({1: 900, 2: 5}) == {2: 5}
    assert turns.choose({1: 900, 3: 5, 4: 3}) == {3: 5, 4: 3}


def test_equal_prompts_are_read_by_turns() -> None:
    turns, left = PromptTurns(8), {1: 24, 2: 24}
    for _ in range(2):
        for request, count in turns.choose(left).items():
            left[request] -= count
    assert left == {1: 16, 2: 16}


def test_a_long_prompt_is_read_even_if_short_ones_never_cease() -> None:
    turns = PromptTurns(8)
    turns.choose({0: 1000})
    chosen = [turns.choose({0: 1000, 1 + index: 8}) for index in range(3 * OLDEST_EVERY)]
    assert sum(turn.get(0, 0) for turn in chosen) == 3 * 8


def test_a_forgotten_request_starts_anew() -> None:
    turns = PromptTurns(8)
    turns.choose({1: 100})
    turns.forget([1, 7])
    assert turns.choose({1: 100, 2: 100}) == {1: 8}


@given(
    st.integers(1, 50),
    st.lists(st.dictionaries(st.integers(1, 9), st.integers(1, 99), max_size=6), max_size=20),
)
def test_every_turn_reads_something_and_at_most_two_chunks(
    chunk: int, waiting: list[dict[int, int]]
) -> None:
    turns = PromptTurns(chunk)
    for each in waiting:
        chosen = turns.choose(each)
        assert bool(chosen) == bool(each)
        assert sum(chosen.values()) <= 2 * chunk
        assert len(chosen) == 1 or sum(chosen.values()) <= chunk
        assert all(0 < count <= each[request] for request, count in chosen.items())
