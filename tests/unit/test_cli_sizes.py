import pytest

from blocktrain.cli.display import size


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (99_949, "99.9 kB"),
        (99_950, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.0 MB"),
        (123e6, "123 MB"),
        (5e13, "50.0 TB"),
        (1e19, "10,000 PB"),
    ],
)
def test_a_size_has_three_digits_and_a_unit(count: float, shown: str):
    assert size(count) == shown
