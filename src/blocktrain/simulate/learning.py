"""Real training in a simulation.

The simulation decides which updates are merged. Each of these is trained on this machine when it is
merged, from the weights that its lease started with. Unlike in a real run, versions are not
encoded, and a worker's final update of a block is encoded like the others.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np

from blocktrain.codec import Codec, update_codec
from blocktrain.codec.frames import UpdateDecoder, encode
from blocktrain.config import Config, SwarmConfig
from blocktrain.data.corpus import Corpus, evaluation_windows
from blocktrain.data.run_text import new_text
from blocktrain.model.stack import assemble, new_block
from blocktrain.numerics import Floats
from blocktrain.numerics.merge import Contribution, finite_floats
from blocktrain.simulate.report import Report
from blocktrain.simulate.scenario import Scenario
from blocktrain.simulate.simulation import new_coordinator, simulate
from blocktrain.simulate.virtual_block import VirtualBlock, VirtualLease
from blocktrain.simulate.virtual_coordinator import Learner
from blocktrain.storage.inheritance import inherited
from blocktrain.storage.tensor_file import Tensors
from blocktrain.swarm import merging_rules
from blocktrain.training.device import Compute, resolve
from blocktrain.training.evaluate import evaluate
from blocktrain.training.stored_models import load_block
from blocktrain.training.trainer import BlockTrainer


@dataclass(frozen=True)
class SimulatedUpdate:
    """What the coordinator merges. Without a codec: the weights and, if their base is not the
    current version any more, that base. With a codec: the change of the weights."""

    values: Tensors
    start: Tensors | None
    is_delta: bool


class SimulatedUpdates:
    """Encodes updates with the run's codec. The residual of an update is added to the same worker's
    next update of the block, as in worker/local_block.py."""

    def __init__(self, swarm: SwarmConfig) -> None:
        self._codec = update_codec(swarm)
        self._residuals: dict[tuple[str, int], Tensors] = {}  # by worker and block
        self._last_sent: dict[tuple[str, int], tuple[str, Tensors]] = {}  # lease and its update

    def starting_weights(self, lease: VirtualLease, base: Tensors) -> Tensors:
        """The weights that a worker starts from: its base plus its residual."""
        base = self._base(lease, base)
        residual = self._residuals.get((lease.worker, lease.block.index))
        return {name: base[name] + residual[name] for name in base} if residual else base

    def _base(self, lease: VirtualLease, version: Tensors) -> Tensors:
        """A lease's version plus, if it continues another lease, that lease's update."""
        last_lease, delta = self._last_sent.get((lease.worker, lease.block.index), (None, {}))
        if lease.continues is None or lease.continues != last_lease:
            return version
        return {name: version[name] + delta[name] for name in version}

    def send(self, lease: VirtualLease, version: Tensors, end: Tensors) -> SimulatedUpdate:
        """The update of a lease that started from `version`. `end`: the weights after training."""
        if self._codec:
            delta = self._through_codec(lease, self._base(lease, version), end, self._codec)
            self._last_sent[lease.worker, lease.block.index] = (lease.lease, delta)
            return SimulatedUpdate(delta, None, is_delta=True)
        is_late = lease.base_version != lease.block.version
        return SimulatedUpdate(end, version if is_late else None, is_delta=False)

    def _through_codec(
        self, lease: VirtualLease, base: Tensors, end: Tensors, codec: Codec
    ) -> Tensors:
        """The change of the weights after encoding and decoding. Stores the residual."""
        count = sum(array.size for array in end.values())
        residual: list[Floats] = []
        delta = (np.subtract(end[name], base[name]) for name in sorted(end))
        data = b"".join(encode(delta, codec, residual.append))
        decoder = UpdateDecoder(lambda offset, size: data[offset : offset + size], len(data), count)
        self._residuals[lease.worker, lease.block.index] = _split(np.concatenate(residual), end)
        return _split(np.concatenate(list(decoder.frames())), end)


def _split(numbers: Floats, like: Tensors) -> Tensors:
    """Cut one array into tensors like these, in the order of their names."""
    names = sorted(like)
    parts = np.split(numbers, np.cumsum([like[name].size for name in names])[:-1])
    return {name: part.reshape(like[name].shape) for name, part in zip(names, parts, strict=True)}


@dataclass(frozen=True)
class VirtualVersion:
    number: int
    weights: Tensors


class FrozenVersions:
    """The versions of a block's predecessors at one time."""

    def __init__(self, versions: Sequence[VirtualVersion]) -> None:
        self._versions = tuple(versions)

    def version(self, block: int) -> int:
        return self._versions[block].number

    def weights(self, block: int) -> Tensors:
        return self._versions[block].weights


@dataclass(frozen=True)
class LeaseBase:
    """What the training of a lease starts from."""

    version: VirtualVersion
    predecessors: FrozenVersions  # read in a cascade
    memory_losses: int  # how often its worker has lost the block's moments


class VirtualTrainer:
    """Trains all workers' leases of a block. Each worker has optimizer moments of its own."""

    def __init__(
        self,
        config: Config,
        block: int,
        corpus: Corpus,
        compute: Compute,
        predecessors: FrozenVersions,
    ) -> None:
        # A captured CUDA graph would always use the first worker's moments.
        plain = config.with_settings(train__cuda_graph=False)
        self._trainer = BlockTrainer(plain, block, corpus, compute, None, predecessors)
        self._trainer.restore()
        self._reads_others = bool(config.frozen_blocks(block))
        self._moments: dict[str, tuple[int, Tensors]] = {}  # by worker, with its memory losses

    def weights(self) -> Tensors:
        """The weights after the last lease, or the run's initial weights."""
        return {name: array.copy() for name, array in self._trainer.weights().items()}

    def train(self, lease: VirtualLease, base: LeaseBase) -> Tensors:
        trainer = self._trainer
        load_block(trainer.module, base.version.weights, f"version {base.version.number}")
        self._load_moments(lease.worker, base.memory_losses)
        if self._reads_others:
            trainer.build_on(base.predecessors, lease.first_batch + lease.steps)
        steps = range(lease.steps)
        positions = [lease.schedule_start + step * lease.schedule_stride for step in steps]
        trainer.run(lease.first_batch, lease.steps, positions=positions)
        trainer.refuse_divergence()
        trainer.close()
        self._moments[lease.worker] = (base.memory_losses, trainer.moments())
        return self.weights()

    def _load_moments(self, worker: str, memory_losses: int) -> None:
        losses_then, moments = self._moments.get(worker, (memory_losses, None))
        if moments is not None and losses_then == memory_losses:
            self._trainer.take_moments(moments)
        else:
            self._trainer.optimizer.state.clear()


class SimulatedLearning(Learner):
    def __init__(self, config: Config, corpus: Corpus, compute: Compute, windows: int) -> None:
        """`windows`: number of windows of `valid` per score."""
        window = config.model.window
        self.config, self._compute = config, compute
        self._valid = evaluation_windows(corpus.split("valid", window), window, windows)
        self._valid_bytes = corpus.bytes_of(self._valid)
        self._trainers: list[VirtualTrainer] = []
        self.versions: list[VirtualVersion] = []
        for block in range(config.block_count):
            predecessors = FrozenVersions(self.versions)
            self._trainers.append(VirtualTrainer(config, block, corpus, compute, predecessors))
            self.versions.append(VirtualVersion(0, self._trainers[block].weights()))
        self._velocities: list[dict[str, Floats | None]] = [{} for _ in self.versions]
        self._updates = SimulatedUpdates(config.swarm)
        self._memory_losses: Counter[tuple[str, int]] = Counter()  # by worker and block
        # Weak, so that old versions are freed with the leases that started from them.
        self._bases: WeakKeyDictionary[VirtualLease, LeaseBase] = WeakKeyDictionary()
        self._last_score: tuple[tuple[int, ...], float] | None = None

    def started(self, lease: VirtualLease) -> None:
        index = lease.block.index
        before = self._bases.get(lease)
        version = before.version if before else self.versions[index]
        predecessors = FrozenVersions(self.versions)
        losses = self._memory_losses[lease.worker, index]
        self._bases[lease] = LeaseBase(version, predecessors, losses)

    def lost_memory(self, worker: str, block: int) -> None:
        self._memory_losses[worker, block] += 1

    def merged(self, block: VirtualBlock, leases: Sequence[VirtualLease]) -> None:
        updates = {lease: self._update(lease) for lease in leases}
        factors = merging_rules.chain_factors(leases)
        current, velocity = self.versions[block.index], self._velocities[block.index]
        rule = merging_rules.merge_rule(self.config.swarm)
        weights: Tensors = {}
        for name, before in current.weights.items():
            contributions = [
                self._contribution(lease, update, name, factors[lease.lease])
                for lease, update in updates.items()
            ]
            target, velocity[name] = rule.combine(before, contributions, velocity.get(name))
            weights[name] = finite_floats(target)
        self.versions[block.index] = VirtualVersion(block.version + 1, weights)

    def inherited(self, block: VirtualBlock) -> None:
        index = block.index
        before, initial = self.versions[index - 1].weights, self.versions[index].weights
        weights = inherited(self.config, index, initial, before)
        self.versions[index] = VirtualVersion(block.version + 1, weights)

    def score(self) -> float:
        """The cross entropy of the default readout, always on the same windows."""
        numbers = tuple(version.number for version in self.versions)
        if self._last_score is None or self._last_score[0] != numbers:
            self._last_score = (numbers, self._measured())
        return self._last_score[1]

    def _update(self, lease: VirtualLease) -> SimulatedUpdate:
        base = self._bases[lease]
        version = base.version.weights
        start = replace(base.version, weights=self._updates.starting_weights(lease, version))
        trainer = self._trainers[lease.block.index]
        end = trainer.train(lease, replace(base, version=start))
        return self._updates.send(lease, version, end)

    def _contribution(
        self, lease: VirtualLease, update: SimulatedUpdate, name: str, factor: float
    ) -> Contribution:
        share = factor * merging_rules.update_weight(
            self.config.swarm, lease.block.version, lease.base_version
        )
        return Contribution(
            lease.lease,
            update.values[name],
            float(lease.steps),
            update.start[name] if update.start else None,
            share,
            update.is_delta,
        )

    def _measured(self) -> float:
        blocks = []
        for index, version in enumerate(self.versions):
            block = new_block(self.config, index)
            load_block(block, version.weights, f"version {version.number} of block {index}")
            block.compute_dtype = self._compute.dtype
            blocks.append(block.to(self._compute.device))
        stack = assemble(self.config, blocks)
        return evaluate(stack, self._valid, draws=0, text_bytes=self._valid_bytes).default.ce


def simulate_learning(scenario: Scenario) -> Report:
    """Run a simulation that really trains, with the scenario's data and device."""
    compute = resolve(scenario.train.device, scenario.train.precision)
    text = new_text(scenario)
    scenario = replace(scenario, vocab=text.config.vocab)
    learner = SimulatedLearning(scenario, text.corpus, compute, scenario.simulate.score_windows)
    return simulate(scenario, new_coordinator(scenario, learner))
