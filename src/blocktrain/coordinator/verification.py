"""What an update must be before it counts: signed, of the right size, finite, and near its base.

Knows the run's settings and its blobs; knows neither the ledger nor requests.
"""

from blocktrain.codec.frames import largest_encoded_size
from blocktrain.codec.registry import Codec, update_codec
from blocktrain.coordinator.leases import LeaseGrant
from blocktrain.coordinator.run import Run
from blocktrain.errors import ProtocolError, RefusedError
from blocktrain.ledger.rows import Version
from blocktrain.protocol import identity
from blocktrain.protocol.messages import CHUNK_BYTES, Recipe, UpdateClaim, UpdateOffer
from blocktrain.storage.tensor_file import TensorSpec
from blocktrain.storage.weights_file import check_encoded, check_update, weights_form
from blocktrain.swarm import merging_rules

FLOAT32_BYTES = 4
ROUNDING = 1e-4  # of the weights: every step rounds them to float32


class UpdateVerifier:
    def __init__(self, run: Run) -> None:
        self.run = run
        self._specs: dict[int, list[TensorSpec]] = {}  # by block; the same in all its versions

    def check_offer(self, offer: UpdateOffer, grant: LeaseGrant) -> None:
        """Refuse what does not fit its lease, before any of its bytes are stored."""
        claim = offer.claim
        self.check_sender(claim, grant.worker)
        if claim.fence != grant.fence:
            raise RefusedError("conflict", "the fencing token is not this lease's")
        if (claim.block, claim.base_version) != (grant.base.block, grant.base.version):
            raise RefusedError("conflict", "the claim's block or base version is not the lease's")
        self._check_size(claim, grant.base.weights.size)
        # Last, because it takes long for a claim of 65,536 chunks.
        if not identity.verify_update(grant.public_key, claim, offer.signature):
            raise RefusedError("forbidden", "the signature does not fit the claim")

    def check_sender(self, claim: UpdateClaim, worker: str) -> None:
        if claim.run != self.run.id or claim.worker != worker:
            raise RefusedError("forbidden", "the claim is for another run or by another worker")

    def _check_size(self, claim: UpdateClaim, weights_size: int) -> None:
        swarm, size = self.run.config.swarm, claim.recipe.size
        if claim.codec != swarm.codec:
            raise RefusedError("conflict", f"updates of this run have the codec {swarm.codec}")
        codec, largest = self._largest_codec(), weights_size
        if codec:
            largest = largest_encoded_size(codec, weights_size // FLOAT32_BYTES)
        if size > largest:
            raise RefusedError("too_large", f"the update has {size} bytes, the most is {largest}")
        if size < largest and not codec:
            raise RefusedError("malformed", f"the update has {size} bytes, the block {largest}")
        chunks = -(-size // CHUNK_BYTES)
        if len(claim.recipe.chunks) != chunks:
            raise RefusedError("malformed", f"{size} bytes are {chunks} chunks")

    def find_fault(self, recipe: Recipe, base: Version, steps: int) -> str:
        """What is wrong with the numbers of a stored update; empty if nothing is."""
        specs, codec, blobs = self._tensor_specs(base), self._largest_codec(), self.run.blobs
        try:
            if codec:
                return self._distance_fault(steps, check_encoded(blobs, recipe, specs, codec))
            distances = check_update(blobs, recipe, base.weights, specs)
        except ProtocolError as error:
            return str(error)
        faults = (
            self._distance_fault(steps, distance, size, f"tensor {name!r}")
            for name, distance, size in distances
        )
        return next(filter(None, faults), "")

    def _distance_fault(
        self, steps: int, distance: float, size: float = 0.0, part: str = "the block"
    ) -> str:
        """`size`: root mean square of the weights that the distance is measured from."""
        config = self.run.config
        most = merging_rules.largest_move(config.train, config.swarm, steps, size) + ROUNDING * size
        if distance <= most:
            return ""
        return (
            f"it moves {part} by {distance:.3g} (rms), but {steps} steps can move it by {most:.3g}"
            " at most; train from the base version of the lease"
        )

    def _tensor_specs(self, version: Version) -> list[TensorSpec]:
        if version.block not in self._specs:
            self._specs[version.block] = weights_form(self.run.blobs.reader(version.weights))
        return self._specs[version.block]

    def _largest_codec(self) -> Codec | None:
        """Any update may be a worker's final one."""
        return update_codec(self.run.config.swarm, final=True)
