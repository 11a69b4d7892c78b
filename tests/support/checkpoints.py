"""Random models as transformers writes them, with a tokenizer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tests.support.small_tokenizer import small_tokenizer

TOKENS = 384  # of the model; the tokenizer has fewer
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Family:
    """An architecture with settings that use what it has."""

    config: type[transformers.PreTrainedConfig]
    model: type[transformers.PreTrainedModel]
    settings: dict[str, Any]


FAMILIES = {
    "qwen3": Family(
        transformers.Qwen3Config,
        transformers.Qwen3ForCausalLM,
        {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "qwen2": Family(transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "llama": Family(
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {"rope_parameters": SCALED, "tie_word_embeddings": True},
    ),
    "llama-biases": Family(
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
        },
    ),
    "mistral": Family(
        transformers.MistralConfig,
        transformers.MistralForCausalLM,
        {"head_dim": 32, "sliding_window": None},
    ),
}


def random_model(name: str, layers: int = 3, **changes: Any) -> transformers.PreTrainedModel:
    """A model whose every weight, norms and biases included, is random."""
    family = FAMILIES[name]
    settings = {
        "vocab_size": TOKENS,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "initializer_range": 0.2,
        **family.settings,
        **changes,
    }
    torch.manual_seed(0)
    model = family.model(family.config(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def saved(model: transformers.PreTrainedModel, folder: Path, **options: Any) -> Path:
    """A checkpoint with a tokenizer, as it is found on the hub."""
    model.save_pretrained(folder, **options)
    for name, data in small_tokenizer().files.items():
        (folder / name).write_bytes(data)
    return folder
