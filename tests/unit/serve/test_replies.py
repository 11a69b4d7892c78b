from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from blocktrain.config import Config
from blocktrain.serve.http.replies import (
    ChatFormat,
    TextDelta,
    TextFormat,
    Transcript,
    cost_body,
    usage_body,
)
from blocktrain.serve.http.served_model import ServedModel
from blocktrain.serve.router.decode import AnswerCost
from blocktrain.serve.router.output import OutputToken

MODEL = ServedModel("m", Config())

MIXED = st.lists(st.text(max_size=4).map(str.encode) | st.binary(max_size=4)).map(b"".join)


def pieces_of(data: bytes, cuts: list[int]) -> list[list[OutputToken]]:
    """Tokens of a byte."""
    ends = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    parts = [data[a:b] for a, b in pairwise(ends)]
    return [[OutputToken(byte, bytes([byte]), -1.0, {}) for byte in part] for part in parts]


@given(MIXED, st.lists(st.integers(0, 60)), st.booleans())
def test_the_parts_of_a_stream_are_the_whole_decoded_at_once(
    data: bytes, cuts: list[int], log_probs: bool
):
    transcript = Transcript(log_probs=log_probs)
    said = [*(transcript.take(piece) for piece in pieces_of(data, cuts)), transcript.rest()]
    assert TextDelta.joined(said).text == data.decode("utf-8", "replace")


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
    pieces = pieces_of(text.encode(), cuts)
    said = TextDelta.joined([*map(transcript.take, pieces), transcript.rest()])
    assert said.tokens is not None
    assert bytes(token.id for token, _ in said.tokens) == text.encode()
    places = [at for at, character in enumerate(text) for _ in character.encode()]
    assert [offset for _, offset in said.tokens] == places


@given(st.text(max_size=20), st.lists(st.integers(0, 60)))
def test_tokens_of_several_bytes_are_placed_where_their_first_character_is(
    text: str, cuts: list[int]
):
    data = text.encode()
    texts = [bytes(token.id for token in piece) for piece in pieces_of(data, cuts)]
    tokens = [OutputToken(index, text, -1.0, {}) for index, text in enumerate([*texts, b""])]
    transcript = Transcript(log_probs=True)
    said = TextDelta.joined([*(transcript.take([token]) for token in tokens), transcript.rest()])
    assert said.text == text and said.tokens is not None
    places = [at for at, character in enumerate(text) for _ in character.encode()]
    starts = [sum(map(len, texts[:index])) for index in range(len(tokens))]
    assert [offset for _, offset in said.tokens] == [[*places, len(text)][at] for at in starts]


def test_bytes_that_are_no_text_have_places_too():
    said = Transcript(log_probs=True).take(*pieces_of(b"\xe2\x28\xff\xc3", []))
    assert said.text == "\ufffd(\ufffd"
    assert said.tokens is not None
    assert [offset for _, offset in said.tokens] == [0, 1, 2, 3]


TOKENS = (
    (OutputToken(65, b"A", -0.5, {65: -0.5, 200: -1.5}), 0),
    (OutputToken(200, b"\xc8", float("-inf"), {}), 1),
)


def test_log_probabilities_of_completions():
    assert TextFormat("1", 12, MODEL).choice(1, TextDelta("A\ufffd", TOKENS), "stop") == {
        "index": 1,
        "text": "A\ufffd",
        "finish_reason": "stop",
        "logprobs": {
            "tokens": ["A", "bytes:\\xc8"],
            "token_logprobs": [-0.5, -9999.0],
            "top_logprobs": [{"A": -0.5, "bytes:\\xc8": -1.5}, {}],
            "text_offset": [0, 1],
        },
    }


def test_log_probabilities_of_chats():
    delta = ChatFormat("1", 12, MODEL).delta(0, TextDelta("A", TOKENS[:1]))
    assert delta["delta"] == {"content": "A"}
    (row,) = delta["logprobs"]["content"]
    assert (row["token"], row["logprob"], row["bytes"]) == ("A", -0.5, [65])
    assert row["top_logprobs"][1] == {"token": "bytes:\\xc8", "logprob": -1.5, "bytes": [200]}


def test_every_byte_has_a_name_of_its_own():
    assert len({MODEL.token_name(byte) for byte in range(256)}) == 256


def test_a_token_that_nothing_comes_before_has_no_log_probability():
    delta = TextDelta("A", ((OutputToken(65, b"A"), 0),))
    log_probs = TextFormat("1", 12, MODEL).delta(0, delta)["logprobs"]
    assert (log_probs["token_logprobs"], log_probs["top_logprobs"]) == ([None], [None])


def test_the_cost_of_several_answers_is_added_up():
    costs = [
        AnswerCost(6, 6, 2, 5, 4, network_seconds=0.5, stage_seconds={"a": 1.0}),
        AnswerCost(3, 3, 1, 0, 0, 1, 0.25, {"a": 0.5, "b": 2.0}),
    ]
    assert cost_body(costs) == {
        "traversals": 3, "tokens_per_traversal": 3.0, "drafted": 5, "accepted": 4, "replays": 1,
        "network_seconds": 0.75, "stage_seconds": {"a": 1.5, "b": 2.0},
    }  # fmt: skip
    assert cost_body([AnswerCost()])["tokens_per_traversal"] == 0.0


def test_a_whole_response_and_a_chunk_of_one():
    chat = ChatFormat("1", 12, MODEL)
    head = {"id": "chatcmpl-1", "created": 12, "model": "m"}
    assert chat.whole([], usage=usage_body(1, 2), blocktrain={}) == {
        **head, "object": "chat.completion", "choices": [], "blocktrain": {},
        "usage": {
            "prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }  # fmt: skip
    chunk = {**head, "object": "chat.completion.chunk", "choices": [{}], "usage": None}
    assert chat.chunk([{}], usage=None) == chunk
