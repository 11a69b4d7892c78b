"""A virtual worker: what it is like, and what it is doing."""

from enum import IntEnum

from blocktrain.simulate.virtual_block import VirtualLease


class Activity(IntEnum):
    """What a worker's time goes into. An update that goes up while the next lease is trained takes
    no time of its own."""

    TRAINING = 0
    TRANSFERRING = 1
    WAITING = 2
    GONE = 3


class VirtualWorker:
    __slots__ = (
        "activity", "asked", "began", "down", "ended", "fetch_seconds", "fetched", "held_block",
        "interval", "joins", "latency", "lease", "lost", "made", "measured", "name", "ready",
        "send_seconds", "sending", "since", "slow", "speed", "steps_left", "straggles", "turn",
        "up",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        speed: float,
        down: float,
        up: float,
        latency: float,
        joins: float,
        *,
        lost: bool,
        straggles: bool,
    ) -> None:
        self.name, self.speed, self.joins = name, speed, joins
        self.down, self.up, self.latency = down, up, latency  # bytes a second, seconds
        self.lost = lost  # once it leaves, it never comes back
        self.straggles, self.slow = straggles, 1.0  # how many times slower than usual it is now
        self.turn = 0  # what was planned for an earlier turn does not happen
        self.fetched: dict[int, int] = {}  # the version of each block that lies on its disk
        self.made: VirtualLease | None = None  # whose result lies there too
        self.restart()
        self.activity: Activity | None = None  # None: it has not joined yet
        self.since = self.asked = self.began = self.steps_left = 0.0
        self.interval = 0.0  # between two heartbeats of its lease

    def restart(self) -> None:
        """What is in memory is gone."""
        self.held_block: int | None = None
        self.measured: float | None = None
        self.fetch_seconds = self.send_seconds = 0.0  # the last time
        self.ended: VirtualLease | None = None  # at whose end its block in memory stands
        self.lease: VirtualLease | None = None  # fetched or trained now
        self.ready: VirtualLease | None = None  # trained, waits until the one before is sent
        self.sending: VirtualLease | None = None
        self.turn += 1

    @property
    def transfer_seconds(self) -> float:
        return self.fetch_seconds + self.send_seconds

    @property
    def steps_per_second(self) -> float:
        return self.speed / self.slow
