"""Trains the updates of a simulation that count, one after another, on this machine.

A lease is trained when its update is merged, from the weights it started with. Two things differ
from a real run: a worker's last update of a block has no larger share of its residual than others,
and versions are not compressed on their way down.
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
from blocktrain.train.stored_models import load_block
from blocktrain.train.trainer import BlockTrainer


@dataclass(frozen=True)
class SimulatedUpdate:
    """What the coordinator receives of an update: weights and, if the version they were trained
    from is not the current one any more, that version. With a codec: the change of the weights."""

    values: Tensors
    start: Tensors | None
    is_delta: bool


class SimulatedUpdates:
    """Encodes updates with the run's codec. What is left out of an update, the residual, is part of
    the same worker's next update of the block, as in worker/local_block.py."""

    def __init__(self, swarm: SwarmConfig) -> None:
        self._codec = update_codec(swarm)
        self._residuals: dict[tuple[str, int], Tensors] = {}  # by worker and block
        self._last_sent: dict[tuple[str, int], tuple[str, Tensors]] = {}  # lease and its update

    def starting_weights(self, lease: VirtualLease, base: Tensors) -> Tensors:
        """What a worker starts from: its base, and what it has learned but not sent."""
        base = self._base(lease, base)
        residual = self._residuals.get((lease.worker, lease.block.index))
        return {name: base[name] + residual[name] for name in base} if residual else base

    def _base(self, lease: VirtualLease, version: Tensors) -> Tensors:
        """A version; for a lease that continues another, with the update of that one added."""
        last_lease, sent = self._last_sent.get((lease.worker, lease.block.index), (None, {}))
        if lease.continues is None or lease.continues != last_lease:
            return version
        return {name: version[name] + sent[name] for name in version}

    def send(self, lease: VirtualLease, version: Tensors, end: Tensors) -> SimulatedUpdate:
        """`end`: the weights after training a lease that started from a version."""
        if self._codec:
            delta = self._through_codec(lease, self._base(lease, version), end, self._codec)
            self._last_sent[lease.worker, lease.block.index] = (lease.lease, delta)
            return SimulatedUpdate(delta, None, is_delta=True)
        is_late = lease.base_version != lease.block.version
        return SimulatedUpdate(end, version if is_late else None, is_delta=False)

    def _through_codec(
        self, lease: VirtualLease, base: Tensors, end: Tensors, codec: Codec
    ) -> Tensors:
        """The change of the weights as it arrives; remembers what is left out."""
        count = sum(array.size for array in end.values())
        residual: list[Floats] = []
        delta = (np.subtract(end[name], base[name]) for name in sorted(end))
        data = b"".join(encode_with_residual(codec, delta, residual.append))
        decoder = UpdateDecoder(lambda offset, size: data[offset : offset + size], len(data), count)
        self._residuals[lease.worker, lease.block.index] = _split(np.concatenate(residual), end)
        return _split(np.concatenate(list(decoder.frames())), end)


def _split(numbers: Floats, like: Tensors) -> Tensors:
    """Numbers of all tensors, in the order of their names, as tensors."""
    names = sorted(like)
    parts = np.split(numbers, np.cumsum([like[name].size for name in names])[:-1])
    return {name: part.reshape(like[name].shape) for name, part in zip(names, parts, strict=True)}


@dataclass(frozen=True)
class VirtualVersion:
    number: int
    weights: Tensors


class FrozenVersions:
    """The current versions of all blocks before a block, at one time."""

    def __init__(self, versions: Sequence[VirtualVersion]) -> None:
        self._versions = tuple(versions)

    def version(self, block: int) -> int:
        return self._versions[block].number

    def weights(self, block: int) -> Mapping[str, Tensor]:
        weights = self._versions[block].weights
        return {name: torch.from_numpy(array) for name, array in weights.items()}


@dataclass(frozen=True)
class LeaseBase:
    """What a lease is trained from."""

    version: VirtualVersion
    predecessors: FrozenVersions  # read in a cascade
    memory_losses: int  # of its worker and block so far


class VirtualTrainer:
    """Trains the leases of all workers on a block. Each worker has optimizer moments of its own."""

    def __init__(
        self,
        config: Config,
        block: int,
        corpus: Corpus,
        compute: Compute,
        predecessors: FrozenVersions,
    ) -> None:
        # A captured CUDA graph would always use the moments of the first worker.
        plain = config.with_settings(train__cuda_graph=False)
        self._trainer = BlockTrainer(plain, block, corpus, compute, None, predecessors)
        self._trainer.restore()
        self._reads_predecessors = self._trainer.predecessors is not None
        self._moments: dict[str, tuple[int, Tensors]] = {}  # by worker, with its memory losses

    def weights(self) -> Tensors:
        """After the last lease; before any, the run's initial weights."""
        return {name: array.copy() for name, array in self._trainer.weights().items()}

    def train(self, lease: VirtualLease, base: LeaseBase) -> Tensors:
        trainer = self._trainer
        load_block(trainer.module, base.version.weights, f"version {base.version.number}")
        self._load_moments(lease.worker, base.memory_losses)
        if self._reads_predecessors:
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


class SimulatedLearning:
    """The learner of a simulation (see virtual_coordinator.Learner)."""

    def __init__(self, config: Config, corpus: Corpus, compute: Compute, windows: int) -> None:
        """`windows`: how many of the valid split a score is measured on."""
        window = config.model.window
        self.config, self._compute = config, compute
        self._valid = evaluation_windows(corpus.split("valid", window), window, windows)
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
        predecessors = FrozenVersions(self.versions[:index])
        losses = self._memory_losses[lease.worker, index]
        self._bases[lease] = LeaseBase(version, predecessors, losses)

    def lost_memory(self, worker: str, block: int) -> None:
        self._memory_losses[worker, block] += 1

    def merged(self, block: VirtualBlock, leases: Sequence[VirtualLease]) -> None:
        updates = {lease: self._update(lease) for lease in leases}
        factors = merging_rules.chain_factors(leases)
        current, velocity = self.versions[block.index], self._velocities[block.index]
        rule = merge_rule(self.config.swarm)
        weights: Tensors = {}
        for name, before in current.weights.items():
            contributions = [
                self._contribution(lease, update, name, factors[lease.lease])
                for lease, update in updates.items()
            ]
            target, velocity[name] = rule.combine(before, contributions, velocity.get(name))
            weights[name] = finite_floats(target)
        self.versions[block.index] = VirtualVersion(block.version + 1, weights)

    def score(self) -> float:
        """Always on the same windows, with the reading that a user gets by default."""
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
        return evaluate(assemble(self.config, blocks), self._valid, draws=0).default.ce


def simulate_learning(scenario: Scenario) -> Report:
    """A simulation that trains, with the data and on the device of the scenario's settings."""
    compute = resolve(scenario.train.device, scenario.train.precision)
    corpus = load_corpus(scenario.data)
    learner = SimulatedLearning(scenario, corpus, compute, scenario.simulate.score_windows)
    return simulate(scenario, new_coordinator(scenario, learner))
