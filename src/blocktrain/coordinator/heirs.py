"""Lets a block inherit from the block before it when its turn has come."""

import logging
from functools import partial

from blocktrain.coordinator.run import Run
from blocktrain.errors import BlocktrainError
from blocktrain.ledger.schema import Version
from blocktrain.storage.inheritance import inherited_name
from blocktrain.storage.weights_file import write_with_sources
from blocktrain.swarm.order import Order

log = logging.getLogger(__name__)


def open_heirs(run: Run) -> int:
    """Make version 1 of the blocks that must inherit before they can be leased. Returns the number
    of these versions. Several coordinators may do this concurrently."""
    order = Order.of(run.config)
    if not order.inherits:
        return 0
    with run.ledger.read() as tx:
        heirs = {
            state.index: (tx.versions.get(state.index), tx.versions.get(state.index - 1))
            for state in order.heirs(tx.blocks.states())
        }
    versions = 0
    for block, (first, before) in heirs.items():
        try:
            versions += _inherit(run, first, before)
        except BlocktrainError as error:
            log.warning("block cannot inherit, trying again: %s", error, extra={"block": block})
    return versions


def _inherit(run: Run, first: Version, before: Version) -> bool:
    block, now = first.block, run.clock()
    source_of = partial(inherited_name, run.config, block)
    weights = write_with_sources(run.blobs, first.weights, before.weights, source_of)
    with run.ledger.write() as tx:
        published = tx.publish(block, first.version, weights, None, (), now)
        if published:
            tx.versions.forget(block, first.version)  # no start of a rebuild
            detail = f"version 1 inherits from version {before.version} of block {before.block}"
            tx.events.add(now, "merged", block=block, detail=detail)
    return published
