"""Real training in virtual time: every update that counts in a simulation is really trained.

A lease is trained when its update is merged, from the version it was given and with the place in
data and schedule it was given, so that nothing is trained that comes to nothing and the result is
what it would have been. Merges are `core.merge`'s, weighted as the coordinator's merger weighs
them. Knows nothing of virtual time; all order comes from who calls.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

from blocktrain.config import Config
from blocktrain.coordinator import plan
from blocktrain.core.merge import Contribution, Floats, Outer, merge_tensor
from blocktrain.data.corpus import Corpus, load_corpus
from blocktrain.data.windows import evaluation_windows
from blocktrain.model.stack import assemble, new_block
from blocktrain.rehearse.parcels import Parcel, Parcels
from blocktrain.rehearse.practice import Practice
from blocktrain.rehearse.start import FrozenVersions, Start, Version
from blocktrain.simulate.block import VirtualBlock, VirtualLease
from blocktrain.simulate.report import Report
from blocktrain.simulate.scenario import Scenario
from blocktrain.simulate.simulation import new_coordinator, simulate
from blocktrain.storage.run_dir import Tensors
from blocktrain.train.assemble import load_block
from blocktrain.train.device import Compute, resolve
from blocktrain.train.evaluate import evaluate


class Rehearsal:
    """The learner of a simulation."""

    def __init__(self, config: Config, corpus: Corpus, compute: Compute, windows: int) -> None:
        """`windows`: of valid, for a score."""
        window = config.model.window
        self.config, self._compute = config, compute
        self._valid = evaluation_windows(corpus.split("valid", window), window, windows)
        self._practices: list[Practice] = []
        self.versions: list[Version] = []
        for block in range(config.units):
            before = FrozenVersions(self.versions)
            self._practices.append(Practice(config, block, corpus, compute, before))
            self.versions.append(Version(0, self._practices[block].weights()))
        self._velocities: list[dict[str, Floats | None]] = [{} for _ in self.versions]
        self._parcels = Parcels(config.swarm)
        self._losses: Counter[tuple[str, int]] = Counter()  # of a worker's moments of a block
        # A start goes with its lease, and takes a version nobody builds on any more with it.
        self._starts: WeakKeyDictionary[VirtualLease, Start] = WeakKeyDictionary()
        self._scored: tuple[tuple[int, ...], float] | None = None

    def taken(self, lease: VirtualLease) -> None:
        index = lease.block.index
        known = self._starts.get(lease)
        base = known.base if known else self.versions[index]
        before = FrozenVersions(self.versions[:index])
        self._starts[lease] = Start(base, before, self._losses[lease.worker, index])

    def left(self, worker: str, block: int) -> None:
        self._losses[worker, block] += 1

    def merged(self, block: VirtualBlock, leases: Sequence[VirtualLease]) -> None:
        parcels = {lease: self._trained(lease) for lease in leases}
        factors = plan.chain_factors(leases)
        current, velocity = self.versions[block.index], self._velocities[block.index]
        swarm = self.config.swarm
        outer = Outer(swarm.outer_rate, swarm.outer_momentum)
        following: Tensors = {}
        for name, weights in current.weights.items():
            contributions = [
                self._contribution(lease, parcel, name, factors[lease.lease])
                for lease, parcel in parcels.items()
            ]
            following[name], velocity[name] = merge_tensor(
                weights, contributions, velocity.get(name), outer
            )
        self.versions[block.index] = Version(block.version + 1, following)

    def score(self) -> float:
        """On the same windows every time; of the reading a user gets when none is named."""
        numbers = tuple(version.number for version in self.versions)
        if self._scored is None or self._scored[0] != numbers:
            self._scored = (numbers, self._measured())
        return self._scored[1]

    def _trained(self, lease: VirtualLease) -> Parcel:
        start = self._starts[lease]
        base = start.base.weights
        begun = replace(start.base, weights=self._parcels.begun(lease, base))
        end = self._practices[lease.block.index].train(lease, replace(start, base=begun))
        return self._parcels.sent(lease, base, end)

    def _contribution(
        self, lease: VirtualLease, parcel: Parcel, name: str, factor: float
    ) -> Contribution:
        share = factor * plan.weight(self.config.swarm, lease.block.version, lease.base_version)
        start = parcel.start[name] if parcel.start else None
        in_order = f"{lease.lease:012}"
        return Contribution(in_order, parcel.end[name], float(lease.steps), start, share)

    def _measured(self) -> float:
        blocks = []
        for unit, version in enumerate(self.versions):
            block = new_block(self.config, unit)
            load_block(block, version.weights, f"version {version.number} of block {unit}")
            block.compute_dtype = self._compute.dtype
            blocks.append(block.to(self._compute.device))
        return evaluate(assemble(self.config, blocks), self._valid, draws=0).default.ce


def rehearsal_of(scenario: Scenario) -> Rehearsal:
    """With the text and the device that the scenario's own settings name."""
    compute = resolve(scenario.train.device, scenario.train.precision)
    corpus = load_corpus(scenario.data)
    return Rehearsal(scenario, corpus, compute, scenario.simulate.score_windows)


def rehearse(scenario: Scenario) -> Report:
    """A simulation in which something is learned."""
    return simulate(scenario, new_coordinator(scenario, rehearsal_of(scenario)))
