import math

import pytest

from blocktrain.cli.display import duration


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0123, "12.3 ms"),
        (1.0, "1.0 s"),
        (119.0, "119.0 s"),
        (150.0, "2.5 min"),
        (7200.0, "2.0 h"),
        (math.inf, "never"),
    ],
)
def test_a_duration_has_a_unit_that_fits(seconds: float, shown: str):
    assert duration(seconds) == shown
