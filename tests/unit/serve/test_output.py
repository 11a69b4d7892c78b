"""Tokens are shown once they are final, up to a stop string, an end token or the limit."""

from hypothesis import given
from hypothesis import strategies as st
from tests.support.serving import text_of

from blocktrain.serve.router.output import Output, OutputToken

TOKENS = st.lists(st.text("ab", max_size=3).map(str.encode), max_size=20)
STOPS = st.lists(st.text("ab", max_size=4).map(str.encode), max_size=3)
END = 99


def tokens_of(*texts: bytes) -> list[OutputToken]:
    return [OutputToken(index, text, -float(index)) for index, text in enumerate(texts)]


def one_by_one(texts: list[bytes], stops: list[bytes], most: int) -> tuple[bytes, str]:
    """The whole text and why it ends, searched anew after every token."""
    for count in range(1, len(texts) + 1):
        text = b"".join(texts[:count])
        if found := [text.find(stop) for stop in stops if stop and stop in text]:
            return text[: min(found)], "stop"
        if count == most:
            return text, "length"
    return b"".join(texts), ""


@given(TOKENS, STOPS, st.lists(st.integers(1, 5), min_size=20, max_size=20), st.integers(1, 20))
def test_pieces_add_up_to_the_text_before_the_first_stop_however_they_are_cut(
    texts: list[bytes], stops: list[bytes], sizes: list[int], most: int
):
    output, shown, tokens = Output(most, stops), b"", tokens_of(*texts)
    for size in sizes:
        if not output.reason:
            shown += text_of(output.add(tokens[:size]))
            tokens = tokens[size:]
    whole, reason = one_by_one(texts, stops, most)
    assert output.reason == reason
    assert whole.startswith(shown)
    held_back = whole[len(shown) :]
    # The token in which a stop string may begin is held back whole.
    longest = max(map(len, stops), default=0) + max(map(len, texts), default=0)
    assert not held_back or (not reason and len(held_back) < longest)


def test_only_the_tokens_of_a_possible_stop_string_are_held_back():
    output = Output(100, [b"\n\nEND"])
    assert text_of(output.add(tokens_of(b"one", b" two\n"))) == b"one"
    assert text_of(output.add(tokens_of(b"\nEN"))) == b""
    assert text_of(output.add(tokens_of(b"d"))) == b" two\n\nENd"
    assert text_of(output.add(tokens_of(b"last.\n", b"\nEND", b" more"))) == b"last."
    assert (output.reason, output.length) == ("stop", 5)


def test_a_stop_string_may_begin_and_end_inside_tokens():
    output = Output(100, [b"lo w"])
    assert output.add(tokens_of(b"hel")) == []
    shown = output.add([*tokens_of(b"lo", b" wor", b"ld")])
    assert [(token.id, token.data) for token in shown] == [(0, b"hel")]
    assert (output.reason, output.length) == ("stop", 1)
    output = Output(100, [b"lo w"])
    assert [token.data for token in output.add(tokens_of(b"h", b"ello ", b"world"))] == [
        b"h",
        b"el",
    ]


def test_an_end_token_is_not_shown_and_nothing_after_it():
    output = Output(9, [b"never"], eos=(END,))
    shown = output.add([*tokens_of(b"a", b"ne"), OutputToken(END, b""), *tokens_of(b"more")])
    assert (text_of(shown), output.reason, output.length) == (b"ane", "stop", 2)


def test_an_answer_of_no_tokens_is_complete_at_once():
    assert Output(0).reason == "length"
