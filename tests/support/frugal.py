"""A coordinator whose run moves differences, over blocks of some size."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.coordinator import Member, SetClock, Weights, running

from blocktrain.codec import update_codec
from blocktrain.codec.frames import encode
from blocktrain.coordinator.service import Service
from blocktrain.protocol.messages import Downloaded, Lease

NUMBERS = 20_000
KEPT = 32


@contextmanager
def frugal(folder: Path, clock: SetClock, **settings: Any) -> Iterator[Service]:
    sparse = {
        "swarm__codec": "sparse",
        "swarm__top_k_per_4096": KEPT,
        "swarm__top_k_per_4096_down": KEPT,
    }
    weights = [block_weights(block) for block in range(2)]
    with running(folder, clock, weights=weights, **{**sparse, **settings}) as service:
        yield service


def block_weights(block: int) -> Weights:
    draws = np.random.default_rng(block)
    return {"w": draws.normal(size=NUMBERS).astype(np.float32)}


def send_learned(
    member: Member, lease: Lease, downloads: tuple[Downloaded, ...] = ()
) -> tuple[int, str]:
    """Train a lease in name only: its update says something that follows from its fence. How many
    bytes it had, and what became of it."""
    draws = np.random.default_rng(lease.fence)
    deltas = (draws.standard_t(3, NUMBERS) * 1e-3).astype(np.float32)
    swarm = member.service.run.config.swarm
    codec = update_codec(swarm)
    assert codec is not None
    data = b"".join(encode(deltas, codec))
    made = member.signer.update_of_bytes(lease, data, codec=swarm.codec)
    told = made.offer.model_copy(update={"downloads": downloads})
    return len(data), member.send(type(made)(told, made.chunks)).state


def make_version(service: Service, *members: Member) -> None:
    """One more version of block 0, from an update of each."""
    leases = [member.lease(blocks=(0,), steps_per_second=0.1) for member in members]
    for member, lease in zip(members, leases, strict=True):
        send_learned(member, lease)
    assert service.merger.merge_due() == 1
