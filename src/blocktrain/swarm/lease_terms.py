"""The terms of a lease: how many steps, until when, and how heartbeats extend it.

Pure decisions: no clock, no files.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from blocktrain.config import SwarmConfig
from blocktrain.swarm.state import BlockView, LeaseView

SHORTEST_SHARE = 0.1  # of a lease time: less time than this is not worth a lease of its own
SLOWEST_LEASES = 10.0  # lease times: the most that training or transfers are taken to need
LONGEST_LEASES = 30.0  # usual deadlines: after these no lease is extended
TRANSFER_ROOM = 10.0  # how many times its measured speed, transfers included, a worker may claim
MICROSTEP = 1e-6  # speeds are summed as whole numbers of these, because such sums stay exact

LONGEST_HEARTBEAT = 10.0  # seconds
SHORTEST_HEARTBEAT = 0.2
HEARTBEAT_SHARE = 0.25  # of the time a lease has left


# Size of a lease


def trusted_speed(
    swarm: SwarmConfig, claimed: float | None, measured: float | None
) -> float | None:
    """The part of a claimed speed that is believed. `measured`: steps per second from lease to
    commit, transfers included. Before the first measurement a worker gets a first lease only."""
    if claimed is None:
        return None
    if measured is None:
        return min(claimed, swarm.first_steps / swarm.lease_seconds)
    return min(claimed, TRANSFER_ROOM * measured)


def trusted_transfer(swarm: SwarmConfig, claimed: float) -> float:
    """The part of a claimed transfer time that is believed: it lengthens deadlines."""
    return min(claimed, SLOWEST_LEASES * swarm.lease_seconds)


def earliest_useful_end(swarm: SwarmConfig, now: float, transfer_seconds: float) -> float:
    """If the other workers of a block end before this time, there is too little left to train
    something and send it by then."""
    return now + transfer_seconds + SHORTEST_SHARE * swarm.lease_seconds


def run_seconds_left(
    swarm: SwarmConfig,
    blocks: Sequence[BlockView[Any]],
    now: float,
    steps_per_second: float | None,
    other_speeds: Mapping[int | None, int],
) -> float:
    """Time until all text is trained if this worker and all others end together. Infinite if the
    worker's speed is unknown, or if it is longer than a lease. `other_speeds`: of the other
    workers together, by the block they train (None: they wait), in microsteps per second."""
    if steps_per_second is None:
        return math.inf
    together = steps_per_second + MICROSTEP * sum(other_speeds.values())
    steps = float(sum([block.to_hand_out for block in blocks]))
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

    Its update should arrive together with the last one of the workers that train the block now, so
    that no worker waits for another. If they end too soon for that, or there are none, it lasts a
    usual lease time, which is also the most. If only `run_seconds` of the run are left it lasts no
    longer, so that the others are not left idle, but never so short that transfers dominate.
    """
    shortest = max(SHORTEST_SHARE * swarm.lease_seconds, transfer_seconds)
    longest = min(swarm.lease_seconds, max(run_seconds, shortest))
    if block.busy_until <= earliest_useful_end(swarm, now, transfer_seconds):
        return longest
    return min(block.busy_until - now - transfer_seconds, longest)


def lease_steps(
    swarm: SwarmConfig, seconds: float, steps_per_second: float | None, available: int
) -> int:
    """As many steps as the worker trains in this time; a few if its speed is unknown."""
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
    """When a new lease's update should arrive, judging by the worker's last lease. If rounding to
    whole steps put it just after the others, it counts as arriving with them: otherwise many
    workers, each rounded past the one before, would push the end further and further."""
    if steps_per_second is None:
        return None
    arrival = now + transfer_seconds + steps / steps_per_second
    is_rounded = arrival - 0.5 / steps_per_second <= block.busy_until
    return min(arrival, block.busy_until) if is_rounded else arrival


def arrival_after_progress(
    swarm: SwarmConfig, lease: LeaseView, steps_done: int, now: float
) -> float | None:
    """When the update should arrive, judging by the progress of the lease itself; unchanged if
    progress is about as expected."""
    before = lease.expected
    if steps_done == 0:
        return before
    arrival = lease.created + (now - lease.created) * lease.steps / steps_done
    is_near = before is not None and abs(arrival - before) < SHORTEST_SHARE * swarm.lease_seconds
    return before if is_near else arrival


# Deadlines


def deadline_seconds(
    swarm: SwarmConfig, steps: int, steps_per_second: float | None, transfer_seconds: float = 0.0
) -> float:
    """Time until the deadline of a new lease: a multiple of the time that training and transfers
    should take, within the run's bounds."""
    training = steps / steps_per_second if steps_per_second else swarm.lease_seconds
    training = min(training, SLOWEST_LEASES * swarm.lease_seconds)
    seconds = swarm.deadline_factor * (training + trusted_transfer(swarm, transfer_seconds))
    return max(swarm.shortest_deadline, min(seconds, swarm.longest_deadline))


def longest_lease_seconds(swarm: SwarmConfig) -> float:
    """The longest a lease can last, whatever its worker reports."""
    usual = swarm.deadline_factor * swarm.lease_seconds
    return max(swarm.shortest_deadline, min(swarm.longest_deadline, LONGEST_LEASES * usual))


def deadline_after_steps(
    swarm: SwarmConfig, lease: LeaseView, steps_done: int, last_report: float, now: float
) -> float:
    """The deadline after a worker has reported more steps than at the time `last_report`. The next
    steps may take several times as long as these; but a lease that could not be completed at this
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
    """Leaves this much time until the deadline, if less than half of it is left: every extension
    is a write to the ledger."""
    seconds = max(swarm.shortest_deadline, seconds)
    if lease.deadline - now >= 0.5 * seconds:
        return lease.deadline
    return max(lease.deadline, min(now + seconds, lease.created + longest_lease_seconds(swarm)))


def silence_deadline(swarm: SwarmConfig, last_heard: float) -> float:
    """When the leases of a worker expire if it sends nothing more, whatever their deadlines."""
    return last_heard + swarm.heartbeat_timeout


def heartbeat_interval(seconds_left: float) -> float:
    """Seconds between a worker's heartbeats: several per lease, so that it soon learns of a lease
    that was taken back."""
    return max(SHORTEST_HEARTBEAT, min(LONGEST_HEARTBEAT, HEARTBEAT_SHARE * seconds_left))
