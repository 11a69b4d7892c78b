from hypothesis import given
from hypothesis import strategies as st

from blocktrain.serve.router.decode import Output

LETTERS = st.text("ab", max_size=30).map(str.encode)
STOPS = st.lists(st.text("ab", max_size=4).map(str.encode), max_size=3)


def shown(output: Output, pieces: list[bytes]) -> bytes:
    data = b""
    for piece in pieces:
        if not output.reason:
            data += output.add(piece, [0.5] * len(piece), []).data
    return data


@given(LETTERS, STOPS, st.lists(st.integers(1, 5), min_size=30, max_size=30), st.integers(1, 40))
def test_pieces_add_up_to_the_text_before_the_first_stop(
    text: bytes, stops: list[bytes], sizes: list[int], most: int
):
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    output = Output(stops, most)
    data = shown(output, pieces)
    ends = [text[:most].find(stop) for stop in stops if stop and stop in text[:most]]
    if output.reason == "stop":
        # A piece may end two stop strings at once; the one that begins first counts.
        assert data in {text[:end] for end in ends}
        assert not any(stop in data for stop in stops if stop)
    elif output.reason == "length":
        assert not ends
        assert data == text[:most]
    else:
        assert not ends
        held_back = text[len(data) :]
        assert text.startswith(data)
        assert not held_back or any(stop.startswith(held_back) for stop in stops)


def test_only_the_possible_beginning_of_a_stop_string_is_held_back():
    output = Output([b"\n\nEND"], 100)
    assert output.add(b"one\n", [0.0] * 4, []).data == b"one"
    assert output.add(b"two\n\nEN", [0.0] * 7, []).data == b"\ntwo"
    piece = output.add(b"d", [1.0], [])
    assert (piece.data, piece.log_probs) == (b"\n\nENd", (0.0, 0.0, 0.0, 0.0, 1.0))
    assert output.add(b"\n\nEND and more", [0.0] * 14, []).data == b""
    assert (output.reason, output.shown) == ("stop", 12)


def test_an_answer_of_no_bytes_is_complete_at_once():
    assert Output([], 0).reason == "length"
