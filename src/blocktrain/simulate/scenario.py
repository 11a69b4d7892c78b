"""The settings of a simulation: those of a run, and a section [simulate] about its workers.

[model], [train] and [swarm] set the number of blocks, the batches per block and the coordinator's
rules, as in a run. [simulate] is not part of a run's settings and is never sent to workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from blocktrain.codec import Codec, update_codec
from blocktrain.codec.frames import largest_encoded_size
from blocktrain.config import Config, build, read_settings, setting
from blocktrain.config.compute import flops_per_step
from blocktrain.config.sizes import block_sizes
from blocktrain.data.run_text import expected_vocabulary
from blocktrain.training.estimation import FLOPS

MEGABYTE = 1e6
NUMBER_BYTES = 4  # size of a number without a codec
MANY_NUMBERS = 1 << 20  # so many that the size of headers does not matter


@dataclass(frozen=True)
class SimulateConfig:
    workers: int = setting(100, "virtual workers", low=1)
    seed: int = setting(0, "seed of all random draws", low=0, high=2**63 - 1)
    learn: bool = setting(
        False, "really train every update that counts, with the run's [train] and [data]"
    )
    score_windows: int = setting(64, "windows of valid per score, if simulate.learn is true", low=1)
    longest_seconds: float = setting(
        604_800.0, "virtual seconds after which an unfinished run is stopped", low=1.0
    )
    sample_seconds: float = setting(
        60.0, "virtual seconds between two points of the plots", low=0.001
    )
    machine: str = setting(
        "h200", "what the workers' machines are, for their speed", choices=tuple(FLOPS), since=2
    )
    block_megabytes: float = setting(
        -1.0, "size of one block's weights as a worker downloads them; -1: the model's", low=-1.0
    )
    update_share: float = setting(
        0.0, "size of an update as a share of its block's; 0: by the run's codec", low=0.0
    )
    steps_per_second: float = setting(
        0.0, "median speed of a worker; 0: by the model and simulate.machine", low=0.0
    )
    speed_spread: float = setting(
        0.5, "standard deviation of ln(speed); 0: all workers are equally fast", low=0.0, high=5.0
    )
    down_megabytes: float = setting(
        10.0, "median download bandwidth of a worker in megabytes per second", low=1e-6
    )
    up_megabytes: float = setting(
        2.0, "median upload bandwidth of a worker in megabytes per second", low=1e-6
    )
    latency_seconds: float = setting(0.1, "median time of a request and its answer", low=0.0)
    network_spread: float = setting(
        0.5, "standard deviation of ln(bandwidth) and ln(latency)", low=0.0, high=5.0
    )
    merge_megabytes: float = setting(
        500.0, "megabytes per second that a coordinator reads while it merges", low=1e-6
    )
    coordinators: int = setting(
        1, "coordinators that share the run; each merges one block at a time", low=1
    )
    join_seconds: float = setting(0.0, "seconds over which workers join, evenly spread", low=0.0)
    availability: float = setting(
        1.0, "share of the time that a worker is present", low=0.001, high=1.0
    )
    stay_seconds: float = setting(
        3600.0, "mean seconds that a worker stays before it leaves", low=0.001
    )
    lost_share: float = setting(
        0.0, "share of workers that never return after their first stay", low=0.0, high=1.0
    )
    goodbye_share: float = setting(
        0.5,
        "share of leaving workers that return their lease; the others just disappear",
        low=0.0,
        high=1.0,
    )
    straggler_share: float = setting(
        0.0, "share of workers that are slow for a while, again and again", low=0.0, high=1.0
    )
    straggler_factor: float = setting(
        10.0, "how many times slower a straggler is during a slow spell", low=1.0
    )
    straggler_every: float = setting(
        3600.0, "mean seconds from the end of a slow spell to the next", low=0.001
    )
    straggler_seconds: float = setting(600.0, "mean length of a slow spell", low=0.001)


@dataclass(frozen=True)
class Scenario(Config):
    simulate: SimulateConfig = SimulateConfig()

    @cached_property
    def block_bytes(self) -> float:
        if self.simulate.block_megabytes >= 0.0:
            return self.simulate.block_megabytes * MEGABYTE
        return NUMBER_BYTES * max(size.parameters for size in block_sizes(self))

    @cached_property
    def steps_per_second(self) -> float:
        """The median speed of a worker; by default that of `blocktrain estimate`."""
        given = self.simulate.steps_per_second
        flops = max(flops_per_step(self, block) for block in range(self.block_count))
        return given or FLOPS[self.simulate.machine] / flops

    @property
    def update_bytes(self) -> float:
        share = self.simulate.update_share or encoded_share(update_codec(self.swarm))
        return share * self.block_bytes

    def merge_seconds(self, updates: int) -> float:
        """Time to read a version and the updates that are merged into the next."""
        read = self.block_bytes + updates * self.update_bytes
        return read / (self.simulate.merge_megabytes * MEGABYTE)


def encoded_share(codec: Codec | None) -> float:
    """The largest encoded size of a block, as a share of its size without a codec. The usual size
    with `sparse` is a little smaller."""
    return (
        largest_encoded_size(codec, MANY_NUMBERS) / (NUMBER_BYTES * MANY_NUMBERS) if codec else 1.0
    )


def load_scenario(path: Path | str, overrides: Sequence[str] = ()) -> Scenario:
    scenario = build(Scenario, read_settings(path, overrides))
    return replace(scenario, vocab=expected_vocabulary(scenario))
