"""Where the time of traversals goes: as a table, and as a trace in Chrome's format, which
https://ui.perfetto.dev opens.

A traversal's time is divided into laps on the router's clock. Stages measure their own laps; the
clocks of two machines differ, so only durations travel, and what is left of a round trip is the
network. The trace therefore shows a stage's laps in their order and with their length, but places
them in the middle of the round trip.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from blocktrain.files import write_bytes
from blocktrain.serve.ring.laps import UNTIMED, Laps

MOST_EVENTS = 200_000  # of the trace; the table counts all traversals
RING = "round trip"
NETWORK = "network"
ROUTER = "router"
MICROSECONDS = 1e6

StageLaps = Mapping[str, Mapping[str, float]]  # seconds by stage and lap


@dataclass(eq=False)
class Traversal:
    """One traversal of one request."""

    laps: Laps
    stages: dict[str, dict[str, float]] = field(default_factory=dict)

    def returned(self, stages: StageLaps | None) -> None:
        """The result has arrived, with the laps of the stages."""
        self.laps.lap(RING)
        for stage, laps in (stages or {}).items():
            own = self.stages.setdefault(stage, {})
            for name, seconds in laps.items():
                own[name] = own.get(name, 0.0) + seconds

    @property
    def network(self) -> float:
        """The part of the round trip in which no stage had the step. It includes reading, writing
        and encrypting frames."""
        spent = sum(sum(laps.values()) for laps in self.stages.values())
        return max(0.0, self.laps.seconds.get(RING, 0.0) - spent)

    def parts(self) -> Iterator[tuple[str, str, float]]:
        """Where, what and how many seconds; together the whole traversal."""
        for name, seconds in self.laps.seconds.items():
            if name != RING:
                yield ROUTER, name, seconds
                continue
            for stage, laps in self.stages.items():
                yield from ((stage, lap, spent) for lap, spent in laps.items())
            yield NETWORK, "and frames", self.network


NOT_PROFILED = Traversal(UNTIMED)


class ProfileRow(NamedTuple):
    place: str
    what: str
    seconds: float  # per traversal
    share: float


class Profiler:
    """Collects the traversals of a router, or of `generate`."""

    def __init__(self) -> None:
        self._began = Laps().started
        self._traversals, self._seconds = 0, 0.0
        self._parts: dict[tuple[str, str], float] = {}
        self._events: list[dict[str, Any]] = []
        self._places: dict[str, int] = {}

    @property
    def asks_stages(self) -> StageLaps | None:
        """What a step carries so that stages add their laps; None: they measure nothing."""
        return {}

    def laps(self) -> Laps:
        return Laps()

    def begin(self) -> Traversal:
        return Traversal(self.laps())

    def finish(self, traversal: Traversal, request: int = 0) -> Traversal:
        """Count a traversal. Returns the request's next one, which begins when this one ended."""
        self._traversals += 1
        self._seconds += traversal.laps.total
        for place, what, seconds in traversal.parts():
            self._parts[place, what] = self._parts.get((place, what), 0.0) + seconds
        if len(self._events) < MOST_EVENTS:
            self._events += self._traced(traversal, request)
        return Traversal(Laps(traversal.laps.started + traversal.laps.total))

    def rows(self) -> list[ProfileRow]:
        """The mean traversal; the shares add up to 1."""
        count, total = max(1, self._traversals), self._seconds or 1.0
        return [
            ProfileRow(place, what, seconds / count, seconds / total)
            for (place, what), seconds in self._parts.items()
        ]

    def table(self) -> str:
        if not self._traversals:
            return "profile: no traversals"
        rows = self.rows()
        place_width = max(len(row.place) for row in rows)
        what_width = max(len(row.what) for row in rows)
        lines = [
            f"{row.place:{place_width}}  {row.what:{what_width}}  {row.seconds * 1e3:10.3f} ms"
            f"  {row.share:6.1%}"
            for row in rows
        ]
        mean = self._seconds / self._traversals * 1e3
        return "\n".join(
            [f"profile: {self._traversals} traversals, {mean:.3f} ms each in the mean", *lines]
        )

    def write(self, path: Path) -> None:
        """Write the trace."""
        names = [
            {"ph": "M", "name": "process_name", "pid": number, "args": {"name": place}}
            for place, number in self._places.items()
        ]
        write_bytes(path, json.dumps({"traceEvents": names + self._events}).encode())

    def _traced(self, traversal: Traversal, request: int) -> Iterator[dict[str, Any]]:
        at = traversal.laps.started - self._began
        for name, seconds in traversal.laps.seconds.items():
            yield self._event(ROUTER, name, at, seconds, request)
            if name == RING:
                hop = traversal.network / (len(traversal.stages) + 1)
                stage_at = at + hop
                for stage, laps in traversal.stages.items():
                    for lap, spent in laps.items():
                        yield self._event(stage, lap, stage_at, spent, request)
                        stage_at += spent
                    stage_at += hop
            at += seconds

    def _event(
        self, place: str, name: str, at: float, seconds: float, request: int
    ) -> dict[str, Any]:
        number = self._places.setdefault(place, len(self._places))
        start, length = (round(part * MICROSECONDS, 3) for part in (at, seconds))
        event = {"ph": "X", "name": name, "pid": number, "tid": request}
        return {**event, "ts": start, "dur": length}


class _NoProfiler(Profiler):
    """Measures nothing."""

    asks_stages = None

    def __repr__(self) -> str:
        return "NO_PROFILER"

    def laps(self) -> Laps:
        return UNTIMED

    def begin(self) -> Traversal:
        return NOT_PROFILED

    def finish(self, traversal: Traversal, request: int = 0) -> Traversal:
        return traversal


NO_PROFILER: Profiler = _NoProfiler()
