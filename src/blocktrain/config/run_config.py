"""All settings of a run as one value: checked together, with what follows from them, and read from
TOML files (written by people or stored by blocktrain) and from --set.

Imports no torch: coordinators, workers and the command line all read settings here.
"""

import dataclasses
import logging
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import StatisticsError
from typing import Any, Self, get_type_hints

from blocktrain.config.extensions import extended_values
from blocktrain.config.schedule import phase, turn
from blocktrain.config.sections import Values, build, current_names, stored_values, toml_text
from blocktrain.config.settings import (
    BYTE_VOCABULARY,
    END_TO_END,
    KINDS,
    LLAMA_SETTINGS,
    DataConfig,
    Kind,
    ModelConfig,
    ObjectiveConfig,
    SwarmConfig,
    TrainConfig,
    Vocabulary,
)
from blocktrain.errors import ConfigError
from blocktrain.numerics.noise import LogNormal, Partition, lognormal_partition

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    data: DataConfig = field(default_factory=DataConfig)
    vocab: Vocabulary = field(default_factory=Vocabulary)
    train: TrainConfig = field(default_factory=TrainConfig)
    swarm: SwarmConfig = field(default_factory=SwarmConfig)

    def __post_init__(self) -> None:
        _check_shape(self.model, self.kind)
        _check_sigmas(self.model, self.objective)
        self._check_partition()
        if self.train.batch % self.train.accumulate:
            raise ConfigError(
                f"train.batch = {self.train.batch} must be a multiple of train.accumulate ="
                f" {self.train.accumulate}"
            )
        if self.train.keep == "best" and not self.train.eval_every:
            raise ConfigError('train.keep = "best" needs scores: set train.eval_every above 0')
        ends = self.train.ends
        if list(ends) != sorted(set(ends)) or ends[0] < 1:
            raise ConfigError(
                f"train.extended_at = {list(ends[:-1])} must be ascending numbers from 1 to below"
                f" train.steps = {self.train.steps}"
            )
        self._check_order()

    def _check_order(self) -> None:
        objective, train = self.objective, self.train
        if self.kind.denoises and self.data.source.startswith("chat:"):
            raise ConfigError(
                "data.source = chat:... does not work with denoising blocks; set objective.kind to"
                " cascade, end_to_end or turns"
            )
        if self.kind.denoises and objective.order == "relay":
            raise ConfigError(
                "objective.order = relay needs objective.kind = cascade; denoising blocks do not"
                " build on each other"
            )
        if self.inherits and train.warm_start:
            raise ConfigError(
                "objective.inherit = yes does not work with train.warm_start, which gives every"
                " block its first weights; set one of them"
            )
        if self.kind.reads_successors and train.keep == "best":
            raise ConfigError(
                "objective.kind = turns needs train.keep = last: its blocks are only good together,"
                " in their newest versions"
            )

    def _check_partition(self) -> None:
        try:
            bounds = self.partition().bounds
        except (StatisticsError, OverflowError):
            bounds = ()
        if len(set(bounds)) != self.model.blocks + 1 or list(bounds) != sorted(bounds):
            raise ConfigError(
                "objective.p_mean and objective.p_std leave too little probability between"
                " objective.sigma_min and sigma_max to cut the range into blocks; raise p_std"
            )

    @property
    def kind(self) -> Kind:
        return KINDS[self.objective.kind]

    @property
    def block_count(self) -> int:
        """Number of blocks that are trained separately; 1 for an end-to-end model."""
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
        """Number of private layers after a block's own. The last block needs none."""
        is_last = block == self.block_count - 1
        return self.objective.tail if self.kind.has_tails and not is_last else 0

    def has_head(self, block: int) -> bool:
        """Whether a block predicts tokens by itself."""
        return not self.kind.last_block_predicts or block == self.block_count - 1

    @property
    def trained_layers(self) -> int:
        """The largest number of layers that a block trains, its tail included."""
        return max(depth + self.tail_layers(block) for block, depth in enumerate(self.depths))

    @property
    def vocabulary(self) -> Vocabulary:
        return BYTE_VOCABULARY if self.vocab.is_bytes else self.vocab

    @property
    def default_readout(self) -> str:
        """How the blocks' predictions become the model's, unless a command is told otherwise. Of
        tokens it is the last block's prediction: the one that can be exported, and that a ring can
        send."""
        several = self.block_count > 1 and not self.kind.last_block_predicts
        return "product" if several and self.vocab.is_bytes else "final"

    @property
    def bytes_per_step(self) -> int:
        """Bytes of text that one optimizer step is trained on."""
        tokens = self.train.batch * self.model.window
        return round(tokens * self.vocabulary.bytes_per_token)

    @property
    def state_width(self) -> int:
        """Width of what blocks pass on at each position: the guess z, or features."""
        return self.objective.target_dim if self.kind.denoises else self.model.width

    @property
    def lead(self) -> float:
        """Share of its steps by which a block stays behind the one whose features it reads."""
        if self.turn_steps:
            return 0.0
        return self.objective.lead if self.kind.reads_predecessors else 0.0

    @property
    def turn_steps(self) -> int:
        """Steps after which the next block trains; 0 if blocks train side by side. A relay has one
        turn per block."""
        if self.kind.reads_successors:
            return min(self.objective.turn_steps, self.train.steps)
        is_relay = self.kind.has_tails and self.objective.order == "relay"
        return self.train.steps if is_relay else 0

    @property
    def inherits(self) -> bool:
        """Whether a block starts as the tail of the block before it."""
        if not self.kind.has_tails or self.objective.inherit == "no":
            return False
        in_relay = bool(self.turn_steps) and not self.train.warm_start
        return in_relay or self.objective.inherit == "yes"

    def frozen_blocks(self, block: int) -> tuple[int, ...]:
        """The blocks whose frozen layers this block trains with."""
        before = range(block if self.kind.reads_predecessors else 0)
        after = range(block + 1, self.block_count if self.kind.reads_successors else 0)
        return (*before, *after)

    def stop(self, step: int) -> int:
        """Where a block that is trained alone stops, after this step at the earliest: at the end of
        its turn or, without turns, of the phase."""
        ends, each = self.train.ends, self.turn_steps
        return (turn(ends, each, step) if each else phase(ends, step)).end

    def stops(self) -> Iterator[int]:
        """All stops, in order; the last one is the end of the run."""
        reached = 0
        while reached < self.train.steps:
            reached = self.stop(reached)
            yield reached

    def learning_rate(self, block: int, step: int) -> float:
        """The rate of a block's step. Blocks that take turns share one schedule."""
        if not self.turn_steps:
            return self.train.learning_rate(step)
        first, end = turn(self.train.ends, self.turn_steps, step)
        position = self.block_count * first + block * (end - first) + step - first
        return self.train.learning_rate(position, self.block_count)

    def extended_to(self, steps: int) -> Self:
        """The settings of this run, extended to this many steps per block."""
        if steps <= self.train.steps:
            raise ConfigError(
                f"the run is planned for {self.train.steps} steps per block already; give a larger"
                " number of steps"
            )
        return self.with_settings(train__steps=steps, train__extended_at=self.train.ends)

    def planned_for(self, steps: int) -> Self:
        """The settings that the run had when it was planned for this many steps; the current ones
        if it never was."""
        *before, _ = ends = self.train.ends
        if steps not in before:
            return self
        earlier = ends[: ends.index(steps)]
        return self.with_settings(train__steps=steps, train__extended_at=earlier)

    def first_step(self, block: int) -> int:
        """How many steps block 0 has made when this block begins, at equal speed of all blocks."""
        return round(block * self.lead * self.train.steps)

    @property
    def warnings(self) -> list[str]:
        if self.kind.reads_successors and not self.train.warm_start:
            return [
                "objective.kind = turns trains a finished model on, but this one begins untrained;"
                " set train.warm_start to the run of the model"
            ]
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
        """A copy with some settings replaced: section__key=value."""
        values = self.to_dict()
        for name, value in settings.items():
            section, key = name.split("__")
            values[section][key] = value
        return build(type(self), values)

    def to_dict(self) -> Values:
        return dataclasses.asdict(self)

    def to_toml(self) -> str:
        """Settings to store or send; see `stored_values` for the releases that can read them."""
        return toml_text(stored_values(self))


def balanced_depths(layers: int, blocks: int, tail: int) -> tuple[int, ...]:
    """Depths such that the last block, which has no tail, trains as many layers as the others.

    A remainder goes to the last block first, then to the earliest ones, which run the fewest frozen
    layers.
    """
    last = min(-(-(layers + (blocks - 1) * tail) // blocks), layers - blocks + 1)
    if blocks == 1:
        return (layers,)
    share, remainder = divmod(layers - last, blocks - 1)
    return (*(share + (block < remainder) for block in range(blocks - 1)), last)


def _check_shape(model: ModelConfig, kind: Kind) -> None:
    if model.layers < model.blocks:
        raise ConfigError(
            f"model.blocks = {model.blocks} must be at most model.layers = {model.layers}"
        )
    has_equal_blocks = not (kind.whole_model or kind.has_tails or model.depths)
    if has_equal_blocks and model.layers % model.blocks:
        raise ConfigError(
            f"model.layers = {model.layers} cannot be cut into model.blocks = {model.blocks}"
            " equal blocks; set unequal ones with model.depths"
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
    if not model.head_dim and model.width % (2 * model.heads):
        raise ConfigError(
            f"model.width = {model.width} must be an even multiple of model.heads = {model.heads};"
            " or set model.head_dim, which needs model.layer = llama"
        )
    _check_layer(model, kind)


def _check_layer(model: ModelConfig, kind: Kind) -> None:
    if model.layer != "llama":
        defaults = ModelConfig()
        for name in LLAMA_SETTINGS:
            if getattr(model, name) != getattr(defaults, name):
                raise ConfigError(f"model.{name} needs model.layer = llama")
        return
    if model.head_dim % 2:
        raise ConfigError(f"model.head_dim = {model.head_dim} must be even")
    if model.kv_heads and model.heads % model.kv_heads:
        raise ConfigError(
            f"model.heads = {model.heads} must be a multiple of model.kv_heads = {model.kv_heads}"
        )
    if len(model.rope_scaling) not in (0, 1, 4):
        raise ConfigError(
            f"model.rope_scaling must be a list of 0, 1 or 4 numbers, not {len(model.rope_scaling)}"
        )
    if model.activation != "swiglu":
        raise ConfigError("model.layer = llama needs model.activation = swiglu")
    if model.tied_embeddings and not (kind.whole_model or kind.last_block_predicts):
        raise ConfigError(
            f"model.tied_embeddings does not work with objective.kind = {kind.name}, whose blocks"
            " each have a head of their own; use objective.kind = end_to_end"
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


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """Load a file that a person wrote, and apply `section.key=value` overrides."""
    config = build(Config, read_settings(path, overrides))
    if config.kind.last_block_predicts and config.model.tied_embeddings and config.block_count > 1:
        raise ConfigError(
            f"objective.kind = {config.kind.name} trains the embedding and the head in different"
            " blocks; set model.tied_embeddings=false, and the head starts as a copy"
        )
    return config


def load_stored_config(path: Path | str) -> Config:
    """Load a file that `to_toml` wrote, with the extensions beside it."""
    return from_dict(extended_values(_read(path)[1], Path(path)))


def from_toml(text: str) -> Config:
    """Settings from a text that `to_toml` wrote."""
    try:
        values = tomllib.loads(text)
    except RecursionError:
        raise ConfigError("the settings are nested too deeply") from None
    return from_dict(_without_removed(values))


def from_dict(values: Mapping[str, Any]) -> Config:
    return build(Config, values)


def read_settings(path: Path | str, overrides: Sequence[str] = ()) -> Values:
    """Read a TOML file that a person wrote, and apply overrides. Validates nothing."""
    text, values = _read(path)
    is_stored = _is_stored(text, values)
    for section, settings in values.items():
        if isinstance(settings, dict):
            names = [_current(section, key, warn=not is_stored) for key in settings]
            if len(set(names)) == len(names):  # else `build` reports the duplicate
                values[section] = dict(zip(names, settings.values(), strict=True))
    values = extended_values(values, Path(path))
    for override in overrides:
        _apply_override(values, override)
    return values


def _read(path: Path | str) -> tuple[str, Values]:
    """The text of a file and the settings in it."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        return text, _without_removed(tomllib.loads(text))
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}; check the path") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML ({error}); correct it") from None


def _is_stored(text: str, values: Values) -> bool:
    """Whether `to_toml` wrote the text. Such a text uses old names on purpose, so they cause no
    warning."""
    try:
        return from_dict(values).to_toml() == text
    except ConfigError:
        return False


def _current(section: str, key: str, *, warn: bool = True) -> str:
    """The current name of a setting. Logs a warning if the setting was renamed."""
    kind = get_type_hints(Config).get(section)
    name = current_names(kind).get(key, key) if kind else key
    if name != key and warn:
        log.warning("the setting %s.%s was renamed; use %s.%s", section, key, section, name)
    return name


def _without_removed(values: Values) -> Values:
    """Replace settings that were removed: train.tensorboard by train.log_to, and objective.stagger,
    which dates from when AdamW was the only optimizer and blocks had no lead."""
    objective, train = values.get("objective", {}), values.get("train", {})
    if isinstance(train, dict) and "tensorboard" in train:
        train = {key: value for key, value in train.items() if key != "tensorboard"}
        log_to = {"log_to": "tensorboard"} if values["train"]["tensorboard"] else {}
        values = {**values, "train": {**log_to, **train}}
    if "stagger" not in objective:
        return values
    if objective["stagger"]:
        raise ConfigError("objective.stagger was removed; use objective.lead")
    remaining = {key: value for key, value in objective.items() if key != "stagger"}
    return {
        **values,
        "objective": {"lead": 0.0, **remaining},
        "train": {"optimizer": "adamw", **values.get("train", {})},
    }


def _apply_override(values: Values, override: str) -> None:
    name, equals, text = override.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and key):
        raise ConfigError(f"--set {override!r} is not of the form section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word is a string
    if not isinstance(values.setdefault(section, {}), dict):
        raise ConfigError(f"[{section}] must be a section, not a value")
    values[section][_current(section, key)] = value
