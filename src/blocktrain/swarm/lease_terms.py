"""The terms of a lease: how many steps, until when, and how heartbeats extend it.

Pure decisions: no clock, no files.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from blocktrain.config import SwarmConfig
from blocktrain.swarm.state import BlockView, LeaseView

TAKEOVER_FACTOR = 2.0  # how much faster a worker must be to take over another's lease
SHORTEST_SHARE = 0.1  # share of a lease time; less is not worth a lease of its own
SLOWEST_LEASES = 10.0  # longest training or transfer time that is assumed, in lease times
LONGEST_LEASES = 30.0  # longest time that a lease can last, in usual deadlines
TRANSFER_ROOM = 10.0  # factor by which claims may exceed a measured speed, which includes transfers
MICROSTEP = 1e-6  # of a step; speeds are summed as integers of this unit, so that sums stay exact

LONGEST_HEARTBEAT = 10.0  # seconds
SHORTEST_HEARTBEAT = 0.2
HEARTBEAT_SHARE = 0.25  # of a lease's remaining time


# Size of a lease


def trusted_speed(
    swarm: SwarmConfig, claimed: float | None, measured: float | None
) -> float | None:
    """A claimed speed, limited to what can be trusted. `measured`: steps per second from lease to
    commit, transfers included. Before the first measurement a worker gets only a first lease."""
    if claimed is None:
        return None
    if measured is None:
        return min(claimed, swarm.first_steps / swarm.lease_seconds)
    return min(claimed, TRANSFER_ROOM * measured)


def trusted_transfer(swarm: SwarmConfig, claimed: float, *, proven: bool = True) -> float:
    """A claimed transfer time, limited because it lengthens deadlines. `proven`: the worker has
    completed a lease. For others the limit is lower, so that a first lease has a short deadline."""
    return min(claimed, (SLOWEST_LEASES if proven else 1.0) * swarm.lease_seconds)


def earliest_useful_end(swarm: SwarmConfig, now: float, transfer_seconds: float) -> float:
    """The time after which the block's other workers must end for a new lease to be worth it. If
    they end earlier, too little time is left to train and send an update."""
    return now + transfer_seconds + SHORTEST_SHARE * swarm.lease_seconds


def run_seconds_left(
    swarm: SwarmConfig,
    blocks: Sequence[BlockView[Any]],
    now: float,
    steps_per_second: float | None,
    other_speeds: Mapping[int | None, int],
    steps_left: int | None = None,
) -> float:
    """Time until the run's last batch is trained, if all workers end together. Infinite if that is
    longer than a lease, or if this worker's speed is unknown.

    `steps_left`: how many steps can still be leased; default: all that no worker has leased yet.
    `other_speeds`: the summed speed of the other workers, by the block they train (None: they
    wait), in units of MICROSTEP per second.
    """
    if steps_per_second is None:
        return math.inf
    together = steps_per_second + MICROSTEP * sum(other_speeds.values())
    if steps_left is None:
        steps_left = sum([block.to_hand_out for block in blocks])
    steps = float(steps_left)
    if steps > together * swarm.lease_seconds:
        return math.inf
    for block in blocks:
        seconds = max(0.0, block.busy_until - now)
        steps += MICROSTEP * other_speeds.get(block.index, 0) * seconds
    return steps / together


def training_seconds(
    swarm: SwarmConfig,
    block: BlockView[Any],
    now: float,
    transfer_seconds: float,
    run_seconds: float = math.inf,
) -> float:
    """How long a lease should train.

    Its update should arrive together with the last one of the block's other workers, so that no
    worker waits for another. If they end too soon for that, or there are none, the lease lasts a
    usual lease time, which is also the maximum. Near the end of the run it lasts at most
    `run_seconds`, so that other workers do not idle, but never so short that transfers dominate.
    """
    shortest = max(SHORTEST_SHARE * swarm.lease_seconds, transfer_seconds)
    longest = min(swarm.lease_seconds, max(run_seconds, shortest))
    if block.busy_until <= earliest_useful_end(swarm, now, transfer_seconds):
        return longest
    return min(block.busy_until - now - transfer_seconds, longest)


def lease_steps(
    swarm: SwarmConfig, seconds: float, steps_per_second: float | None, available: int
) -> int:
    """The number of steps that a worker trains in this time; a few if its speed is unknown."""
    fitting = swarm.first_steps
    if steps_per_second is not None:
        fitting = round(seconds * steps_per_second)
    return max(1, min(fitting, swarm.most_steps, available))


# Expected arrival of the update


def expected_arrival(
    block: BlockView[Any],
    now: float,
    steps: int,
    steps_per_second: float | None,
    transfer_seconds: float,
) -> float | None:
    """When a new lease's update should arrive, at the speed of the worker's last lease. If rounding
    to whole steps puts it just after the others, it counts as arriving with them. Otherwise many
    workers, each rounded past the one before, would move the end further and further."""
    if steps_per_second is None:
        return None
    arrival = now + transfer_seconds + steps / steps_per_second
    is_rounded = arrival - 0.5 / steps_per_second <= block.busy_until
    return min(arrival, block.busy_until) if is_rounded else arrival


def arrival_after_progress(
    swarm: SwarmConfig, lease: LeaseView, steps_done: int, now: float
) -> float | None:
    """When the update should arrive, at the lease's own pace; unchanged if the pace is about as
    expected."""
    before = lease.expected
    if steps_done == 0:
        return before
    arrival = lease.created + (now - lease.created) * lease.steps / steps_done
    is_near = before is not None and abs(arrival - before) < SHORTEST_SHARE * swarm.lease_seconds
    return before if is_near else arrival


def may_take_over(
    swarm: SwarmConfig,
    lease: LeaseView,
    steps_per_second: float,
    now: float,
    *,
    measured: float | None,
    is_newcomer: bool,
) -> bool:
    """Whether an idle worker of this speed should train a lease's batches again from the start,
    because it would finish them much sooner than the lease's own worker.

    What that worker reports is not believed if none of its updates was merged yet, or as soon as it
    takes much longer than its speed, as `measured` before, lets expect."""
    overhead = SHORTEST_SHARE * swarm.lease_seconds
    usual = lease.steps / measured + overhead if measured else math.inf
    is_late = now - lease.created > TAKEOVER_FACTOR * usual
    arrival = lease.expected
    if arrival is None or arrival < now or is_late or (is_newcomer and measured is None):
        arrival = lease.deadline
    return arrival - now > TAKEOVER_FACTOR * (lease.steps / steps_per_second + overhead)


# Deadlines


def deadline_seconds(
    swarm: SwarmConfig, steps: int, steps_per_second: float | None, transfer_seconds: float = 0.0
) -> float:
    """Time until a new lease's deadline: a multiple of the expected time for training and
    transfers, within the run's limits."""
    training = steps / steps_per_second if steps_per_second else swarm.lease_seconds
    training = min(training, SLOWEST_LEASES * swarm.lease_seconds)
    seconds = swarm.deadline_factor * (training + trusted_transfer(swarm, transfer_seconds))
    return max(swarm.shortest_deadline, min(seconds, swarm.longest_deadline))


def longest_lease_seconds(swarm: SwarmConfig) -> float:
    """The longest time that a lease can last, whatever its worker reports."""
    usual = swarm.deadline_factor * swarm.lease_seconds
    return max(swarm.shortest_deadline, min(swarm.longest_deadline, LONGEST_LEASES * usual))


def deadline_after_steps(
    swarm: SwarmConfig, lease: LeaseView, steps_done: int, last_report: float, now: float
) -> float:
    """The deadline after a worker reported progress for the first time since `last_report`. The
    next steps may take several times as long as these. A lease that cannot be completed at this
    pace is not extended."""
    done = min(steps_done, lease.steps)
    needed = (now - lease.created) * (lease.steps - done) / done
    if now + needed > lease.created + longest_lease_seconds(swarm):
        return lease.deadline
    return _extended(swarm, lease, swarm.deadline_factor * (now - last_report), now)


def deadline_after_chunk(
    swarm: SwarmConfig, lease: LeaseView, last_report: float, now: float
) -> float:
    """The deadline after a chunk of the update has arrived. The next chunk may take several times
    as long as this one, which took from `last_report` until now."""
    return _extended(swarm, lease, swarm.deadline_factor * (now - last_report), now)


def _extended(swarm: SwarmConfig, lease: LeaseView, seconds: float, now: float) -> float:
    """Extend the deadline to this many seconds from now. Every extension is a write to the ledger,
    so there is none while at least half of that time is left."""
    seconds = max(swarm.shortest_deadline, seconds)
    if lease.deadline - now >= 0.5 * seconds:
        return lease.deadline
    return max(lease.deadline, min(now + seconds, lease.created + longest_lease_seconds(swarm)))


def silence_deadline(swarm: SwarmConfig, last_heard: float) -> float:
    """When a silent worker's leases expire, whatever their deadlines."""
    return last_heard + swarm.heartbeat_timeout


def heartbeat_interval(seconds_left: float) -> float:
    """Seconds between a worker's heartbeats: several per lease, so that it soon learns when a lease
    has expired."""
    return max(SHORTEST_HEARTBEAT, min(LONGEST_HEARTBEAT, HEARTBEAT_SHARE * seconds_left))
