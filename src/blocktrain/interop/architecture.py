"""A model's settings and weights in the words of Hugging Face: config.json and names of tensors.

Supports the architectures that `model.layer = "llama"` covers. An unsupported setting is an error
that names it, since ignoring it would silently give wrong numbers. A weight of a block is one
tensor of the checkpoint, or several tensors' rows end to end. So both directions copy bytes, and
numbers do not change.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from blocktrain.config import Config, ModelConfig
from blocktrain.errors import ConfigError

Json = Mapping[str, Any]

ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
}
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
# Defaults of transformers for values that config.json lacks.
DEFAULT_EPS = 1e-6
DEFAULT_WINDOW = {"qwen3": 32768, "qwen2": 32768, "llama": 2048, "mistral": 131072}
DEFAULT_QWEN3_HEAD = 128
DEFAULT_MISTRAL_WINDOW = 4096
DEFAULT_MISTRAL_KV_HEADS = 8
DEFAULT_QWEN_KV_HEADS = 32
DEFAULT_THETA = 10_000.0

MOST_POSITIONS = 4096  # default limit of the window, which caches need memory for


@dataclass(frozen=True)
class Architecture:
    """A model as config.json describes it."""

    model: ModelConfig
    vocab_size: int


def from_hugging_face(config: Json, blocks: int, window: int | None = None) -> Architecture:
    """Settings for the model of a config.json, cut into this many blocks. `window`: the number of
    positions to use; None: as many as the model supports, but at most 4096."""
    kind = _known_architecture(config)
    _refuse_unsupported(config, kind)
    window = _window(config, kind, window)
    width, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    layers, hidden = _number(config, "num_hidden_layers"), _number(config, "intermediate_size")
    if blocks > layers:
        raise ConfigError(f"--blocks {blocks} exceeds the model's layers; use at most {layers}")
    theta, scaling = _rope(config)
    model = ModelConfig(
        layers=layers,
        width=width,
        heads=heads,
        blocks=blocks,
        depths=tuple(layers // blocks + (block < layers % blocks) for block in range(blocks)),
        window=window,
        layer="llama",
        kv_heads=_kv_heads(config, kind, heads),
        head_dim=int(
            config.get("head_dim") or (DEFAULT_QWEN3_HEAD if kind == "qwen3" else width // heads)
        ),
        hidden=hidden,
        norm_eps=float(config.get("rms_norm_eps", DEFAULT_EPS)),
        rope_theta=theta,
        rope_scaling=scaling,
        qk_norm=kind == "qwen3",
        biases=_biases(config, kind),
        logit_gain=1.0,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
    )
    return Architecture(model, _number(config, "vocab_size"))


def to_hugging_face(config: Config, dtype: str, original: Json | None = None) -> dict[str, Any]:
    """The config.json for a model with these settings. `original`: the config.json of an imported
    model, which is kept."""
    spelled_twice = {**_rope_described(config.model), "dtype": dtype, "torch_dtype": dtype}
    if original is not None:
        return {**spelled_twice, **original, "dtype": dtype, "torch_dtype": dtype}
    model, vocabulary = config.model, config.vocabulary
    kind = architecture_name(model)
    eos = list(vocabulary.eos)
    described = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": vocabulary.size,
        "hidden_size": model.width,
        "intermediate_size": model.hidden_width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.key_heads,
        "head_dim": model.head_width,
        "hidden_act": "silu",
        "max_position_embeddings": model.window,
        "rms_norm_eps": model.norm_eps,
        "attention_bias": model.biases in ("attention", "all"),
        "mlp_bias": model.biases == "all",
        "attention_dropout": 0.0,
        "tie_word_embeddings": model.tied_embeddings,
        "use_sliding_window": False,
        "sliding_window": None,
        "bos_token_id": vocabulary.bos,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "initializer_range": 0.02,
        "use_cache": True,
        **spelled_twice,
    }
    if kind == "qwen2":  # its biases are not a setting
        del described["attention_bias"], described["mlp_bias"]
    return described


def _rope_described(model: ModelConfig) -> dict[str, Any]:
    """The rotary frequencies in both spellings: transformers 5 reads rope_parameters; older
    releases and converters read rope_theta and rope_scaling."""
    scaling: dict[str, Any] = {"rope_type": "default"}
    if len(model.rope_scaling) == 1:
        scaling = {"rope_type": "linear", "factor": model.rope_scaling[0]}
    elif model.rope_scaling:
        factor, low, high, window = model.rope_scaling
        scaling = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": int(window),
        }
    return {
        "rope_parameters": {**scaling, "rope_theta": model.rope_theta},
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling if model.rope_scaling else None,
    }


def architecture_name(model: ModelConfig) -> str:
    """The Hugging Face model type (llama, qwen2 or qwen3) whose layers have these norms and
    biases."""
    if model.qk_norm and model.biases == "none":
        return "qwen3"
    if not model.qk_norm and model.biases == "qkv":
        return "qwen2"
    if not model.qk_norm:
        return "llama"
    raise ConfigError(
        f"no Hugging Face architecture has both model.qk_norm and model.biases = {model.biases};"
        " train with model.qk_norm = false or model.biases = none"
    )


def _number(config: Json, name: str) -> int:
    try:
        return int(config[name])
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"config.json lacks a valid {name}; copy or download it again") from None


def _known_architecture(config: Json) -> str:
    kind = str(config.get("model_type", ""))
    if kind not in ARCHITECTURES:
        raise ConfigError(
            f"config.json: model_type {kind!r} is not supported; use a model of type"
            f" {', '.join(ARCHITECTURES)}"
        )
    return kind


def _window(config: Json, kind: str, requested: int | None) -> int:
    """The number of positions to use: at most the size of a sliding window, within which attention
    is ordinary attention."""
    most = int(config.get("max_position_embeddings") or DEFAULT_WINDOW[kind])
    if requested and requested > most:
        raise ConfigError(
            f"--window {requested} exceeds the {most} positions of the model; use --window {most}"
            " or less"
        )
    limit = _sliding_window(config, kind)
    if limit and requested and requested > limit:
        raise ConfigError(
            f"--window {requested}: sliding-window attention is not supported; use --window {limit}"
            " or less"
        )
    return requested or min(most, limit or most, MOST_POSITIONS)


def _sliding_window(config: Json, kind: str) -> int | None:
    """The size of the model's sliding window; None if no layer has one."""
    if kind == "mistral":
        limit = config.get("sliding_window", DEFAULT_MISTRAL_WINDOW)
    elif config.get("use_sliding_window") or "sliding_attention" in _layer_types(config):
        limit = config.get("sliding_window")
    else:
        limit = None
    return None if limit is None else int(limit)


def _layer_types(config: Json) -> set[str]:
    return set(config.get("layer_types") or ["full_attention"])


def _refuse_unsupported(config: Json, kind: str) -> None:
    activation = config.get("hidden_act", "silu")
    architectures = config.get("architectures") or [ARCHITECTURES[kind]]
    layer_types = _layer_types(config) - {"full_attention", "sliding_attention"}
    unsupported = {
        f"hidden_act {activation}": activation not in ("silu", "swish"),
        f"layers of type {', '.join(sorted(layer_types))}": bool(layer_types),
        f"the architecture {', '.join(architectures)}": ARCHITECTURES[kind] not in architectures,
        "dual_chunk_attention_config": bool(config.get("dual_chunk_attention_config")),
        "quantized weights": bool(config.get("quantization_config")),
        "attention_bias with QK norm": kind == "qwen3" and bool(config.get("attention_bias")),
        "pretraining_tp": config.get("pretraining_tp", 1) not in (1, None),
        "mlp_bias without attention_bias": bool(config.get("mlp_bias"))
        and not config.get("attention_bias"),
    }
    names = [name for name, is_set in unsupported.items() if is_set]
    if names:
        raise ConfigError(
            f"config.json: {', '.join(names)} is not supported; use another {kind} model"
        )


def _kv_heads(config: Json, kind: str, heads: int) -> int:
    if (heads_in_config := config.get("num_key_value_heads")) is not None:
        return int(heads_in_config)
    if kind == "mistral":
        return DEFAULT_MISTRAL_KV_HEADS
    return DEFAULT_QWEN_KV_HEADS if kind.startswith("qwen") else heads


def _biases(config: Json, kind: str) -> str:
    if kind == "qwen2":
        return "qkv"
    if kind != "llama" or not config.get("attention_bias"):
        return "none"
    return "all" if config.get("mlp_bias") else "attention"


def _rope(config: Json) -> tuple[float, tuple[float, ...]]:
    """Base and scaling of the rotary frequencies, from the keys of old and new releases."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or DEFAULT_THETA)
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    partial = float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1)
    if kind not in ("default", "linear", "llama3") or partial != 1.0:
        name = f"partial_rotary_factor {partial}" if partial != 1.0 else f"rope_type {kind!r}"
        raise ConfigError(f"config.json: {name} is not supported; use another model")
    try:
        if kind == "linear":
            return theta, (float(rope["factor"]),)
        if kind == "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor")
            numbers = [rope[name] for name in (*names, "original_max_position_embeddings")]
            return theta, tuple(map(float, numbers))
    except KeyError as error:
        raise ConfigError(f"config.json: rope_type {kind!r} needs {error}; add it") from None
    return theta, ()


@dataclass(frozen=True)
class Part:
    """A tensor of a checkpoint that makes up `rows` rows of a weight. In a vector, every number is
    a row."""

    name: str
    rows: int


@dataclass(frozen=True)
class WeightMap:
    """A weight of a block, and the tensors that it consists of, in the order of its rows."""

    name: str
    width: int | None  # columns; None: a vector
    parts: tuple[Part, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        rows = sum(part.rows for part in self.parts)
        return (rows,) if self.width is None else (rows, self.width)


def block_weights(config: Config, index: int) -> list[WeightMap]:
    """The weights of a block that a checkpoint contains: all but a private tail and its head."""
    model, tokens = config.model, config.vocabulary.size
    first = sum(config.depths[:index])
    weights = [
        weight
        for layer in range(config.depths[index])
        for weight in _layer_weights(model, f"layers.{layer}", f"model.layers.{first + layer}")
    ]
    is_last = index == config.block_count - 1
    if index == 0:
        weights.append(WeightMap("embed.weight", model.width, (Part(EMBEDDING, tokens),)))
    if is_last:
        weights.append(WeightMap("norm.weight", None, (Part(NORM, model.width),)))
    if is_last and not (model.tied_embeddings and index == 0):
        name = EMBEDDING if model.tied_embeddings else HEAD
        weights.append(WeightMap("head.weight", model.width, (Part(name, tokens),)))
    return weights


def _layer_weights(model: ModelConfig, ours: str, theirs: str) -> Iterator[WeightMap]:
    head, hidden = model.head_width, model.hidden_width
    queries, keys = model.heads * head, model.key_heads * head
    bias_out, bias_mlp = model.biases in ("attention", "all"), model.biases == "all"
    attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
    qkv = (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))
    gate_and_up = (("gate_proj", hidden), ("up_proj", hidden))
    maps = (
        ("qkv", attention, qkv, model.width, model.biases != "none"),
        ("out", attention, (("o_proj", model.width),), queries, bias_out),
        ("mlp.up", mlp, gate_and_up, model.width, bias_mlp),
        ("mlp.down", mlp, (("down_proj", model.width),), hidden, bias_mlp),
    )
    for name, place, parts, width, has_bias in maps:
        for kind, columns in (("weight", width), ("bias", None)):
            if kind == "weight" or has_bias:
                tensors = tuple(Part(f"{place}.{part}.{kind}", rows) for part, rows in parts)
                yield WeightMap(f"{ours}.{name}.{kind}", columns, tensors)
    norms = [
        ("attention_norm", f"{theirs}.input_layernorm", model.width),
        ("mlp_norm", f"{theirs}.post_attention_layernorm", model.width),
    ]
    if model.qk_norm:
        norms += [
            ("q_norm", f"{attention}.q_norm", head),
            ("k_norm", f"{attention}.k_norm", head),
        ]
    for name, place, size in norms:
        yield WeightMap(f"{ours}.{name}.weight", None, (Part(f"{place}.weight", size),))
