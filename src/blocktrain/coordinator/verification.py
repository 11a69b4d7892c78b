"""Checks an update before it counts: signature, size, finite numbers, and how far it moves weights.

Knows the run's settings and blobs and, of the ledger, earlier updates; knows no requests.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

from starlette.concurrency import run_in_threadpool

from blocktrain.codec import Codec, update_codec
from blocktrain.codec.frames import largest_encoded_size
from blocktrain.config import Config
from blocktrain.coordinator.leases import LeaseGrant
from blocktrain.coordinator.run import Run
from blocktrain.errors import ProtocolError, RefusedError
from blocktrain.ledger.ledger import Transaction
from blocktrain.ledger.schema import LeaseRow, Version
from blocktrain.numerics.tensors import Sizes
from blocktrain.protocol import identity
from blocktrain.protocol.messages import CHUNK_BYTES, Receipt, Recipe, UpdateClaim, UpdateOffer
from blocktrain.storage.blobs import blob_of
from blocktrain.storage.tensor_file import TensorSpec
from blocktrain.storage.weights_file import (
    check_encoded,
    check_update,
    weights_form,
    weights_sizes,
)
from blocktrain.swarm.bounds import (
    HISTORY,
    Bounds,
    Move,
    TensorForm,
    balanced,
    lease_rates,
)

P = ParamSpec("P")
T = TypeVar("T")

FLOAT32_BYTES = 4
HISTORY_SECONDS = 5.0


class Finding(NamedTuple):
    """What is wrong with an update's numbers, or else how far they move its block. `is_possible`:
    honest training can give them; they are only unusual."""

    fault: str  # empty if there is none
    move: Move | None = None
    is_possible: bool = False


class UpdateVerifier:
    def __init__(self, run: Run) -> None:
        self.run = run
        # By block; all its versions have the same tensors.
        self._forms: dict[int, tuple[list[TensorSpec], Bounds]] = {}
        # By block, with the base version for which they were read from the ledger, and when.
        self._histories: dict[int, tuple[int, float, list[Move]]] = {}

    def check_offer(self, offer: UpdateOffer, grant: LeaseGrant) -> None:
        """Refuse an offer that does not fit its lease, before any byte is stored."""
        claim, base = offer.claim, grant.base
        self.check_sender(claim, grant.worker.id)
        if (claim.block, claim.base_version) != (base.block, base.version):
            raise RefusedError(
                "conflict",
                f"this is an update of block {claim.block} from version {claim.base_version}, but"
                f" its lease is for block {base.block} from version {base.version}; train what the"
                " lease names, or request a new lease",
            )
        self._check_size(claim, base.weights.size)
        _check_commitment(claim, base, grant.lease.steps, self.run.config)
        # Last, because it is slow for a claim of 65,536 chunks.
        text = identity.update_text(claim)
        if not identity.verify(grant.worker.public_key, text, offer.signature):
            raise RefusedError(
                "forbidden",
                "the signature does not match the claim; sign it with the worker's own key",
            )

    def check_sender(self, claim: UpdateClaim, worker: str) -> None:
        if claim.run != self.run.id or claim.worker != worker:
            raise RefusedError(
                "forbidden", "the claim names another run or another worker; send your own"
            )

    def _check_size(self, claim: UpdateClaim, weights_size: int) -> None:
        swarm, size = self.run.config.swarm, claim.recipe.size
        if claim.codec != swarm.codec:
            reason = f"the update has codec {claim.codec}, but the run uses codec {swarm.codec}"
            raise RefusedError("conflict", reason)
        codec, largest = self._largest_codec(), weights_size
        if codec:
            largest = largest_encoded_size(codec, weights_size // FLOAT32_BYTES)
        if size > largest:
            raise RefusedError("too_large", f"the update has {size} bytes; the limit is {largest}")
        if size < largest and not codec:
            reason = f"the update has {size} bytes; without a codec it must have {largest}"
            raise RefusedError("malformed", reason)
        chunks = -(-size // CHUNK_BYTES)
        if len(claim.recipe.chunks) != chunks:
            listed = len(claim.recipe.chunks)
            reason = f"the claim lists {listed} chunks; for {size} bytes it must list {chunks}"
            raise RefusedError("malformed", reason)

    def examine(self, recipe: Recipe, lease: LeaseRow, base: Version) -> Finding:
        """Examine the numbers of a stored update."""
        specs, bounds = self._form(base)
        try:
            sizes, room = self._change(recipe, base, specs)
        except ProtocolError as error:
            return Finding(str(error))
        move = Move(lease_rates(self.run.config, lease), sizes, room)
        history = self._history(base)
        if not bounds.fault(move, history):
            return Finding("", move)
        # Rarely: only now it is worth reading the base, to allow for its size.
        weights = weights_sizes(self.run.blobs, base.weights, specs)
        fault = bounds.fault(move, history, weights)
        is_possible = not bounds.fault(move, (), weights)
        return Finding(fault, None if fault else move, is_possible)

    def _change(
        self, recipe: Recipe, base: Version, specs: Sequence[TensorSpec]
    ) -> tuple[Sizes, float]:
        """The sizes of an update's change, and how much larger its codec lets them be."""
        most, usual = self._largest_codec(), update_codec(self.run.config.swarm)
        if most is None or usual is None:
            return check_update(self.run.blobs, recipe, base.weights, specs), 1.0
        sizes, codec = check_encoded(self.run.blobs, recipe, specs, most)
        return sizes, math.sqrt(max(1.0, codec.parameter / max(1, usual.parameter)))

    def _history(self, base: Version) -> Sequence[Move]:
        """The last moves of a block. They are read once for each of its versions, and again after
        a while, because workers that were excluded meanwhile do not count."""
        since, read, moves = self._histories.get(base.block, (-1, -math.inf, []))
        if since < base.version or self.run.clock() - read > HISTORY_SECONDS:
            with self.run.ledger.read() as tx:
                moves = last_moves(tx, base.block)
            self._histories[base.block] = base.version, self.run.clock(), moves
        return moves

    def _form(self, version: Version) -> tuple[list[TensorSpec], Bounds]:
        """A block's tensors, and the limits for its updates."""
        if version.block not in self._forms:
            specs = weights_form(self.run.blobs.reader(version.weights))
            self._forms[version.block] = specs, block_bounds(self.run.config, specs)
        return self._forms[version.block]

    def _largest_codec(self) -> Codec | None:
        """The codec of final updates, which allows the most bytes. Any update may be a worker's
        final one."""
        return update_codec(self.run.config.swarm, final=True)


def _check_commitment(claim: UpdateClaim, base: Version, steps: int, config: Config) -> None:
    """Refuse a commitment that cannot be that of this update. Most of it is checked by a replay."""
    commitment, is_encoded = claim.commitment, claim.codec != "none"
    if commitment is None:
        return
    reads = len(config.frozen_blocks(base.block))
    named = (commitment.learned is not None, commitment.residual is not None)
    if named != (is_encoded, is_encoded) or len(commitment.predecessors) != reads:
        reason = "the commitment does not name what a run with these settings needs"
    elif len(commitment.weights) > steps + 1:
        reason = "the commitment names more states than the lease has steps"
    elif not is_encoded and (
        commitment.weights[0] != base.weights.name
        or commitment.weights[-1] != blob_of(claim.recipe).name
    ):
        reason = "the commitment begins with other weights than the base, or ends with others than"
        reason += " the update"
    else:
        return
    raise RefusedError("malformed", f"{reason}; send the update without a commitment")


def block_bounds(config: Config, specs: Sequence[TensorSpec]) -> Bounds:
    return Bounds(config, [TensorForm(spec.name, spec.shape) for spec in specs])


def last_moves(tx: Transaction, block: int) -> list[Move]:
    """How far the last updates moved a block that were merged into it."""
    norms = tx.updates.last_norms(block, HISTORY)
    return balanced([(worker, Move.from_json(text)) for worker, text in norms])


class VerificationQueue:
    """Limits concurrent verifications, and verifies each update only once."""

    def __init__(self, limit: int) -> None:
        self._places = asyncio.Semaphore(limit)
        self._tasks: dict[str, asyncio.Task[Receipt]] = {}

    async def run(self, verify: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call in a thread as soon as a place is free."""
        async with self._places:
            return await run_in_threadpool(verify, *args, **kwargs)

    async def run_once(
        self, lease: str, settle: Callable[[], Coroutine[Any, Any, Receipt]]
    ) -> Receipt:
        """Settle a lease's update and return its receipt. Requests that come meanwhile get the same
        receipt. The update is settled even if the first request is cancelled."""
        task = self._tasks.get(lease)
        if task is None:
            task = self._tasks[lease] = asyncio.create_task(settle())
            task.add_done_callback(lambda done: self._tasks.pop(lease))
        return await asyncio.shield(task)
