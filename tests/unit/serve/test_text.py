from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from blocktrain.serve.http.replies import Transcript, joined
from blocktrain.serve.router.decode import Piece

MIXED = st.lists(st.text(max_size=4).map(str.encode) | st.binary(max_size=4)).map(b"".join)


def pieces_of(data: bytes, cuts: list[int]) -> list[Piece]:
    ends = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    parts = [data[a:b] for a, b in pairwise(ends)]
    return [Piece(part, (-1.0,) * len(part), ({},) * len(part)) for part in parts]


@given(MIXED, st.lists(st.integers(0, 60)), st.booleans())
def test_the_parts_of_a_stream_are_the_whole_decoded_at_once(
    data: bytes, cuts: list[int], log_probs: bool
):
    transcript = Transcript(log_probs=log_probs)
    said = [*(transcript.take(piece) for piece in pieces_of(data, cuts)), transcript.rest()]
    assert joined(said).text == data.decode("utf-8", "replace")
    assert transcript.bytes == len(data)


@given(st.text(min_size=1), st.lists(st.integers(0, 60)))
def test_of_valid_text_no_part_has_a_broken_character(text: str, cuts: list[int]):
    transcript = Transcript(log_probs=False)
    shown = ""
    for piece in pieces_of(text.encode(), cuts):
        shown += transcript.take(piece).text
        assert text.startswith(shown)
    assert (shown, transcript.rest().text) == (text, "")


@given(st.text(), st.lists(st.integers(0, 200)))
def test_every_byte_knows_the_character_it_is_in(text: str, cuts: list[int]):
    transcript = Transcript(log_probs=True)
    said = joined([*map(transcript.take, pieces_of(text.encode(), cuts)), transcript.rest()])
    assert said.tokens is not None
    assert bytes(token.byte for token in said.tokens) == text.encode()
    for token, offset in zip(
        said.tokens,
        (at for at, character in enumerate(text) for _ in character.encode()),
        strict=True,
    ):
        assert token.offset == offset


def test_bytes_that_are_no_text_have_places_too():
    said = Transcript(log_probs=True).take(*pieces_of(b"\xe2\x28\xff\xc3", []))
    assert said.text == "\ufffd(\ufffd"
    assert said.tokens is not None
    assert [token.offset for token in said.tokens] == [0, 1, 2, 3]
