"""How a lease is cut into segments, each of which can be trained again; and when the result agrees.

A worker commits to its state at every cut. A replay starts from one cut and must arrive at the
next. On the same hardware it does so bit for bit, elsewhere within the rounding of many steps.
Pure decisions: no clock, no files.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

MOST_SEGMENTS = 4
# Share of a lease's time that a worker may spend on naming and keeping its states.
NAMING_SHARE = 0.02


class Tolerance(NamedTuple):
    """How far two results may differ: the cosine of the changes of the weights; their distance and
    that of the moments, the largest of any tensor, relative to the size of the retrained one."""

    cosine: float
    distance: float
    moments_distance: float


# bench/replay.py measures how far honest results differ on CPUs (docs/results/replay.md): at most
# 5e-5 in fp32, and 0.035 between fp32 and bf16.
IN_FP32 = Tolerance(cosine=0.9999, distance=0.005, moments_distance=0.005)
IN_LOWER_PRECISION = Tolerance(cosine=0.99, distance=0.2, moments_distance=0.2)


class Comparison(Protocol):
    """A validator's comparison; the fields are those of messages.ReplayResult."""

    @property
    def identical(self) -> bool: ...
    @property
    def cosine(self) -> float | None: ...
    @property
    def distance(self) -> float | None: ...
    @property
    def moments_distance(self) -> float | None: ...
    @property
    def fault(self) -> str: ...


def affordable_segments(steps: int, lease_seconds: float, state_seconds: float) -> int:
    """Into how many segments to cut a lease. `lease_seconds`: how long training it takes;
    `state_seconds`: how long it takes to name one state."""
    states = NAMING_SHARE * lease_seconds / max(state_seconds, 1e-6)
    return max(1, min(MOST_SEGMENTS, steps, int(states) - 1))


def cuts(steps: int, segments: int) -> Sequence[int]:
    """The steps of a lease after which its state is named: its start, the end of each segment."""
    return [index * steps // segments for index in range(segments + 1)]


def disagreement(found: Comparison, precision: str) -> str:
    """Why a replay shows that a lease was not trained as its worker says; empty if it does not.
    `precision`: the run's; with any other than fp32, machines may compute with fewer bits."""
    if found.fault:
        return found.fault
    if found.identical:
        return ""
    if None in (found.cosine, found.distance, found.moments_distance):
        return "training its steps again gives numbers that are not finite"
    assert found.cosine is not None and found.distance is not None
    assert found.moments_distance is not None
    most = IN_FP32 if precision == "fp32" else IN_LOWER_PRECISION
    if (
        found.cosine < most.cosine
        or found.distance > most.distance
        or found.moments_distance > most.moments_distance
    ):
        return (
            f"training its steps again gives another result: cosine {found.cosine:.3f} (at least"
            f" {most.cosine:g}), distance {found.distance:.3g} (at most {most.distance:g}), of the"
            f" moments {found.moments_distance:.3g} (at most {most.moments_distance:g})"
        )
    return ""


def comparable(device: str, other: str, *, draws_noise: bool) -> bool:
    """Whether a lease that was trained on one device can be replayed on the other. Random numbers
    are the same only on devices of one kind."""
    return not draws_noise or _kind(device) == _kind(other)


def _kind(device: str) -> str:
    """cpu, mps or (any other name) cuda."""
    name = device.partition(",")[0].strip().lower()
    return name if name in ("cpu", "mps") else "cuda"
