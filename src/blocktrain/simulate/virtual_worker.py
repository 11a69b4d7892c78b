"""Virtual workers: their properties and state, and the random draws that decide about them."""

from collections.abc import Callable, Iterator
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from blocktrain.simulate.scenario import MEGABYTE, SimulateConfig
from blocktrain.simulate.virtual_block import VirtualLease
from blocktrain.swarm.assignment import WorkRequest

Draws = npt.NDArray[np.float64]

DRAWN_AT_ONCE = 4096


class Activity(IntEnum):
    """What a worker spends time on. Uploading an update while training the next lease takes no
    time of its own."""

    TRAINING = 0
    TRANSFERRING = 1
    WAITING = 2
    GONE = 3


class VirtualWorker:
    __slots__ = (
        "activity", "activity_since", "claimed_at", "down", "fetch_seconds", "fetched",
        "heartbeat_seconds", "latency", "lease", "loaded_block", "loaded_lease", "measured_speed",
        "name", "never_returns", "queued", "saved_lease", "send_seconds", "sending", "session",
        "slowdown", "speed", "starts_at", "steps_left", "straggles", "training_since", "up",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        speed: float,
        down: float,
        up: float,
        latency: float,
        starts_at: float,
        *,
        never_returns: bool,
        straggles: bool,
    ) -> None:
        self.name, self.speed, self.starts_at = name, speed, starts_at
        self.down, self.up, self.latency = down, up, latency  # bytes per second, seconds
        self.never_returns = never_returns  # once it has left
        self.straggles, self.slowdown = straggles, 1.0
        self.session = 0  # events that were scheduled in an earlier session are ignored
        self.fetched: dict[int, int] = {}  # the version of each block on its disk
        self.saved_lease: VirtualLease | None = None  # the one whose result is on its disk
        self.restart()
        self.activity: Activity | None = None  # None: it has not joined yet
        self.activity_since = self.claimed_at = self.training_since = self.steps_left = 0.0
        self.heartbeat_seconds = 0.0  # between two heartbeats of its lease

    def restart(self) -> None:
        """Lose everything in memory."""
        self.loaded_block: int | None = None
        self.loaded_lease: VirtualLease | None = None  # the block in memory is at its end
        self.measured_speed: float | None = None
        self.fetch_seconds = self.send_seconds = 0.0  # the last time
        self.lease: VirtualLease | None = None  # being fetched or trained
        self.queued: VirtualLease | None = None  # trained; sent after the one that is being sent
        self.sending: VirtualLease | None = None
        self.session += 1

    @property
    def transfer_seconds(self) -> float:
        return self.fetch_seconds + self.send_seconds

    @property
    def steps_per_second(self) -> float:
        return self.speed / self.slowdown

    @property
    def request(self) -> WorkRequest:
        """The request for a lease that this worker sends."""
        return WorkRequest(
            self.name,
            self.loaded_block,
            None,
            self.loaded_lease.lease if self.loaded_lease else None,
            self.measured_speed,
            self.fetch_seconds + self.send_seconds,
        )


def draw_workers(settings: SimulateConfig) -> list[VirtualWorker]:
    """Each property has a random stream of its own: changing one setting changes no other draws."""

    def normal(stream: int) -> Draws:
        return np.random.default_rng([settings.seed, stream]).normal(size=settings.workers)

    def uniform(stream: int) -> Draws:
        return np.random.default_rng([settings.seed, stream]).random(settings.workers)

    network = settings.network_spread
    properties = (
        settings.steps_per_second * np.exp(settings.speed_spread * normal(0)),
        settings.down_megabytes * MEGABYTE * np.exp(network * normal(1)),
        settings.up_megabytes * MEGABYTE * np.exp(network * normal(2)),
        settings.latency_seconds * np.exp(network * normal(3)),
        settings.join_seconds * uniform(4),
        uniform(5) < settings.lost_share,
        uniform(6) < settings.straggler_share,
    )
    return [
        VirtualWorker(str(number), *numbers, never_returns=never_returns, straggles=straggles)
        for number, (*numbers, never_returns, straggles) in enumerate(
            zip(*(values.tolist() for values in properties), strict=True)
        )
    ]


class Chance:
    """Random draws during the simulation, made many at a time."""

    def __init__(self, seed: int) -> None:
        exponential, uniform = (np.random.default_rng([seed, stream]) for stream in (7, 8))
        self._exponential = _one_by_one(lambda: exponential.exponential(size=DRAWN_AT_ONCE))
        self._uniform = _one_by_one(lambda: uniform.random(DRAWN_AT_ONCE))

    def seconds(self, mean: float) -> float:
        """A time with this mean that is equally likely to end at any moment (exponential)."""
        return mean * next(self._exponential)

    def within(self, longest: float) -> float:
        return longest * next(self._uniform)

    def happens(self, probability: float) -> bool:
        return next(self._uniform) < probability


def _one_by_one(draw: Callable[[], Draws]) -> Iterator[float]:
    while True:
        yield from draw().tolist()
