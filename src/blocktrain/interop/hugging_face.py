"""A run's model for other programs: its tensors, its tokenizer, and a Hugging Face folder of both
with a config.json and a card (README.md) from the run's own numbers.

The tensors are all layers, and the head of the last block, with the names of a Hugging Face
checkpoint. In a cascade this is the readout `final`; the other blocks' private tails are left out.
"""

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from blocktrain import __version__
from blocktrain.codec.dense import from_bf16, to_bf16
from blocktrain.config import BYTE_VOCABULARY, Config
from blocktrain.data.tokenizer import TOKENIZER_FILE, SubwordTokenizer
from blocktrain.errors import ConfigError, RunError
from blocktrain.files import write_bytes
from blocktrain.interop.architecture import (
    ARCHITECTURES,
    EMBEDDING,
    NORM,
    WeightMap,
    architecture_name,
    block_weights,
    to_hugging_face,
)
from blocktrain.interop.checkpoint import (
    INDEX,
    OnCopied,
    TensorOut,
    TensorRange,
    check_space,
    file_tensors,
    split_into_shards,
    write_tensors,
)
from blocktrain.model.block import logit_gain
from blocktrain.storage.block_dir import SavedVersion
from blocktrain.storage.run_dir import RunDir
from blocktrain.storage.tensor_file import DTYPES, Array

STORED = "stored"  # keeps the run's number types
TYPES = {"f32": "F32", "bf16": "BF16", "f16": "F16"}
LARGEST_F16 = 65504.0
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
UNNAMED_START = "<|start|>"
SPECIAL = {
    "special": True,
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
}
METADATA = {"format": "pt"}  # older releases of transformers require it
DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
CARD = "README.md"
CARD_TEXT = """---
library_name: transformers
pipeline_tag: text-generation
tags: [blocktrain]
{base}---

{described}
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained({name})
tokenizer = AutoTokenizer.from_pretrained({name})
prompt = tokenizer('Once upon a time', return_tensors='pt')
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=50)[0]))
```
"""


def refuse_unexportable(config: Config, readout: str = "final") -> None:
    """Raise ConfigError for a model that no other program can compute."""
    reasons = {
        "objective.kind = denoise: its blocks refine a noisy target, which no other program does;"
        " serve it with blocktrain, or train a cascade": config.kind.denoises,
        "model.layer = local has a filter over neighbouring positions, which other programs lack;"
        " train with model.layer = llama": config.model.layer == "local",
        f"a model of bytes reads {BYTE_VOCABULARY.ids} ids and predicts {BYTE_VOCABULARY.size}, but"
        " other programs need one number for both; train with data.tokenizer, for example bpe:1024":
        config.vocabulary.is_bytes,
        "the product of several blocks' predictions is no model of another program; export the"
        " readout final, or serve the product with blocktrain": readout == "product"
        and config.block_count > 1,
    }  # fmt: skip
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(f"the run cannot be exported: {reason}")
    architecture_name(config.model)  # raises if there is none


def exported_tensors(run: RunDir, dtype: str = STORED, vectors: str = "") -> list[TensorOut]:
    """The tensors in the order of the layers, in the run's number type or in `dtype`. `vectors`:
    the type of norms and biases, if it differs."""
    config = run.config
    tensors: dict[str, TensorOut] = {}
    for index in range(config.block_count):
        for tensor in _block_tensors(run, index):
            tensors.setdefault(tensor.name, tensor)  # the last block may have the embedding too
    gain = logit_gain(config.model)
    # The last norm absorbs the gain: logits are the gain times a product with the normed stream.
    return [
        _converted(
            tensor,
            vectors or dtype if len(tensor.shape) == 1 else dtype,
            gain if tensor.name == NORM else 1.0,
        )
        for tensor in tensors.values()
    ]


def _block_tensors(run: RunDir, index: int) -> Iterator[TensorOut]:
    path, prefix = run.weights_file(index)
    stored = file_tensors(path)
    for weight in block_weights(run.config, index):
        if (tensor := stored.get(prefix + weight.name)) is None:
            raise RunError(f"{path} lacks {weight.name}; restore the run from a copy")
        yield from _parts(weight, tensor)


def _parts(weight: WeightMap, stored: TensorRange) -> Iterator[TensorOut]:
    """Split a weight's rows into the checkpoint's tensors."""
    if stored.shape != weight.shape:
        raise RunError(
            f"{stored.path}: {weight.name} has shape {list(stored.shape)}, but the settings"
            f" describe {list(weight.shape)}; use the config.toml of the same run"
        )
    first = 0
    for part in weight.parts:
        rows = stored.rows(first, part.rows)
        yield TensorOut(part.name, stored.dtype, rows.shape, (rows,))
        first += part.rows


def _converted(tensor: TensorOut, dtype: str, factor: float) -> TensorOut:
    target = tensor.dtype if dtype == STORED else TYPES[dtype]
    if target == tensor.dtype and factor == 1.0:
        return tensor
    return replace(tensor, dtype=target, converted=_recoding(tensor, target, factor))


def _recoding(tensor: TensorOut, target: str, factor: float) -> Callable[[bytes], bytes]:
    def recode(piece: bytes) -> bytes:
        stored = np.frombuffer(piece, DTYPES[tensor.dtype])
        numbers = from_bf16(stored) if tensor.dtype == "BF16" else stored.astype(np.float32)
        return encoded(numbers * np.float32(factor), target, tensor.name).tobytes()

    return recode


def encoded(numbers: Array, target: str, name: str) -> Array:
    """Convert numbers to a safetensors type; bfloat16 is returned as bits."""
    if target == "BF16":
        return to_bf16(numbers)
    if target == "F16" and np.abs(numbers).max(initial=0.0) > LARGEST_F16:
        raise RunError(f"{name} has numbers that are too large for f16; export as bf16")
    return numbers.astype("<f2" if target == "F16" else "<f4")


class TokenizerFiles:
    def __init__(self, files: Mapping[str, bytes], config: Config) -> None:
        self._files = files
        self.config = config
        self.described: dict[str, Any] = json.loads(files[TOKENIZER_FILE])
        start = config.vocabulary.bos
        if start not in self.names:  # an id of the padding marks the start of a text
            added = {**SPECIAL, "id": start, "content": UNNAMED_START}
            self.described["added_tokens"] = [*self.added, added]

    @property
    def names(self) -> dict[int, str]:
        """Every token's name by its id, special tokens included."""
        vocabulary = self.described["model"]["vocab"]
        if isinstance(vocabulary, list):  # of a Unigram model: names with scores
            names = {token: name for token, (name, _) in enumerate(vocabulary)}
        else:
            names = {token: name for name, token in vocabulary.items()}
        return names | {token["id"]: token["content"] for token in self.added}

    @property
    def added(self) -> list[dict[str, Any]]:
        """Tokens added to the model's vocabulary; most of them are special."""
        return list(self.described.get("added_tokens") or [])

    @property
    def chat_template(self) -> str | None:
        if CHAT_TEMPLATE in self._files:
            return self._files[CHAT_TEMPLATE].decode()
        template = json.loads(self._files.get(TOKENIZER_CONFIG, b"{}")).get("chat_template")
        return template if isinstance(template, str) else None

    def hugging_face(self) -> dict[str, bytes]:
        """The files of a Hugging Face folder that describe the tokenizer: the run's own, and
        missing ones generated from its settings."""
        vocabulary = self.config.vocabulary
        eos, names = list(vocabulary.eos), self.names
        special = {"bos_token": names[vocabulary.bos]}
        if eos:
            special["eos_token"] = names[eos[0]]
        generated: dict[str, dict[str, Any]] = {
            SPECIAL_TOKENS: special,
            TOKENIZER_CONFIG: {
                "tokenizer_class": "PreTrainedTokenizerFast",
                **special,
                "clean_up_tokenization_spaces": False,
                "model_max_length": self.config.model.window,
            },
            GENERATION_CONFIG: {
                "bos_token_id": vocabulary.bos,
                "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
            },
        }
        if TOKENIZER_CONFIG in self._files:  # which names the special tokens
            del generated[SPECIAL_TOKENS]
        files = {name: json_text(values) for name, values in generated.items()} | dict(self._files)
        tokenizer = SubwordTokenizer(dict(self._files), vocabulary.size)
        if vocabulary.starts_with_bos and not tokenizer.adds_bos:
            files[TOKENIZER_FILE] = json_text(self._beginning_with(names[vocabulary.bos]))
        return files

    def _beginning_with(self, name: str) -> dict[str, Any]:
        """A tokenizer.json that begins every text with a token, as in training."""
        ids = {"id": name, "ids": [self.config.vocabulary.bos], "tokens": [name]}
        start: dict[str, Any] = {"SpecialToken": {"id": name, "type_id": 0}}
        first, second = ({"Sequence": {"id": id, "type_id": n}} for n, id in enumerate("AB"))
        template = {
            "type": "TemplateProcessing",
            "single": [start, first],
            "pair": [start, first, second],
            "special_tokens": {name: ids},
        }
        present = self.described.get("post_processor")
        steps = {"type": "Sequence", "processors": [present, template]} if present else template
        return {**self.described, "post_processor": steps}


def json_text(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


class HuggingFaceExport:
    def __init__(
        self, run: RunDir, shard_bytes: int, dtype: str = STORED, flops: float | None = None
    ) -> None:
        """`flops`: those of the whole training, for the card; None for an import."""
        self.run, self._flops = run, flops
        tensors = exported_tensors(run, dtype)
        self.size = sum(tensor.size for tensor in tensors)
        self.parameters = sum(math.prod(tensor.shape) for tensor in tensors)
        self._shards = split_into_shards(tensors, shard_bytes)
        self._types = {tensor.name: tensor.dtype for tensor in tensors}

    def write(self, out: Path, on_copied: OnCopied = lambda count: None) -> Path:
        """Write the folder, which appears only when complete."""
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise RunError(f"{out} is not an empty folder; use another --out")
        check_space(out, self.size)
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=out.parent, prefix=f".{out.name}-", ignore_cleanup_errors=True
        ) as scratch:
            folder = Path(scratch) / out.name
            folder.mkdir()
            for name, tensors in self._shards.items():
                write_tensors(folder / name, tensors, on_copied, METADATA)
            for name, data in self._side_files(out.name).items():
                write_bytes(folder / name, data)
            folder.replace(out)
        return out

    def _side_files(self, name: str) -> dict[str, bytes]:
        run, dtype = self.run, DTYPE_NAMES[self._types[EMBEDDING]]
        original = run.origin["config"] if run.origin else None
        files = {
            "config.json": json_text(to_hugging_face(run.config, dtype, original)),
            CARD: model_card(run, name, self.parameters, self._flops).encode(),
            **TokenizerFiles(run.tokenizer_files(), run.config).hugging_face(),
        }
        if len(self._shards) > 1:
            files[INDEX] = json_text(self._index())
        return files

    def _index(self) -> dict[str, Any]:
        places = {t.name: file for file, tensors in self._shards.items() for t in tensors}
        return {"metadata": {"total_size": self.size}, "weight_map": places}


def model_card(run: RunDir, name: str, parameters: int, flops: float | None) -> str:
    """The README.md of an exported run. `name`: the name of its folder."""
    base = f"base_model: {run.origin['source']}\n" if run.origin and run.origin["revision"] else ""
    described = "\n".join([*_model(run, parameters), *_training(run, flops)])
    return CARD_TEXT.format(base=base, described=described, name=repr(name))


def _model(run: RunDir, parameters: int) -> Iterator[str]:
    config, model = run.config, run.config.model
    kind = run.origin["config"]["model_type"] if run.origin else architecture_name(model)
    yield f"# A language model exported by blocktrain {__version__}"
    yield ""
    yield (
        f"`{ARCHITECTURES[kind]}` with {parameters:,} parameters: {model.layers} layers of width"
        f" {model.width}, {model.heads} attention heads of width {model.head_width}"
        f" ({model.key_heads} of keys and values), {config.vocabulary.size:,} tokens, context"
        f" {model.window:,} tokens."
    )
    yield ""


def _training(run: RunDir, flops: float | None) -> Iterator[str]:
    if run.origin:
        revision = f" (revision {run.origin['revision']})" if run.origin["revision"] else ""
        yield f"Imported from {run.origin['source']}{revision}; its weights are unchanged."
        yield ""
        return
    yield _kind(run.config)
    yield ""
    train = run.config.train
    rows = [
        ("text", f"`{run.config.data.source}`"),
        ("steps per block", f"{train.steps:,} planned"),
        ("batch", f"{train.batch} windows of {run.config.model.window} tokens"),
        ("optimizer, peak learning rate", f"{train.optimizer}, {train.lr:g}"),
        ("seed", f"{train.seed}"),
    ]
    if flops is not None:
        rows.append(("arithmetic of all blocks, estimated", f"{flops:.2e} FLOP"))
    yield "| setting | value |"
    yield "|---|---|"
    yield from (f"| {name} | {value} |" for name, value in rows)
    yield ""
    yield from _scores(run)


def _kind(config: Config) -> str:
    if config.kind.whole_model:
        return "Trained end to end."
    if config.kind.reads_successors:
        return (
            f"Trained in turns: {config.block_count} blocks, each inside the complete model while"
            " the others were frozen."
        )
    return (
        f"Trained as a cascade of {config.block_count} blocks, each on a loss of its own. This is"
        " the readout `final`: the layers of all blocks and the last block's head, without the"
        " private layers of the others."
    )


def _scores(run: RunDir) -> Iterator[str]:
    """A table of each block's training, if it took place here."""
    if run.exported:
        return
    yield "| block | layers | step | text seen | nats per byte on valid | bits per byte |"
    yield "|---|---|---|---|---|---|"
    versions = [run.block(index).current() for index in range(run.config.block_count)]
    for index, (version, depth) in enumerate(zip(versions, run.config.depths, strict=True)):
        yield (
            f"| {index} | {depth} | {version.step:,} | {version.bytes_seen / 1e6:,.1f} MB |"
            f" {_score(version)} |"
        )
    yield ""
    if versions[-1].valid_ce is None:
        yield "It was not scored during training (`train.eval_every` was 0)."
    else:
        yield "The score of the exported model is that of the last block."
    yield ""


def _score(version: SavedVersion) -> str:
    ce = version.valid_ce
    return "not scored |" if ce is None else f"{ce:.4f} | {ce / math.log(2):.4f}"
