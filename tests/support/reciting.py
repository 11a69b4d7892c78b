"""A run with a tokenizer, whose model recites: whatever comes before, a token has one successor."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import tokenizers
import torch

from blocktrain.config import Config, load_config
from blocktrain.data.tokenizer import SubwordTokenizer
from blocktrain.model.stack import Stack, assemble, new_block
from blocktrain.storage.run_dir import RunDir

ROOT = Path(__file__).resolve().parents[2]
START, END, USER, ASSISTANT = "<|start|>", "<|end|>", "<|user|>", "<|assistant|>"
VERSE = " the cat sat on a mat"  # after ASSISTANT, until END
CIRCLE = (
    "🎈é日"  # its bytes are tokens of their own, each followed by the next, the last by the first
)
TEMPLATE = """{{ bos_token }}{% for message in messages %}
{%- if message.role == "assistant" and loop.first %}
{{- raise_exception("the user speaks first") }}{% endif %}
{{- "<|" ~ message.role ~ "|>" ~ (message.content | trim) ~ eos_token }}{% endfor %}
{%- if add_generation_prompt %}{{ "<|assistant|>" }}{% endif %}"""


@cache
def reciting_tokenizer(template: str | None = TEMPLATE) -> SubwordTokenizer:
    """A BPE of bytes like GPT-2's, with a token for each word of the verse."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=[END, START, USER, ASSISTANT, "<|system|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([VERSE], trainer)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": START, "eos_token": END}
    files = {
        "tokenizer.json": bpe.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }
    if template is not None:
        files["chat_template.jinja"] = template.encode()
    return SubwordTokenizer(files)


def with_tokenizer(config: Config, tokenizer: SubwordTokenizer) -> Config:
    return replace(config, vocab=tokenizer.vocabulary)


def reciting_config(kind: str = "end_to_end", blocks: int = 1, window: int = 64) -> Config:
    settings = [
        "model.layer=llama", "model.layers=2", f"model.blocks={blocks}", "model.width=128",
        f"model.window={window}", f"objective.kind={kind}",
    ]  # fmt: skip
    return load_config(ROOT / "configs" / "tiny.toml", settings)


def successors(tokenizer: SubwordTokenizer) -> dict[int, int]:
    verse = tokenizer.encode(ASSISTANT + VERSE + END, marks=True)
    circle = tokenizer.encode(CIRCLE * 2)
    return dict(pairwise(verse)) | dict(pairwise(circle))


def reciting_stack(config: Config, following: Mapping[int, int]) -> Stack:
    """Layers that add nothing, and a head that answers an embedding with its successor."""
    torch.manual_seed(0)
    blocks = [new_block(config, index) for index in range(config.block_count)]
    first, last = blocks[0], blocks[-1]
    with torch.no_grad():
        for block in blocks:
            for name, parameter in block.named_parameters():
                if name.endswith(("out.weight", "down.weight")):
                    parameter.zero_()
        rows_VD = torch.nn.functional.normalize(first.embed.weight, dim=1)
        last.head.weight.zero_()
        for token, successor in following.items():
            last.head.weight[successor] += rows_VD[token] / 2
    return assemble(config, blocks)


def stored(folder: Path, stack: Stack, tokenizer: SubwordTokenizer) -> Path:
    run = RunDir.create_exported(folder, stack.config)
    run.store_tokenizer(tokenizer.files)
    run.write_exported([_weights(block) for block in stack.blocks])
    return folder


def _weights(block: torch.nn.Module) -> dict[str, object]:
    return {name: parameter.detach().numpy() for name, parameter in block.named_parameters()}
