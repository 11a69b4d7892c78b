"""Updates as they arrive: whole, or as much as the run's codec lets through.

What an encoding leaves out of an update, its worker begins the next lease of the block with, as in
worker/held_block.py.

Two things of a real run are not modelled. There are no last words: a worker's final update of a
block leaves out as much as any other, where a real one tells many times more of what is owed. And
versions are not compressed on their way down: each is the merge itself, and nothing is owed by it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from blocktrain.codec.frames import UpdateDecoder, encode_with_residual
from blocktrain.codec.registry import Codec, update_codec
from blocktrain.config import Config, SwarmConfig
from blocktrain.data.corpus import Corpus, load_corpus
from blocktrain.data.windows import evaluation_windows
from blocktrain.model.stack import assemble, new_block
from blocktrain.numerics.merge import Contribution, finite_floats, merge_rule
from blocktrain.numerics.quantization import Floats
from blocktrain.simulate.report import Report
from blocktrain.simulate.scenario import Scenario
from blocktrain.simulate.simulation import new_coordinator, simulate
from blocktrain.simulate.virtual_block import VirtualBlock, VirtualLease
from blocktrain.storage.tensor_file import Tensors
from blocktrain.swarm import merging_rules
from blocktrain.train.device import Compute, resolve
from blocktrain.train.evaluate import evaluate
from blocktrain.train.loading import load_block
from blocktrain.train.trainer import BlockTrainer


@dataclass(frozen=True)
class SimulatedUpdate:
    """Weights after training; where those it was trained from are no longer the block's, they too.
    What was learned is as good as weights that were trained from zero."""

    end: Tensors
    start: Tensors | None


class SimulatedUpdates:
    def __init__(self, swarm: SwarmConfig) -> None:
        self._codec = update_codec(swarm)
        self._owed: dict[tuple[str, int], Tensors] = {}  # by worker and block
        self._told: dict[tuple[str, int], tuple[str, Tensors]] = {}  # by lease, its last update

    def begun(self, lease: VirtualLease, base: Tensors) -> Tensors:
        """What a worker starts from: a version, what it has told since, and what not yet."""
        owed = self._owed.get((lease.worker, lease.block.index))
        known = self._known(lease, base)
        return {name: known[name] + owed[name] for name in known} if owed else known

    def _known(self, lease: VirtualLease, base: Tensors) -> Tensors:
        """A version, and in a lease that continues another, what was told of that one."""
        number, told = self._told.get((lease.worker, lease.block.index), (None, {}))
        if lease.continues is None or lease.continues != number:
            return base
        return {name: base[name] + told[name] for name in base}

    def sent(self, lease: VirtualLease, base: Tensors, end: Tensors) -> SimulatedUpdate:
        if self._codec:
            learned = self._received(lease, self._known(lease, base), end, self._codec)
            self._told[lease.worker, lease.block.index] = (lease.lease, learned)
            return SimulatedUpdate(
                learned, {name: np.zeros_like(array) for name, array in end.items()}
            )
        late = lease.base_version != lease.block.version
        return SimulatedUpdate(end, base if late else None)

    def _received(self, lease: VirtualLease, base: Tensors, end: Tensors, codec: Codec) -> Tensors:
        count = sum(array.size for array in end.values())
        left_out: list[Floats] = []
        ahead = (np.subtract(end[name], base[name]) for name in sorted(end))
        data = b"".join(encode_with_residual(codec, ahead, left_out.append))
        decoder = UpdateDecoder(lambda offset, size: data[offset : offset + size], len(data), count)
        self._owed[lease.worker, lease.block.index] = _shaped(np.concatenate(left_out), end)
        return _shaped(np.concatenate(list(decoder.frames())), end)


def _shaped(numbers: Floats, like: Tensors) -> Tensors:
    """One long row, in the order of the names, as tensors."""
    names = sorted(like)
    parts = np.split(numbers, np.cumsum([like[name].size for name in names])[:-1])
    return {name: part.reshape(like[name].shape) for name, part in zip(names, parts, strict=True)}


@dataclass(frozen=True)
class VirtualVersion:
    number: int
    weights: Tensors


@dataclass(frozen=True)
class LeaseBase:
    base: VirtualVersion
    before: "FrozenVersions"  # in a cascade
    losses: int  # how often its worker had lost its moments of the block before


class FrozenVersions:
    """The blocks before a block of a cascade, as they stood once."""

    def __init__(self, versions: Sequence[VirtualVersion]) -> None:
        self._versions = tuple(versions)

    def version(self, block: int) -> int:
        return self._versions[block].number

    def weights(self, block: int) -> Mapping[str, Tensor]:
        held = self._versions[block].weights
        return {name: torch.from_numpy(array) for name, array in held.items()}


class VirtualTrainer:
    def __init__(
        self, config: Config, block: int, corpus: Corpus, compute: Compute, before: FrozenVersions
    ) -> None:
        # A captured step would go on with the moments of whoever trained first.
        plain = config.with_settings(train__cuda_graph=False)
        self._trainer = BlockTrainer(plain, block, corpus, compute, None, before)
        self._trainer.restore()
        self._reads_others = self._trainer.predecessors is not None
        self._moments: dict[
            str, tuple[int, Tensors]
        ] = {}  # by worker: after how many losses, and they

    def weights(self) -> Tensors:
        """The block as it was last trained, or at first as every worker starts from it."""
        return {name: array.copy() for name, array in self._trainer.weights().items()}

    def train(self, lease: VirtualLease, start: LeaseBase) -> Tensors:
        trainer = self._trainer
        load_block(trainer.module, start.base.weights, f"version {start.base.number}")
        self._take_moments(lease.worker, start.losses)
        if self._reads_others:
            trainer.build_on(start.before, lease.first_batch + lease.steps)
        steps = range(lease.steps)
        positions = [lease.schedule_start + step * lease.schedule_stride for step in steps]
        trainer.run(lease.first_batch, lease.steps, positions=positions)
        trainer.refuse_divergence()
        trainer.close()
        self._moments[lease.worker] = (start.losses, trainer.moments())
        return self.weights()

    def _take_moments(self, worker: str, losses: int) -> None:
        made_after, moments = self._moments.get(worker, (losses, None))
        if moments is not None and made_after == losses:
            self._trainer.take_moments(moments)
        else:
            self._trainer.optimizer.state.clear()


class SimulatedLearning:
    """The learner of a simulation."""

    def __init__(self, config: Config, corpus: Corpus, compute: Compute, windows: int) -> None:
        """`windows`: of valid, for a score."""
        window = config.model.window
        self.config, self._compute = config, compute
        self._valid = evaluation_windows(corpus.split("valid", window), window, windows)
        self._practices: list[VirtualTrainer] = []
        self.versions: list[VirtualVersion] = []
        for block in range(config.block_count):
            before = FrozenVersions(self.versions)
            self._practices.append(VirtualTrainer(config, block, corpus, compute, before))
            self.versions.append(VirtualVersion(0, self._practices[block].weights()))
        self._velocities: list[dict[str, Floats | None]] = [{} for _ in self.versions]
        self._parcels = SimulatedUpdates(config.swarm)
        self._losses: Counter[tuple[str, int]] = Counter()  # of a worker's moments of a block
        # A start goes with its lease, and takes a version nobody builds on any more with it.
        self._starts: WeakKeyDictionary[VirtualLease, LeaseBase] = WeakKeyDictionary()
        self._scored: tuple[tuple[int, ...], float] | None = None

    def taken(self, lease: VirtualLease) -> None:
        index = lease.block.index
        known = self._starts.get(lease)
        base = known.base if known else self.versions[index]
        before = FrozenVersions(self.versions[:index])
        self._starts[lease] = LeaseBase(base, before, self._losses[lease.worker, index])

    def left(self, worker: str, block: int) -> None:
        self._losses[worker, block] += 1

    def merged(self, block: VirtualBlock, leases: Sequence[VirtualLease]) -> None:
        parcels = {lease: self._trained(lease) for lease in leases}
        factors = merging_rules.chain_factors(leases)
        current, velocity = self.versions[block.index], self._velocities[block.index]
        rule = merge_rule(self.config.swarm)
        following: Tensors = {}
        for name, weights in current.weights.items():
            contributions = [
                self._contribution(lease, parcel, name, factors[lease.lease])
                for lease, parcel in parcels.items()
            ]
            target, velocity[name] = rule.combine(weights, contributions, velocity.get(name))
            following[name] = finite_floats(target)
        self.versions[block.index] = VirtualVersion(block.version + 1, following)

    def score(self) -> float:
        """On the same windows every time; of the reading a user gets when none is named."""
        numbers = tuple(version.number for version in self.versions)
        if self._scored is None or self._scored[0] != numbers:
            self._scored = (numbers, self._measured())
        return self._scored[1]

    def _trained(self, lease: VirtualLease) -> SimulatedUpdate:
        start = self._starts[lease]
        base = start.base.weights
        begun = replace(start.base, weights=self._parcels.begun(lease, base))
        end = self._practices[lease.block.index].train(lease, replace(start, base=begun))
        return self._parcels.sent(lease, base, end)

    def _contribution(
        self, lease: VirtualLease, parcel: SimulatedUpdate, name: str, factor: float
    ) -> Contribution:
        share = factor * merging_rules.update_weight(
            self.config.swarm, lease.block.version, lease.base_version
        )
        start = parcel.start[name] if parcel.start else None
        in_order = lease.lease
        return Contribution(in_order, parcel.end[name], float(lease.steps), start, share)

    def _measured(self) -> float:
        blocks = []
        for index, version in enumerate(self.versions):
            block = new_block(self.config, index)
            load_block(block, version.weights, f"version {version.number} of block {index}")
            block.compute_dtype = self._compute.dtype
            blocks.append(block.to(self._compute.device))
        return evaluate(assemble(self.config, blocks), self._valid, draws=0).default.ce


def learning_of(scenario: Scenario) -> SimulatedLearning:
    """With the text and the device that the scenario's own settings name."""
    compute = resolve(scenario.train.device, scenario.train.precision)
    corpus = load_corpus(scenario.data)
    return SimulatedLearning(scenario, corpus, compute, scenario.simulate.score_windows)


def simulate_learning(scenario: Scenario) -> Report:
    """A simulation in which something is learned."""
    return simulate(scenario, new_coordinator(scenario, learning_of(scenario)))
