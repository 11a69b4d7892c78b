"""Exports a run as a GGUF file, the format of llama.cpp and of programs built on it.

Sizes, tokenizer and tensor names follow llama.cpp's conventions. One tensor at a time is in memory.
"""

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from blocktrain.config import ModelConfig
from blocktrain.errors import BlocktrainError, ConfigError, RunError
from blocktrain.files import UNFINISHED, move
from blocktrain.interop.architecture import architecture_name
from blocktrain.interop.checkpoint import OnCopied, TensorOut, check_space
from blocktrain.interop.hugging_face import STORED, TokenizerFiles, exported_tensors
from blocktrain.storage.run_dir import RunDir
from blocktrain.storage.tensor_file import DTYPES, Array

if TYPE_CHECKING:
    from gguf import GGUFWriter

# How Qwen and Llama 3 split text into words before BPE, and llama.cpp's names for these splitters.
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_WORDS = QWEN2_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
WORDS = {QWEN2_WORDS: "qwen2", LLAMA3_WORDS: "llama-bpe"}
ROPE_FACTORS = "rope_freqs.weight"
SUFFIXES = (".weight", ".bias")


class GgufExport:
    def __init__(self, run: RunDir, dtype: str = STORED) -> None:
        try:
            import gguf
        except ImportError:
            raise BlocktrainError(
                "a GGUF file needs the extra: pip install 'blocktrain[gguf]'"
            ) from None
        self._gguf = gguf
        self._config, self._kind = run.config, architecture_name(run.config.model)
        self._tokenizer = TokenizerFiles(run.tokenizer_files(), run.config)
        self._words = word_splitter(self._tokenizer.described)
        if len(run.config.model.rope_scaling) > 1 and self._kind != "llama":
            raise ConfigError(
                f"llama.cpp does not support Llama 3's rotary scaling for {self._kind}; use --to hf"
            )
        # llama.cpp needs norms and biases in f32, whatever the type of matrices.
        self._tensors = exported_tensors(run, dtype, vectors="f32")
        self.size = sum(tensor.size for tensor in self._tensors)

    def write(self, out: Path, on_copied: OnCopied = lambda count: None) -> Path:
        """Write the file, which appears only when complete."""
        if out.exists():
            raise RunError(f"{out} exists already; use another --out")
        check_space(out.parent, self.size)
        out.parent.mkdir(parents=True, exist_ok=True)
        scratch = out.with_name(f"{out.name}.{secrets.token_hex(4)}{UNFINISHED}")
        writer = self._gguf.GGUFWriter(scratch, self._kind)
        try:
            self._describe_model(writer, out.stem)
            self._describe_tokenizer(writer)
            self._write_tensors(writer, on_copied)
            writer.close()
            with scratch.open("rb") as file:
                os.fsync(file.fileno())
            move(scratch, out, sync=True)
        finally:
            writer.close()
            scratch.unlink(missing_ok=True)
        return out

    def _describe_model(self, writer: "GGUFWriter", name: str) -> None:
        gguf, model = self._gguf, self._config.model
        matrices = {tensor.dtype for tensor in self._tensors if len(tensor.shape) > 1}
        types = {"F16": gguf.LlamaFileType.MOSTLY_F16, "BF16": gguf.LlamaFileType.MOSTLY_BF16}
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(name)
        writer.add_file_type(types.get(matrices.pop(), gguf.LlamaFileType.ALL_F32))
        writer.add_vocab_size(self._config.vocabulary.size)
        writer.add_context_length(model.window)
        writer.add_block_count(model.layers)
        writer.add_embedding_length(model.width)
        writer.add_feed_forward_length(model.hidden_width)
        writer.add_head_count(model.heads)
        writer.add_head_count_kv(model.key_heads)
        writer.add_key_length(model.head_width)
        writer.add_value_length(model.head_width)
        writer.add_rope_dimension_count(model.head_width)
        writer.add_layer_norm_rms_eps(model.norm_eps)
        writer.add_rope_freq_base(model.rope_theta)
        if len(model.rope_scaling) == 1:
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(model.rope_scaling[0])

    def _describe_tokenizer(self, writer: "GGUFWriter") -> None:
        kinds, vocabulary = self._gguf.TokenType, self._config.vocabulary
        names, files = self._tokenizer.names, self._tokenizer
        types = dict.fromkeys(names, kinds.NORMAL) | {
            token["id"]: kinds.CONTROL if token["special"] else kinds.USER_DEFINED
            for token in files.added
        }
        ids = range(vocabulary.size)
        merges = files.described["model"]["merges"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self._words)
        writer.add_token_list([names.get(token, f"[PAD{token}]") for token in ids])
        writer.add_token_types([types.get(token, kinds.UNUSED) for token in ids])
        writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
        writer.add_bos_token_id(vocabulary.bos)
        writer.add_add_bos_token(vocabulary.starts_with_bos)
        for token in vocabulary.eos[:1]:
            writer.add_eos_token_id(token)
        if template := files.chat_template:
            writer.add_chat_template(template)

    def _write_tensors(self, writer: "GGUFWriter", on_copied: OnCopied) -> None:
        gguf, model = self._gguf, self._config.model
        raw = {"BF16": gguf.GGMLQuantizationType.BF16}
        names = gguf.get_tensor_name_map(
            next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == self._kind),
            model.layers,
        )
        factors = llama3_factors(model)
        if factors is not None:
            writer.add_tensor_info(ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
        for tensor in self._tensors:
            name, dtype = names.get_name(tensor.name, SUFFIXES), DTYPES[tensor.dtype]
            assert name is not None, tensor.name
            writer.add_tensor_info(name, tensor.shape, dtype, tensor.size, raw.get(tensor.dtype))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        for tensor in self._tensors:
            writer.write_tensor_data(self._array(tensor))
            on_copied(tensor.size)

    def _array(self, tensor: TensorOut) -> Array:
        array = np.frombuffer(b"".join(tensor.pieces()), DTYPES[tensor.dtype])
        array = array.reshape(tensor.shape)
        if self._kind != "llama":
            return array
        model = self._config.model
        for part, heads in (("q_proj", model.heads), ("k_proj", model.key_heads)):
            if f".{part}." in tensor.name:
                return interleaved(array, heads)
        return array


def interleaved(rows: Array, heads: int) -> Array:
    """Reorder the rows of a Llama's query or key weight. The rotary embedding rotates pairs of
    rows: in llama.cpp two neighbouring rows of a head, in a checkpoint row n of the head's first
    half and row n of its second half."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def llama3_factors(model: ModelConfig) -> Array | None:
    """The divisor of each rotary frequency in Llama 3's scaling (see model/layer.py)."""
    if len(model.rope_scaling) < 2:
        return None
    factor, low, high, window = model.rope_scaling
    pairs = np.arange(0, model.head_width, 2) / model.head_width
    turns = window * model.rope_theta**-pairs / (2 * np.pi)
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / (share + (1.0 - share) / factor), np.float32)


def word_splitter(tokenizer: dict[str, Any]) -> str:
    """llama.cpp's name for a tokenizer's way of splitting text into words."""
    if tokenizer["model"]["type"] != "BPE":
        raise ConfigError(_refusal("it is not a BPE tokenizer"))
    splitter = tokenizer.get("pre_tokenizer") or {}
    steps = splitter.get("pretokenizers", [splitter])
    if steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        raise ConfigError(_refusal("it is not a byte-level BPE like GPT-2's"))
    match [*steps[:-1]]:
        case [] if steps[-1].get("use_regex", True):
            return "gpt-2"
        case [{"type": "Digits", "individual_digits": True}] if steps[-1].get("use_regex", True):
            return "smollm"
        case [{"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated"}] if (
            words in WORDS
        ):
            return WORDS[words]
    raise ConfigError(_refusal("llama.cpp does not know its way of splitting text into words"))


def _refusal(reason: str) -> str:
    return (
        f"cannot describe the run's tokenizer to llama.cpp: {reason}; use --to hf and llama.cpp's"
        " convert_hf_to_gguf.py"
    )
