"""Every setting of a run, by section, with its default, limits and description.

Imports no torch: coordinators, workers and the command line all read settings here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from blocktrain.codec import CODECS
from blocktrain.config.schedule import phase
from blocktrain.config.sections import setting

LAYERS = ("local", "llama")
LLAMA_SETTINGS = (
    "kv_heads",
    "head_dim",
    "hidden",
    "norm_eps",
    "rope_theta",
    "rope_scaling",
    "qk_norm",
    "biases",
    "logit_gain",
    "tied_embeddings",
)
SOURCES = (
    "stdlib, text:GLOB, jsonl:GLOB or parquet:GLOB (a folder works too; #COLUMN may follow; text by"
    " default), chat:GLOB (conversations in JSON lines, of which only answers are trained on),"
    " wikitext-2, wikitext-103 or hf:NAME"
)
ORDERS = ("side-by-side", "relay")
BIASES = ("none", "qkv", "attention", "all")
WARMUP_PART = 10  # the warm-up of an extension is at most this part of it: a tenth


@dataclass(frozen=True)
class Kind:
    """A kind of objective, described by flags that all packages read. What it computes is in
    model/stack.py (blocks and how they are joined), train/objective.py (loss) and
    serve/ring/compute.py (steps in a ring)."""

    name: str
    whole_model: bool = False  # one block holds all layers: the end-to-end reference
    reads_predecessors: bool = False  # block k reads features of the frozen blocks 0 to k - 1
    reads_successors: bool = False  # its gradient passes through the frozen blocks after it
    has_tails: bool = False  # every block but the last predicts through private layers
    last_block_predicts: bool = False  # no other block has a head
    denoises: bool = False  # a guess z travels between blocks, at falling levels of noise sigma
    streams: int = 1  # streams a block computes per position: context, and a noisy target
    starts: tuple[str, ...] = ("none",)  # what z can start from when the model is scored
    # The scores that `blocktrain demo` shows: name in its table -> start and readout.
    demo_readings: Mapping[str, str] = field(default_factory=dict)


DENOISE = Kind(
    "denoise",
    denoises=True,
    streams=2,
    starts=("mean", "noise"),
    demo_readings={"product": "mean start, product", "as in the paper": "noise start, final"},
)
CASCADE = Kind(
    "cascade",
    reads_predecessors=True,
    has_tails=True,
    demo_readings={"product": "none start, product", "final": "none start, final"},
)
END_TO_END = Kind("end_to_end", whole_model=True)
TURNS = Kind("turns", reads_predecessors=True, reads_successors=True, last_block_predicts=True)

KINDS = {kind.name: kind for kind in (DENOISE, CASCADE, END_TO_END, TURNS)}


@dataclass(frozen=True)
class ModelConfig:
    layers: int = setting(12, "Transformer layers of the whole model", low=1)
    width: int = setting(512, "width of the residual stream", low=8)
    heads: int = setting(8, "attention heads per layer", low=1)
    blocks: int = setting(4, "number of blocks that the layers are cut into", low=1, high=4096)
    depths: tuple[int, ...] = setting(
        (),
        "layers of each block; empty: the same number for all, or in a cascade such that all train"
        " about the same number of layers, their tails included",
    )
    window: int = setting(512, "tokens of context the model is trained on", low=8)
    mlp_ratio: float = setting(
        4.0, "width of the MLP's hidden layer as a multiple of model.width", low=0.25
    )
    activation: str = setting(
        "swiglu",
        "activation of the MLP; with swiglu its hidden layer is narrower, for as many parameters",
        choices=("gelu", "relu2", "swiglu"),
    )
    layer: str = setting(
        "local",
        "type of Transformer layer; local has a filter over neighbouring positions, llama is the"
        " layer of Llama, Qwen and Mistral and can be exported",
        choices=LAYERS,
        since=2,
    )
    kv_heads: int = setting(
        0, "llama: heads of keys and values (0: as many as heads)", low=0, since=2
    )
    head_dim: int = setting(0, "llama: width of a head (0: width / heads)", low=0, since=2)
    hidden: int = setting(
        0, "llama: width of the MLP's hidden layer (0: from mlp_ratio)", low=0, since=2
    )
    norm_eps: float = setting(1e-6, "llama: epsilon of RMSNorm", low=0.0, since=2)
    rope_theta: float = setting(10_000.0, "llama: base of the rotary frequencies", low=1.0, since=2)
    rope_scaling: tuple[float, ...] = setting(
        (),
        "llama: scaling of the rotary frequencies; one number divides positions, four are Llama 3's"
        " factor, low and high frequency factors, and original window",
        since=2,
    )
    qk_norm: bool = setting(True, "llama: RMSNorm of each head's queries and keys", since=2)
    biases: str = setting(
        "none",
        "llama: which linear maps have biases; none, qkv (as in Qwen2), attention (qkv and its"
        " output), or all (attention and the MLP)",
        choices=BIASES,
        since=2,
    )
    logit_gain: float = setting(
        0.0,
        "llama: factor of the head's output; 0: 8, with which a new head learns as fast as the"
        " layers, or 1 with tied_embeddings",
        low=0.0,
        since=2,
    )
    tied_embeddings: bool = setting(
        False, "llama: use the embedding's weights as the head", since=2
    )
    taps: int = setting(
        3, "earlier positions that each layer's local filter reads (0: no filter)", low=0, high=16
    )
    dropout: float = setting(0.0, "dropout on residual branches", low=0.0, high=0.9)

    @property
    def head_width(self) -> int:
        return self.head_dim or self.width // self.heads

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def hidden_width(self) -> int:
        """Width of the MLP's hidden layer: `hidden` or, if that is 0, width x `mlp_ratio`. With a
        gate (swiglu) it is 2/3 of this product, so that the number of parameters stays the same."""
        if self.hidden or self.activation != "swiglu":
            return self.hidden or int(self.width * self.mlp_ratio)
        return max(8, round(int(self.width * self.mlp_ratio) * 2 / 3 / 8) * 8)


@dataclass(frozen=True)
class ObjectiveConfig:
    kind: str = setting(
        "denoise", "how blocks learn and how they are composed", choices=tuple(KINDS)
    )
    sigma_min: float = setting(
        1.0, "lowest noise level; below 1 the noisy target leaks the answer", low=0.01
    )
    sigma_max: float = setting(10.0, "highest noise level, where inference starts", low=0.02)
    p_mean: float = setting(-1.2, "mean of ln(sigma), which has a normal distribution")
    p_std: float = setting(1.2, "standard deviation of ln(sigma)", low=0.01)
    sigma_data: float = setting(
        0.5, "standard deviation of the data in EDM preconditioning", low=0.01
    )
    overlap: float = setting(
        0.1,
        "share of its log-width by which a block's training range is widened on each side",
        low=0.0,
        high=1.0,
    )
    partition: str = setting(
        "lognormal",
        "how the range of sigma is cut into blocks; adaptive fits the cuts to a pilot block's loss",
        choices=("lognormal", "adaptive"),
    )
    bounds: tuple[float, ...] = setting(
        (),
        "ascending bounds of the blocks' ranges of sigma, from sigma_min to sigma_max; empty: as"
        " objective.partition says",
    )
    pilot_steps: int = setting(200, "steps of the adaptive partition's pilot block", low=1)
    target_dim: int = setting(256, "dimensions of the frozen target table", low=8)
    logit_scale: str = setting(
        "evidence",
        "scale of a denoising block's logits; evidence makes the skip path exact Gaussian evidence,"
        " learned is one trained scalar",
        choices=("evidence", "learned"),
    )
    sigma_rank: int = setting(8, "rank of the map from sigma to the modulation of layers", low=1)
    tail: int = setting(
        4,
        "private layers that a block of a cascade predicts through; the last block has none",
        low=0,
    )
    lead: float = setting(
        0.25,
        "share of its steps by which a block of a cascade stays behind the one before it; 0 trains"
        " all at once, 1 one after another",
        low=0.0,
        high=1.0,
    )
    order: str = setting(
        "side-by-side",
        "order in which the blocks of a cascade train; side-by-side keeps objective.lead, relay"
        " trains one block after another, with one learning-rate schedule over all of them",
        choices=ORDERS,
        since=2,
    )
    inherit: str = setting(
        "auto",
        "whether a block of a cascade starts as the tail and head of the block before it, and"
        " further layers without effect; auto: in a relay without train.warm_start",
        choices=("auto", "yes", "no"),
        since=2,
    )
    turn_steps: int = setting(
        50,
        "turns: steps that a block trains before the next block's turn; with workers, at least the"
        " steps of a few leases",
        low=1,
        since=2,
    )
    refresh_every: int = setting(
        50,
        "steps after which a block of a cascade looks for newer versions of the blocks before it",
        low=1,
    )
    frozen: str = setting(
        "bf16",
        "number type of the frozen blocks that a block trains with",
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
        " (prepares for serving in mode sweep)",
        low=0.0,
        high=1.0,
    )


@dataclass(frozen=True)
class DataConfig:
    source: str = setting("stdlib", SOURCES)
    unpack_limit_mb: int = setting(
        4096, "largest size in megabytes that one source may unpack to", low=1
    )
    most_mb: int = setting(
        0,
        "megabytes of training text to use at most (0: all); of a dataset of the hub, only files"
        " with that much text are downloaded",
        low=0,
        since=2,
    )
    tokenizer: str = setting(
        "bytes",
        "bytes; bpe:N (trained on the run's own text, with N tokens); hf:NAME; or the path of a"
        " tokenizer.json, or of a folder with one or with GPT-2's vocab.json and merges.txt",
        since=2,
    )


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary of a run's tokenizer. Written when the run is created, not by hand; a run of
    bytes stores none, and has BYTE_VOCABULARY."""

    sha256: str = setting("", "digest of the run's tokenizer; empty: bytes", since=2)
    size: int = setting(0, "tokens the model predicts, padding included", low=0, since=2)
    bos: int = setting(0, "id that precedes the first token of a text", low=0, since=2)
    starts_with_bos: bool = setting(True, "whether prompts begin with that id", since=2)
    eos: tuple[int, ...] = setting((), "ids that end a document", since=2)
    mask: int = setting(0, "id in place of a token that is not known yet", low=0, since=2)
    bytes_per_token: float = setting(
        1.0, "average bytes per token of the training text", low=0.0, since=2
    )

    @property
    def ids(self) -> int:
        """Number of ids that a model reads: tokens and special ids."""
        return max(self.size - 1, self.bos, self.mask) + 1

    @property
    def is_bytes(self) -> bool:
        return not self.sha256

    @property
    def digest(self) -> str:
        return self.sha256 or "bytes"


BYTE_VOCABULARY = Vocabulary(size=256, bos=256, mask=257)


@dataclass(frozen=True)
class TrainConfig:
    steps: int = setting(2500, "optimizer steps per block", low=1)
    extended_at: tuple[int, ...] = setting(
        (),
        "ascending numbers of steps at which the run ended before it was extended (`blocktrain"
        " extend`)",
        since=2,
    )
    batch: int = setting(64, "windows per optimizer step", low=1)
    accumulate: int = setting(1, "micro-batches that a step's batch is split into", low=1)
    optimizer: str = setting(
        "muon",
        "muon: orthogonalised momentum for the layers' matrices, AdamW for all else; adamw: AdamW"
        " for all",
        choices=("adamw", "muon"),
    )
    lr: float = setting(
        4e-3, "peak learning rate; adamw needs a quarter to a half of muon's", low=0.0
    )
    lr_floor: float = setting(0.05, "final learning rate as a share of the peak", low=0.0, high=1.0)
    warmup: int = setting(100, "steps of linear warm-up", low=0)
    weight_decay: float = setting(0.1, "weight decay of matrices", low=0.0)
    beta1: float = setting(0.9, "AdamW beta1", low=0.0, high=0.9999)
    beta2: float = setting(0.95, "AdamW beta2", low=0.0, high=0.99999)
    clip: float = setting(1.0, "gradient norm to clip at (0: no clipping)", low=0.0)
    seed: int = setting(0, "seed of weights, data order and noise", low=0, high=2**63 - 1)
    device: str = setting("auto", "auto, cpu, mps, cuda or cuda:N")
    precision: str = setting(
        "auto",
        "number type to compute in; auto: bf16 on GPUs and CPUs that are fast at it, else fp32",
        choices=("auto", "fp32", "bf16"),
    )
    compile: bool = setting(
        False, "torch.compile the training step, on a GPU with Triton and a C compiler"
    )
    cuda_graph: bool = setting(
        True, "replay the step as a CUDA graph (not together with checkpoint_layers)"
    )
    checkpoint_layers: bool = setting(False, "recompute layers in the backward pass (less memory)")
    frozen_in: str = setting(
        "memory",
        "where the frozen blocks are that a block trains with; memory, or disk, from which a step"
        " reads one after another (less memory, the same bits)",
        choices=("memory", "disk"),
        since=2,
    )
    save_every: int = setting(250, "steps between checkpoints", low=1)
    eval_every: int = setting(0, "steps between scores on valid (0: never)", low=0)
    eval_windows: int = setting(64, "windows of valid per score", low=1)
    keep: str = setting(
        "last",
        "which version of a finished block to use; last: the newest, best: the one with the lowest"
        " cross entropy on valid",
        choices=("last", "best"),
    )
    max_skipped: int = setting(
        20, "steps in a row with a non-finite loss or gradient after which training stops", low=1
    )
    warm_start: str = setting("", "folder of a run whose weights to start from")
    log_to: str = setting(
        "nothing",
        "also send loss, scores and speed to this program (on one machine)",
        choices=("nothing", "tensorboard", "wandb", "mlflow", "trackio"),
        since=2,
    )

    @property
    def ends(self) -> tuple[int, ...]:
        """The end of each phase, in steps per block; the last one is `steps`."""
        return (*self.extended_at, self.steps)

    def learning_rate(self, step: int, blocks: int = 1) -> float:
        """The rate of a step. If this many `blocks` share the schedule, in turns, the steps of all
        of them are counted.

        The first phase has a linear warm-up and a cosine down to a floor. A later phase warms up
        from the floor to the cosine of a run that was planned up to the phase's end, and follows
        it. So an extension changes no rate before the former end.
        """
        first, end = (blocks * bound for bound in phase(self.ends, step // blocks))
        progress = min(1.0, step / end)
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        if not first:
            warm = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
            return self.lr * warm * (self.lr_floor + (1.0 - self.lr_floor) * cosine)
        warmup = min(self.warmup, (end - first) // WARMUP_PART)
        warm = min(1.0, (step - first + 1) / (warmup + 1))
        return self.lr * (self.lr_floor + (1.0 - self.lr_floor) * cosine * warm)


@dataclass(frozen=True)
class SwarmConfig:
    lease_seconds: float = setting(
        30.0, "training time of a lease in seconds, at the worker's measured speed", low=0.1
    )
    first_steps: int = setting(10, "steps of a worker's first lease", low=1)
    most_steps: int = setting(100, "most steps of one lease", low=1)
    deadline_factor: float = setting(
        4.0, "a lease's deadline as a multiple of its expected time", low=1.0
    )
    shortest_deadline: float = setting(60.0, "shortest deadline in seconds", low=0.5)
    longest_deadline: float = setting(
        86_400.0,
        "longest deadline in seconds; a lease never lasts longer than 30 times lease_seconds *"
        " deadline_factor",
        low=1.0,
    )
    heartbeat_timeout: float = setting(
        120.0,
        "seconds without a heartbeat after which a worker's leases expire; workers send one every"
        " 10 seconds or more often",
        low=30.0,
        since=2,
    )
    take_over: bool = setting(
        True,
        "let idle workers train the batches of leases that others would end much later",
        since=2,
    )
    quorum: int = setting(
        2,
        "updates of a block to wait for before a merge; one per worker if it has fewer workers",
        low=1,
    )
    grace_seconds: float = setting(
        5.0, "seconds to wait for the other workers' updates once there is a quorum", low=0.0
    )
    most_stale: int = setting(
        4, "number of versions that an update may be behind; older updates are refused", low=0
    )
    late_discount: float = setting(
        0.5,
        "factor of an update's weight for each version that the update is behind",
        low=0.01,
        high=1.0,
    )
    outer_rate: float = setting(
        1.0, "learning rate of the outer step; 1: a version is the mean", low=0.0, high=2.0
    )
    outer_momentum: float = setting(0.0, "Nesterov momentum between versions", low=0.0, high=0.999)
    codec: str = setting(
        "none",
        "encoding of updates and versions; none sends them whole in fp32, all others as deltas",
        choices=CODECS,
    )
    top_k_per_4096: int = setting(
        154,
        "how many of every 4096 numbers of an update the codec sparse sends",
        low=1,
        high=4096,
        since=2,
        formerly="kept",
    )
    top_k_per_4096_down: int = setting(
        0,
        "how many of every 4096 numbers of a delta the codec sparse sends; 0: as many as its"
        " updates together",
        low=0,
        high=4096,
        since=2,
        formerly="kept_down",
    )
    keep_versions: int = setting(3, "number of newest versions of each block to keep", low=1)
    keep_updates: int = setting(
        16,
        "number of newest versions of each block whose updates are kept, so that `blocktrain"
        " unmerge` can remove them again; 0: none",
        low=0,
        since=2,
    )
