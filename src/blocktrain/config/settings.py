"""Every setting of a run, with its default, its limits and a sentence, and what follows from them.

Imports no torch: coordinators, workers and the command line all read settings here.
"""

import dataclasses
from dataclasses import dataclass
from statistics import StatisticsError
from typing import Any, Self

from blocktrain.codec.registry import CODECS
from blocktrain.config.kinds import END_TO_END, KINDS, Kind
from blocktrain.config.schema import Values, build, setting, stored_values, toml_text
from blocktrain.errors import ConfigError
from blocktrain.numerics.noise import LogNormal, Partition, lognormal_partition
from blocktrain.vocabulary import BYTE_VOCABULARY, Vocabulary

LAYERS = ("two_stream",)


@dataclass(frozen=True)
class ModelConfig:
    layers: int = setting(12, "Transformer layers of the whole model", low=1)
    width: int = setting(512, "width of the residual stream", low=8)
    heads: int = setting(8, "attention heads per layer", low=1)
    blocks: int = setting(4, "blocks the layers are cut into", low=1)
    depths: tuple[int, ...] = setting(
        (),
        "layers of each block; empty: equal, or in a cascade such that all blocks train about the"
        " same number, their tails included",
    )
    window: int = setting(512, "tokens of context the model is trained on", low=8)
    mlp_ratio: float = setting(4.0, "width of the MLP in multiples of the stream's", low=0.25)
    activation: str = setting(
        "swiglu",
        "activation of the MLP; swiglu has a narrower hidden layer, for the same parameters",
        choices=("gelu", "relu2", "swiglu"),
    )
    layer: str = setting(
        "two_stream", "the Transformer layer that blocks are made of", choices=LAYERS, since=2
    )
    taps: int = setting(
        3, "earlier positions that each layer's local filter reads (0: no filter)", low=0, high=16
    )
    dropout: float = setting(0.0, "dropout on residual branches", low=0.0, high=0.9)


@dataclass(frozen=True)
class ObjectiveConfig:
    kind: str = setting("denoise", "what a block learns by", choices=tuple(KINDS))
    sigma_min: float = setting(
        1.0, "lowest noise; below 1 the noisy target leaks the answer", low=0.01
    )
    sigma_max: float = setting(10.0, "highest noise, where inference starts", low=0.02)
    p_mean: float = setting(-1.2, "mean of ln(sigma)")
    p_std: float = setting(1.2, "deviation of ln(sigma)", low=0.01)
    sigma_data: float = setting(0.5, "the data deviation of EDM preconditioning", low=0.01)
    overlap: float = setting(
        0.1, "share of its log-width a training range overlaps on each side", low=0.0, high=1.0
    )
    partition: str = setting(
        "lognormal",
        "how the range of sigma is cut into blocks; adaptive fits the cuts to a pilot block's loss",
        choices=("lognormal", "adaptive"),
    )
    bounds: tuple[float, ...] = setting(
        (), "explicit ascending cuts from sigma_min to sigma_max; empty: from the partition"
    )
    pilot_steps: int = setting(200, "steps of the adaptive partition's pilot block", low=1)
    target_dim: int = setting(256, "dimensions of the frozen target table", low=8)
    logit_scale: str = setting(
        "evidence",
        "logit scale: evidence makes the skip path exact Gaussian evidence; learned is one scalar",
        choices=("evidence", "learned"),
    )
    sigma_rank: int = setting(8, "rank of the sigma modulation", low=1)
    tail: int = setting(
        4,
        "private layers that a block of a cascade predicts through; the last block has none",
        low=0,
    )
    lead: float = setting(
        0.25,
        "share of its steps by which a block of a cascade stays behind the one before it: 0 trains"
        " all at once, 1 one after another",
        low=0.0,
        high=1.0,
    )
    refresh_every: int = setting(
        50,
        "steps after which a block of a cascade looks for newer versions of the blocks before it",
        low=1,
    )
    frozen: str = setting(
        "bf16",
        "number type in which a cascade stores the frozen blocks before a block",
        choices=("bf16", "int8"),
    )
    feature_cache: str = setting(
        "off",
        "where a cascade stores the features of all steps up to the next refresh, so that the"
        " frozen blocks need no memory in between",
        choices=("off", "ram", "disk"),
    )
    hidden_share: float = setting(
        0.0,
        "share of sequences whose context after a random cut is masked or partly wrong"
        " (prepares whole-output generation)",
        low=0.0,
        high=1.0,
    )


@dataclass(frozen=True)
class DataConfig:
    source: str = setting("stdlib", "stdlib, text:GLOB, wikitext-2, wikitext-103 or hf:NAME")
    unpack_limit_mb: int = setting(
        4096, "largest size in megabytes that one source may unpack to", low=1
    )


@dataclass(frozen=True)
class TrainConfig:
    steps: int = setting(2500, "optimizer steps per block", low=1)
    batch: int = setting(64, "windows per optimizer step", low=1)
    accumulate: int = setting(1, "micro-batches a step is split into", low=1)
    optimizer: str = setting(
        "muon",
        "muon: orthogonalised momentum for the matrices of layers, AdamW for all else",
        choices=("adamw", "muon"),
    )
    lr: float = setting(
        4e-3, "peak learning rate; for adamw use a quarter to a half of it", low=0.0
    )
    lr_floor: float = setting(0.05, "final learning rate as a share of the peak", low=0.0, high=1.0)
    warmup: int = setting(100, "steps of linear warm-up", low=0)
    weight_decay: float = setting(0.1, "weight decay of matrices", low=0.0)
    beta1: float = setting(0.9, "AdamW beta1", low=0.0, high=0.9999)
    beta2: float = setting(0.95, "AdamW beta2", low=0.0, high=0.99999)
    clip: float = setting(1.0, "largest gradient norm", low=0.0)
    seed: int = setting(0, "seed of weights, data order and noise", low=0, high=2**63 - 1)
    device: str = setting("auto", "auto, cpu, mps, cuda or cuda:N")
    precision: str = setting(
        "auto",
        "compute type; auto: bf16 on CUDA and on CPUs that have it",
        choices=("auto", "fp32", "bf16"),
    )
    compile: bool = setting(
        False, "torch.compile the training step, on a GPU with Triton and a C compiler"
    )
    cuda_graph: bool = setting(
        True, "replay the step as a CUDA graph (not together with checkpoint_layers)"
    )
    checkpoint_layers: bool = setting(False, "recompute layers in the backward pass (less memory)")
    save_every: int = setting(250, "steps between checkpoints", low=1)
    eval_every: int = setting(0, "steps between scores on valid (0: never)", low=0)
    eval_windows: int = setting(64, "windows of valid per such score", low=1)
    keep: str = setting(
        "last",
        "the version to use of a finished block; best: the lowest score on valid",
        choices=("last", "best"),
    )
    max_skipped: int = setting(20, "non-finite steps in a row before the run stops", low=1)
    warm_start: str = setting("", "run directory whose weights to start from")
    tensorboard: bool = setting(False, "also write TensorBoard events")


@dataclass(frozen=True)
class SwarmConfig:
    lease_seconds: float = setting(
        30.0, "training time of a lease, by the worker's measured speed", low=0.1
    )
    first_steps: int = setting(10, "steps of a worker's first lease", low=1)
    most_steps: int = setting(100, "most steps of one lease", low=1)
    deadline_factor: float = setting(4.0, "a lease's deadline in multiples of its time", low=1.0)
    shortest_deadline: float = setting(60.0, "shortest deadline in seconds", low=0.5)
    longest_deadline: float = setting(
        86_400.0,
        "longest time of a lease in seconds; 30 times lease_seconds * deadline_factor if less",
        low=1.0,
    )
    heartbeat_timeout: float = setting(
        120.0,
        "seconds without a heartbeat after which a worker's leases expire; workers send one every"
        " 10 seconds or more often",
        low=30.0,
        since=2,
    )
    quorum: int = setting(
        2, "updates that make a version, or one per worker if there are fewer workers", low=1
    )
    grace_seconds: float = setting(
        5.0, "seconds that other workers still have once there is a quorum", low=0.0
    )
    most_stale: int = setting(4, "versions an update may be behind; older ones are refused", low=0)
    late_discount: float = setting(
        0.5, "weight of an update for each version it is behind", low=0.01, high=1.0
    )
    outer_rate: float = setting(
        1.0, "share of the averaged update that is taken", low=0.0, high=2.0
    )
    outer_momentum: float = setting(0.0, "Nesterov momentum between versions", low=0.0, high=0.999)
    codec: str = setting(
        "none",
        "how updates and versions travel: whole in fp32, or as deltas in fewer bytes",
        choices=CODECS,
    )
    top_k_per_4096: int = setting(
        154,
        "numbers that the codec sparse sends of every 4096 of an update",
        low=1,
        high=4096,
        since=2,
        formerly="kept",
    )
    top_k_per_4096_down: int = setting(
        0,
        "the same for the delta of a version; 0: as many as its updates together",
        low=0,
        high=4096,
        since=2,
        formerly="kept_down",
    )
    keep_versions: int = setting(3, "versions of each block that are kept", low=1)


@dataclass(frozen=True)
class Config:
    model: ModelConfig = ModelConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    swarm: SwarmConfig = SwarmConfig()

    def __post_init__(self) -> None:
        _check_shape(self.model, self.kind)
        _check_sigmas(self.model, self.objective)
        self._check_partition()
        if self.train.batch % self.train.accumulate:
            raise ConfigError("train.batch must be a multiple of train.accumulate")
        if self.train.keep == "best" and not self.train.eval_every:
            raise ConfigError('train.keep = "best" needs scores: set train.eval_every above 0')

    def _check_partition(self) -> None:
        try:
            bounds = self.partition().bounds
        except (StatisticsError, OverflowError):
            bounds = ()
        if len(set(bounds)) != self.model.blocks + 1 or list(bounds) != sorted(bounds):
            raise ConfigError(
                "objective.p_mean and objective.p_std leave too little probability between"
                " objective.sigma_min and sigma_max to cut the range into blocks"
            )

    @property
    def kind(self) -> Kind:
        return KINDS[self.objective.kind]

    @property
    def block_count(self) -> int:
        """Blocks that are trained independently of each other; end to end it is the one model."""
        return 1 if self.kind.whole_model else self.model.blocks

    @property
    def depths(self) -> tuple[int, ...]:
        """The layers of each block, in order; private tails are not counted."""
        model = self.model
        if self.kind.whole_model:
            return (model.layers,)
        if model.depths:
            return model.depths
        if self.kind.has_tails:
            return balanced_depths(model.layers, model.blocks, self.objective.tail)
        return (model.layers // model.blocks,) * model.blocks

    def tail_layers(self, block: int) -> int:
        """Private layers after a block's own; the last block's output is the model's."""
        is_last = block == self.block_count - 1
        return self.objective.tail if self.kind.has_tails and not is_last else 0

    @property
    def trained_layers(self) -> int:
        """The most layers that any one block trains, its tail included."""
        return max(depth + self.tail_layers(block) for block, depth in enumerate(self.depths))

    @property
    def vocabulary(self) -> Vocabulary:
        return BYTE_VOCABULARY

    @property
    def bytes_per_step(self) -> int:
        """Bytes of text that one optimizer step is trained on."""
        tokens = self.train.batch * self.model.window
        return round(tokens * self.vocabulary.bytes_per_token)

    @property
    def state_width(self) -> int:
        """Numbers per position that travel from block to block: the guess z, or features."""
        return self.objective.target_dim if self.kind.denoises else self.model.width

    @property
    def lead(self) -> float:
        """Share of the steps by which each block stays behind the one whose features it reads."""
        return self.objective.lead if self.kind.reads_predecessors else 0.0

    def first_step(self, block: int) -> int:
        """Steps that block 0 has made when this block begins, if all train equally fast."""
        return round(block * self.lead * self.train.steps)

    @property
    def last_step(self) -> int:
        """Steps that block 0 would have made when the last block ends."""
        return self.first_step(self.block_count - 1) + self.train.steps

    @property
    def warnings(self) -> list[str]:
        if self.kind.denoises and self.objective.sigma_min < 1.0:
            return [
                f"objective.sigma_min = {self.objective.sigma_min} is below 1: the noisy target"
                " leaks the answer, and a block's loss looks better than the model is"
            ]
        return []

    def end_to_end(self) -> Self:
        """The same model, trained as one block."""
        return self.with_settings(objective__kind=END_TO_END.name)

    def partition(self) -> Partition:
        objective = self.objective
        prior = LogNormal(objective.p_mean, objective.p_std)
        if objective.bounds:
            return Partition(objective.bounds, objective.overlap, prior)
        return lognormal_partition(
            self.model.blocks, objective.sigma_min, objective.sigma_max, objective.overlap, prior
        )

    def with_settings(self, **settings: Any) -> Self:
        """A copy with dotted settings replaced, written with __ for the dot."""
        values = self.to_dict()
        for name, value in settings.items():
            section, key = name.split("__")
            values[section][key] = value
        return build(type(self), values)

    def to_dict(self) -> Values:
        return dataclasses.asdict(self)

    def to_toml(self) -> str:
        """Settings to be stored or sent; see `stored_values` for which releases can read it."""
        return toml_text(stored_values(self))


def balanced_depths(layers: int, blocks: int, tail: int) -> tuple[int, ...]:
    """Depths such that the last block, which has no tail, trains as many layers as the others.

    A remainder goes to the last block first, then to the earliest, since fewer frozen layers run
    before those.
    """
    last = min(-(-(layers + (blocks - 1) * tail) // blocks), layers - blocks + 1)
    if blocks == 1:
        return (layers,)
    share, left = divmod(layers - last, blocks - 1)
    return (*(share + (block < left) for block in range(blocks - 1)), last)


def _check_shape(model: ModelConfig, kind: Kind) -> None:
    if model.layers < model.blocks:
        raise ConfigError(
            f"model.layers = {model.layers} cannot be cut into model.blocks = {model.blocks}"
        )
    has_equal_blocks = not (kind.whole_model or kind.has_tails or model.depths)
    if has_equal_blocks and model.layers % model.blocks:
        raise ConfigError(
            f"model.layers = {model.layers} cannot be cut into model.blocks = {model.blocks}"
            " equal blocks; model.depths can name unequal ones"
        )
    if model.depths and (
        len(model.depths) != model.blocks
        or sum(model.depths) != model.layers
        or min(model.depths) < 1
    ):
        raise ConfigError(
            f"model.depths must be {model.blocks} positive numbers that sum to"
            f" model.layers = {model.layers}"
        )
    if model.width % (2 * model.heads):
        raise ConfigError(
            f"model.width = {model.width} must be an even multiple of model.heads = {model.heads}"
        )


def _check_sigmas(model: ModelConfig, objective: ObjectiveConfig) -> None:
    if objective.sigma_min >= objective.sigma_max:
        raise ConfigError("objective.sigma_min must be below objective.sigma_max")
    bounds = objective.bounds
    if not bounds:
        return
    if len(bounds) != model.blocks + 1 or sorted(set(bounds)) != list(bounds):
        raise ConfigError(f"objective.bounds must be {model.blocks + 1} ascending values")
    if (bounds[0], bounds[-1]) != (objective.sigma_min, objective.sigma_max):
        raise ConfigError("objective.bounds must run from objective.sigma_min to sigma_max")
