"""The settings of a simulation: those of a run, and a section [simulate] about its workers.

[model], [train] and [swarm] mean the same as in a run: number of blocks, batches of each, and the
coordinator's rules. [simulate] is not part of a run's settings and is never sent to workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blocktrain.codec.frames import largest_encoded_size
from blocktrain.codec.registry import Codec, update_codec
from blocktrain.config import Config, build, read_settings, setting

MEGABYTE = 1e6
NUMBER_BYTES = 4  # of a number that is not encoded
MANY_NUMBERS = 1 << 20  # enough that the encoding's header does not matter


@dataclass(frozen=True)
class SimulateConfig:
    workers: int = setting(100, "virtual workers", low=1)
    seed: int = setting(0, "seed of everything that is drawn", low=0, high=2**63 - 1)
    learn: bool = setting(
        False, "train for real, with the run's own [train] and [data], every update that counts"
    )
    score_windows: int = setting(64, "windows of valid per score of what is learned", low=1)
    longest_seconds: float = setting(
        604_800.0, "virtual seconds after which a run that is not finished is broken off", low=1.0
    )
    sample_seconds: float = setting(
        60.0, "virtual seconds between two points of the plots", low=0.001
    )
    block_megabytes: float = setting(
        50.0, "size of one block's weights as they travel down", low=0.0
    )
    update_share: float = setting(
        0.0, "size of an update as a share of its block's; 0: as the run's codec makes it", low=0.0
    )
    steps_per_second: float = setting(1.0, "median speed of a worker", low=1e-6)
    speed_spread: float = setting(
        0.5, "deviation of ln(speed); 0: all are equal", low=0.0, high=5.0
    )
    down_megabytes: float = setting(10.0, "median megabytes a second a worker receives", low=1e-6)
    up_megabytes: float = setting(2.0, "median megabytes a second a worker sends", low=1e-6)
    latency_seconds: float = setting(0.1, "median time of one request and its answer", low=0.0)
    network_spread: float = setting(
        0.5, "deviation of ln(bandwidth) and of ln(latency)", low=0.0, high=5.0
    )
    merge_megabytes: float = setting(
        500.0, "megabytes a second a coordinator reads while it merges", low=1e-6
    )
    coordinators: int = setting(
        1, "coordinators that share the run; each merges one block at a time", low=1
    )
    join_seconds: float = setting(0.0, "time over which workers appear, evenly", low=0.0)
    availability: float = setting(1.0, "share of its time a worker is there", low=0.001, high=1.0)
    stay_seconds: float = setting(3600.0, "mean time a worker stays before it leaves", low=0.001)
    lost_share: float = setting(
        0.0, "share of workers that never come back after their first stay", low=0.0, high=1.0
    )
    goodbye_share: float = setting(
        0.5,
        "share of departures that give the lease back; the others just vanish",
        low=0.0,
        high=1.0,
    )
    straggler_share: float = setting(
        0.0, "share of workers that are slow for a while, again and again", low=0.0, high=1.0
    )
    straggler_factor: float = setting(10.0, "how many times slower they are then", low=1.0)
    straggler_every: float = setting(
        3600.0, "mean seconds from the end of a slow spell to the next", low=0.001
    )
    straggler_seconds: float = setting(600.0, "mean length of a slow spell", low=0.001)


@dataclass(frozen=True)
class Scenario(Config):
    simulate: SimulateConfig = SimulateConfig()

    @property
    def block_bytes(self) -> float:
        return self.simulate.block_megabytes * MEGABYTE

    @property
    def update_bytes(self) -> float:
        share = self.simulate.update_share or encoded_share(update_codec(self.swarm))
        return share * self.block_bytes

    def merge_seconds(self, updates: int) -> float:
        """Time to read a version and the updates that are merged into the next."""
        read = self.block_bytes + updates * self.update_bytes
        return read / (self.simulate.merge_megabytes * MEGABYTE)


def encoded_share(codec: Codec | None) -> float:
    """The largest size of a block's numbers with a codec, as a share of their size without one. For
    `sparse` the usual size is a little smaller."""
    return (
        largest_encoded_size(codec, MANY_NUMBERS) / (NUMBER_BYTES * MANY_NUMBERS) if codec else 1.0
    )


def load_scenario(path: Path | str, overrides: Sequence[str] = ()) -> Scenario:
    return build(Scenario, read_settings(path, overrides))
