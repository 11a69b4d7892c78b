import copy

import pytest

from blocktrain import errors
from blocktrain.errors import BlocktrainError, RefusedError

DIRECT = [
    kind for kind in vars(errors).values() if BlocktrainError in getattr(kind, "__bases__", ())
]


def test_every_kind_of_error_has_an_exit_code_of_its_own():
    codes = [BlocktrainError.exit_code, *(kind.exit_code for kind in DIRECT)]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("kind", DIRECT)
def test_an_exit_code_and_a_message_become_the_same_error(kind: type[BlocktrainError]):
    again = BlocktrainError.of_exit_code(kind.exit_code)("what went wrong")
    assert type(again) is kind
    assert str(again) == "what went wrong"


def test_every_error_has_a_sentence_of_its_own():
    kinds = [kind for name, kind in vars(errors).items() if name.endswith("Error")]
    sentences = {vars(kind).get("__doc__") for kind in kinds}
    assert len(sentences) == len(kinds) and None not in sentences


def test_a_refusal_has_a_code_for_programs_and_a_reason_for_people():
    refused = RefusedError("gone", "this invite has expired")
    assert (refused.code, refused.reason, str(refused)) == (
        "gone", "this invite has expired", "this invite has expired",
    )  # fmt: skip
    assert str(copy.copy(refused)) == str(refused)
    assert str(RefusedError("gone")) == "gone"
