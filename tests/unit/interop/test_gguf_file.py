"""GGUF files as the gguf package reads them; test_llama_cpp.py has llama.cpp itself read them."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.support.checkpoints import random_model, saved
from tests.support.small_tokenizer import small_tokenizer

from blocktrain.config import Config
from blocktrain.errors import BlocktrainError, ConfigError, RunError
from blocktrain.interop.checkpoint import open_checkpoint
from blocktrain.interop.gguf_file import (
    LLAMA3_WORDS,
    QWEN2_WORDS,
    GgufExport,
    interleaved,
    word_splitter,
)
from blocktrain.interop.importing import Import
from blocktrain.storage.run_dir import RunDir

from .conftest import token_config, trained_run

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def imported(name: str, folder: Path, **changes: Any) -> RunDir:
    checkpoint = saved(random_model(name, **changes), folder / "checkpoint")
    return Import(open_checkpoint(str(checkpoint)), blocks=2).write(folder / "run")


def written(run: RunDir, out: Path, dtype: str = "stored") -> gguf.GGUFReader:
    return gguf.GGUFReader(GgufExport(run, dtype).write(out))


def value(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    assert field is not None, key
    return field.contents()


def tensors(reader: gguf.GGUFReader) -> dict[str, np.ndarray]:
    return {tensor.name: tensor.data for tensor in reader.tensors}


def test_the_model_is_described_as_llama_cpp_wants_it(tmp_path: Path):
    reader = written(imported("qwen3", tmp_path), tmp_path / "model.gguf")
    described = {
        "general.architecture": "qwen3",
        "general.name": "model",
        "general.file_type": gguf.LlamaFileType.ALL_F32,
        "qwen3.context_length": 256,
        "qwen3.block_count": 3,
        "qwen3.embedding_length": 64,
        "qwen3.feed_forward_length": 96,
        "qwen3.attention.head_count": 4,
        "qwen3.attention.head_count_kv": 2,
        "qwen3.attention.key_length": 32,
        "qwen3.attention.value_length": 32,
        "qwen3.rope.freq_base": 1e6,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }
    assert {key: value(reader, key) for key in described} == described
    assert value(reader, "qwen3.attention.layer_norm_rms_epsilon") == pytest.approx(1e-6)


def test_the_tokens_have_their_names_and_kinds(tmp_path: Path):
    reader = written(imported("qwen3", tmp_path), tmp_path / "model.gguf")
    tokens, kinds = (
        value(reader, "tokenizer.ggml.tokens"),
        value(reader, "tokenizer.ggml.token_type"),
    )
    count = small_tokenizer().count
    assert len(tokens) == len(kinds) == 384
    assert tokens[:2] == ["<|endoftext|>", "<|im_end|>"]
    assert tokens[count] == f"[PAD{count}]"
    assert set(kinds[:2]) == {gguf.TokenType.CONTROL}
    assert set(kinds[2:count]) == {gguf.TokenType.NORMAL}
    assert set(kinds[count:]) == {gguf.TokenType.UNUSED}
    described = json.loads(small_tokenizer().files["tokenizer.json"])
    merges = [" ".join(merge) for merge in described["model"]["merges"]]
    assert value(reader, "tokenizer.ggml.merges") == merges


def test_a_chat_template_comes_along(tmp_path: Path):
    folder = saved(random_model("qwen3"), tmp_path / "checkpoint")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    run = Import(open_checkpoint(str(folder)), 1).write(tmp_path / "run")
    reader = written(run, tmp_path / "model.gguf")
    assert value(reader, "tokenizer.chat_template") == "{{ messages }}"


def test_only_a_llamas_rows_are_interleaved(tmp_path: Path):
    for name, permuted in (("qwen2", False), ("llama-biases", True), ("mistral", True)):
        model = random_model(name)
        run = imported(name, tmp_path / name)
        found = tensors(written(run, tmp_path / f"{name}.gguf"))
        theirs = {key: tensor.detach().numpy() for key, tensor in model.named_parameters()}
        for part, heads in (("q", 4), ("k", 2), ("v", 0)):
            for kind in ("weight", "bias"):
                original = theirs.get(f"model.layers.1.self_attn.{part}_proj.{kind}")
                if original is not None:
                    expected = interleaved(original, heads) if permuted and heads else original
                    assert np.array_equal(found[f"blk.1.attn_{part}.{kind}"], expected)
        assert np.array_equal(found["output_norm.weight"], theirs["model.norm.weight"])
        assert value(gguf.GGUFReader(tmp_path / f"{name}.gguf"), "general.architecture") == (
            "llama" if permuted else name
        )


def test_rows_of_a_head_are_interleaved():
    rows = np.arange(8).reshape(8, 1)  # two heads of four rows
    assert interleaved(rows, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_scaled_rotary_frequencies_become_factors(tmp_path: Path):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    model = random_model("llama")
    factors = tensors(written(imported("llama", tmp_path), tmp_path / "a.gguf"))[
        "rope_freqs.weight"
    ]
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, "cpu")
    plain = 500_000.0 ** -(torch.arange(0, 16, 2) / 16)
    assert factors == pytest.approx((plain / scaled).numpy(), rel=1e-5)
    linear = written(imported("llama-biases", tmp_path / "b"), tmp_path / "b.gguf")
    assert value(linear, "llama.rope.scaling.type") == "linear"
    assert value(linear, "llama.rope.scaling.factor") == 2.0


def test_a_tied_embedding_is_there_once(tmp_path: Path):
    names = tensors(written(imported("llama", tmp_path), tmp_path / "model.gguf")).keys()
    assert "token_embd.weight" in names
    assert "output.weight" not in names


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_matrices_become_narrow_and_norms_stay_wide(
    cascade_run: RunDir, tmp_path: Path, dtype: str
):
    reader = written(cascade_run, tmp_path / "model.gguf", dtype)
    kinds = {tensor.name: tensor.tensor_type for tensor in reader.tensors}
    narrow = gguf.GGMLQuantizationType[dtype.upper()]
    assert kinds["blk.0.attn_q.weight"] == kinds["output.weight"] == narrow
    assert kinds["blk.0.attn_norm.weight"] == gguf.GGMLQuantizationType.F32
    assert value(reader, "general.file_type") == gguf.LlamaFileType[f"MOSTLY_{dtype.upper()}"]
    weights = cascade_run.block_weights(1)
    wide = torch.from_numpy(weights["head.weight"])
    expected = wide.half() if dtype == "f16" else wide.bfloat16()
    found = tensors(reader)["output.weight"]
    data = torch.from_numpy(found.copy().view(np.uint8)).view(expected.dtype)
    assert torch.equal(data.reshape(expected.shape), expected)
    assert np.array_equal(tensors(reader)["output_norm.weight"], 8 * weights["norm.weight"])


def test_a_model_trained_here_begins_texts_as_it_was_trained(cascade_run: RunDir, tmp_path: Path):
    reader = written(cascade_run, tmp_path / "model.gguf")
    assert value(reader, "tokenizer.ggml.add_bos_token") is True
    assert value(reader, "qwen3.block_count") == 2  # without the tail of block 0


def split(words: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("pre_tokenizer", "name"),
    [
        (GPT2, "gpt-2"),
        ({"type": "Sequence", "pretokenizers": [split(QWEN2_WORDS), BYTES]}, "qwen2"),
        ({"type": "Sequence", "pretokenizers": [split(LLAMA3_WORDS), BYTES]}, "llama-bpe"),
        (
            {
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": True}, GPT2],
            },
            "smollm",
        ),
    ],
)
def test_ways_of_cutting_words_that_llama_cpp_knows(pre_tokenizer: dict[str, Any], name: str):
    assert word_splitter({"model": {"type": "BPE"}, "pre_tokenizer": pre_tokenizer}) == name


@pytest.mark.parametrize(
    ("kind", "pre_tokenizer", "reason"),
    [
        ("Unigram", GPT2, "not a BPE tokenizer"),
        ("BPE", None, "not a byte-level BPE"),
        ("BPE", {"type": "Metaspace"}, "not a byte-level BPE"),
        ("BPE", {**GPT2, "add_prefix_space": True}, "not a byte-level BPE"),
        ("BPE", BYTES, "does not know its way"),
        (
            "BPE",
            {"type": "Sequence", "pretokenizers": [split("."), BYTES]},
            "does not know its way",
        ),
    ],
)
def test_others_are_refused_with_the_reason(kind: str, pre_tokenizer: Any, reason: str):
    with pytest.raises(ConfigError, match=reason) as caught:
        word_splitter({"model": {"type": kind}, "pre_tokenizer": pre_tokenizer})
    assert "use --to hf" in str(caught.value)


def test_llama3s_scaling_is_for_llamas_alone(tmp_path: Path, config: Config):
    settings = {"model__rope_scaling": (8.0, 1.0, 4.0, 16.0), "train__steps": 1}
    run = trained_run(tmp_path / "run", token_config(config, **settings))
    with pytest.raises(ConfigError, match=r"does not support .* for qwen3"):
        GgufExport(run)


def test_a_file_is_never_replaced_and_a_failure_leaves_nothing(cascade_run: RunDir, tmp_path: Path):
    out = tmp_path / "model.gguf"
    out.write_text("mine")
    with pytest.raises(RunError, match="exists already"):
        GgufExport(cascade_run).write(out)
    assert out.read_text() == "mine"

    def fail(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        GgufExport(cascade_run).write(tmp_path / "new" / "model.gguf", fail)
    assert list((tmp_path / "new").iterdir()) == []


def test_without_the_extra_it_is_named(cascade_run: RunDir, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(BlocktrainError, match=r"pip install 'blocktrain\[gguf\]'"):
        GgufExport(cascade_run)
