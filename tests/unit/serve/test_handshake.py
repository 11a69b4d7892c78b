"""A router works only with stages of its own model; what a stage says of itself is unchecked."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.config import Config, Vocabulary
from blocktrain.errors import ConfigError
from blocktrain.serve.ring.compute import weights_fingerprint
from blocktrain.serve.ring.handshake import (
    chosen_readout,
    mismatch,
    model_hello,
    settings_fingerprint,
    stage_mismatch,
)

WEIGHTS = ["w0", "w1", "w2"]
OWN = model_hello(Config(), "router", "ours", "product")
GOOD = {
    **model_hello(Config(), "stage", "theirs", "product"),
    "blocks": [1, 2],
    "weights": ["w1", "w2"],
    "address": "",
}
TOKENS = Vocabulary(sha256="0123456789abcdef", size=50_304, bos=0, eos=(0,))
anything = st.recursive(st.none() | st.integers() | st.text(), st.lists)


def test_a_stage_of_the_same_model_fits() -> None:
    assert stage_mismatch(OWN, WEIGHTS, GOOD) is None


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"blocks": []}, "consecutive"),
        ({"blocks": [0, 1]}, "consecutive"),
        ({"blocks": [2, 1]}, "consecutive"),
        ({"blocks": [2, 3], "weights": ["w2", "w3"]}, "another version"),
        ({"blocks": ["1"]}, "consecutive"),
        ({"settings": "other"}, "different models"),
        ({"weights": ["w1", "other"]}, "another version"),
        ({"readout": "final"}, "stage has --readout final, the router --readout"),
        ({"ring": None}, "the same release"),
        ({"name": 7}, "name"),
        ({"address": 5}, "address"),
    ],
)
def test_any_other_stage_is_refused_with_a_reason(wrong: dict[str, object], words: str) -> None:
    assert words in (stage_mismatch(OWN, WEIGHTS, {**GOOD, **wrong}) or "")


@given(st.sampled_from(sorted(GOOD)), anything)
def test_any_hello_is_accepted_or_refused(key: str, value: object) -> None:
    said = {**GOOD, key: value}
    free = key == "role" or (key in ("name", "address") and isinstance(value, str))
    assert (stage_mismatch(OWN, WEIGHTS, said) is None) == (said == GOOD or free)


def test_a_stage_with_another_tokenizer_is_refused_by_both_names() -> None:
    ours, theirs = (
        model_hello(replace(Config(), vocab=vocab), role, "a", "final")
        for vocab, role in (
            (TOKENS, "router"),
            (replace(TOKENS, sha256="fedcba9876543210"), "stage"),
        )
    )
    assert mismatch(ours, theirs) == (
        "the stage has tokenizer fedcba987654, the router has 0123456789ab; copy the same run to"
        " both"
    )
    assert settings_fingerprint(replace(Config(), vocab=TOKENS)) != settings_fingerprint(Config())
    other_bos = replace(Config(), vocab=replace(TOKENS, bos=1))
    assert mismatch(ours, model_hello(other_bos, "stage", "b", "final"))
    longer = replace(Config(), vocab=replace(TOKENS, bytes_per_token=9.0))
    assert mismatch(ours, model_hello(longer, "stage", "b", "final")) is None


def test_a_readout_of_all_blocks_needs_a_small_vocabulary() -> None:
    cascade = Config().with_settings(objective__kind="cascade")
    tokens = replace(cascade, vocab=TOKENS)
    assert [chosen_readout(cascade, each) for each in ("auto", "final")] == ["product", "final"]
    assert [chosen_readout(tokens, each) for each in ("auto", "final")] == ["final", "final"]
    with pytest.raises(ConfigError, match=r"all 50304 tokens.*--readout final"):
        chosen_readout(tokens, "product")
    for kind in ("turns", "end_to_end"):  # one block predicts
        assert chosen_readout(tokens.with_settings(objective__kind=kind), "product") == "final"


def test_fingerprints_see_every_number_and_every_setting_of_the_model(config: Config) -> None:
    one = {"a": np.ones(3, np.float32), "b": np.zeros(2, np.float32)}
    other = {**one, "a": np.array([1, 1, 2], np.float32)}
    assert weights_fingerprint(one.items()) == weights_fingerprint(dict(one).items())
    assert weights_fingerprint(one.items()) != weights_fingerprint(other.items())
    assert weights_fingerprint(one.items()) != weights_fingerprint(
        {"A": one["a"], "b": one["b"]}.items()
    )
    assert settings_fingerprint(config) != settings_fingerprint(
        config.with_settings(model__window=16)
    )
    assert settings_fingerprint(config) == settings_fingerprint(
        config.with_settings(train__steps=99)
    )


def test_the_fingerprint_of_settings_is_that_of_the_release_before() -> None:
    """Stages of two releases work together as long as no new setting is used."""
    cascade = Config().with_settings(
        objective__kind="cascade", objective__bounds=(1.0, 2.0, 3.0, 4.0, 10.0)
    )
    assert settings_fingerprint(Config()) == "483efb52ff4a9c6f"
    assert settings_fingerprint(cascade) == "8d5136bab4510a96"
