"""A router works only with stages of its own model; what a stage says of itself is unchecked."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.config import Config
from blocktrain.serve.stage.compute import settings_fingerprint, stage_mismatch, weights_fingerprint

WEIGHTS = ["w0", "w1", "w2"]
GOOD = {"blocks": [1, 2], "settings": "s", "weights": ["w1", "w2"], "address": ""}
anything = st.recursive(st.none() | st.integers() | st.text(), st.lists)


def test_a_stage_of_the_same_model_fits() -> None:
    assert stage_mismatch(GOOD, "s", WEIGHTS) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"blocks": []},
        {"blocks": [0, 1]},
        {"blocks": [2, 1]},
        {"blocks": [2, 3], "weights": ["w2", "w3"]},
        {"blocks": ["1"]},
        {"settings": "other"},
        {"weights": ["w1", "other"]},
        {"address": 5},
    ],
)
def test_any_other_stage_is_refused_with_a_reason(wrong: dict[str, object]) -> None:
    assert stage_mismatch({**GOOD, **wrong}, "s", WEIGHTS)


@given(st.sampled_from(sorted(GOOD)), anything)
def test_any_hello_is_accepted_or_refused(key: str, value: object) -> None:
    said = {**GOOD, key: value}
    assert (stage_mismatch(said, "s", WEIGHTS) is None) == (
        said == GOOD or (key == "address" and isinstance(value, str))
    )


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
