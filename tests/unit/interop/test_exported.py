"""Models trained here, in other programs: the same score, and a reason where that cannot be."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.support.small_tokenizer import small_tokenizer
from tests.support.training import CPU

from blocktrain.config import Config
from blocktrain.data.corpus import evaluation_windows
from blocktrain.data.tokenizer import SubwordTokenizer
from blocktrain.errors import BlocktrainError, ConfigError, RunError
from blocktrain.interop.hugging_face import (
    HuggingFaceExport,
    TokenizerFiles,
    model_card,
    refuse_unexportable,
)
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.evaluate import evaluate
from blocktrain.training.stored_models import load_stack

from .conftest import token_config, token_corpus, trained_run

ONE_FILE = 1 << 30


def score_in_transformers(folder: Path, windows: np.ndarray) -> float:
    """The cross entropy of windows that each begin with the tokenizer's first token."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    targets = torch.tensor(windows.astype(np.int64))
    start = torch.full((len(targets), 1), model.config.bos_token_id)
    with torch.no_grad():
        logits = model(torch.cat([start, targets[:, :-1]], dim=1)).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))


def final_score(run: RunDir, windows: np.ndarray) -> float:
    scores = evaluate(load_stack(run, CPU), windows).scores
    return next(score.ce for score in scores if score.readout == "final")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"objective__kind": "end_to_end", "model__logit_gain": 3.0},
        {"objective__kind": "end_to_end", "model__tied_embeddings": True, "model__logit_gain": 2.0},
        {"model__qk_norm": False, "model__rope_scaling": (8.0, 1.0, 4.0, 16.0)},
        {"model__qk_norm": False, "model__biases": "qkv", "model__head_dim": 16},
    ],
    ids=["cascade", "end to end", "tied", "llama", "qwen2"],
)
def test_a_trained_model_scores_the_same_in_transformers(
    tmp_path: Path, config: Config, settings: dict[str, object]
):
    run = trained_run(tmp_path / "run", token_config(config, **settings))
    out = HuggingFaceExport(run, ONE_FILE).write(tmp_path / "out")
    windows = evaluation_windows(token_corpus().split("valid"), run.config.model.window, 16)
    ours = final_score(run, windows)
    assert score_in_transformers(out, windows) == pytest.approx(ours, abs=1e-3)
    assert ours < np.log(run.config.vocabulary.size) - 0.1  # it has learned something


def test_its_tokenizer_begins_a_text_as_training_did(cascade_run: RunDir, tmp_path: Path):
    out = HuggingFaceExport(cascade_run, ONE_FILE).write(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    text = "in writing, 1234 \u00e9"
    assert tokenizer(text).input_ids == [0, *small_tokenizer().encode(text)]
    assert tokenizer.eos_token == "<|endoftext|>"
    generation = transformers.GenerationConfig.from_pretrained(out)
    assert (generation.bos_token_id, generation.eos_token_id) == (0, 0)


@pytest.mark.parametrize("steps", ["ByteLevel", "none"])
def test_a_text_begins_with_a_mark_even_if_the_tokenizer_names_none(
    config: Config, tmp_path: Path, steps: str
):
    described = json.loads(small_tokenizer().files["tokenizer.json"])
    described["added_tokens"] = []
    described["model"]["vocab"] = {
        name.replace("<|endoftext|>", "<nothing>"): token
        for name, token in described["model"]["vocab"].items()
    }
    if steps == "ByteLevel":
        described["post_processor"] = {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": False,
            "use_regex": True,
        }
    tokenizer = SubwordTokenizer({"tokenizer.json": json.dumps(described).encode()})
    start = tokenizer.vocabulary.bos
    assert start == tokenizer.count  # an id of the padding
    files = TokenizerFiles(tokenizer.files, replace(config, vocab=tokenizer.vocabulary))
    for name, data in files.hugging_face().items():
        (tmp_path / name).write_bytes(data)
    loaded = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert loaded("in writing").input_ids == [start, *tokenizer.encode("in writing")]


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_another_type_rounds_to_the_nearest(cascade_run: RunDir, tmp_path: Path, dtype: str):
    wide, narrow = (
        load_file(
            HuggingFaceExport(cascade_run, ONE_FILE, each).write(tmp_path / each)
            / "model.safetensors"
        )
        for each in ("stored", dtype)
    )
    target = {"bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    assert wide.keys() == narrow.keys()
    for name, tensor in wide.items():
        assert torch.equal(narrow[name], tensor.to(target)), name
    spelled = json.loads((tmp_path / dtype / "config.json").read_text())
    assert spelled["torch_dtype"] == {"bf16": "bfloat16", "f16": "float16"}[dtype]


def test_numbers_too_large_for_f16_are_refused(cascade_run: RunDir, tmp_path: Path):
    block = cascade_run.block(1)
    snapshot = block.load_snapshot()
    assert snapshot is not None
    snapshot.weights["head.weight"][0, 0] = 1e5
    block.save(snapshot)
    with pytest.raises(RunError, match=r"lm_head\.weight has numbers that are too large for f16"):
        HuggingFaceExport(cascade_run, ONE_FILE, "f16").write(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))  # nothing is left behind


def test_shards_are_listed_in_an_index(cascade_run: RunDir, tmp_path: Path):
    out = HuggingFaceExport(cascade_run, 20_000).write(tmp_path / "out")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files
    tensors = {name: t for file in files for name, t in load_file(out / file).items()}
    assert tensors.keys() == index["weight_map"].keys()
    assert sum(t.nbytes for t in tensors.values()) == index["metadata"]["total_size"]


def test_the_card_has_the_numbers_of_the_run(cascade_run: RunDir):
    card = model_card(cascade_run, "mine", parameters=12345, flops=2.5e9)
    versions = [cascade_run.block(index).current() for index in range(2)]
    assert "`Qwen3ForCausalLM` with 12,345 parameters: 2 layers of width 32" in card
    assert "cascade of 2 blocks" in card
    assert "2.50e+09 FLOP" in card
    for index, version in enumerate(versions):
        assert f"| {index} | 1 | 12 |" in card
        assert f"| {version.valid_ce:.4f} | {version.valid_ce / np.log(2):.4f} |" in card
    assert "`stdlib`" in card
    assert "from_pretrained('mine')" in card
    assert "reranker" not in card


def test_a_card_says_if_there_is_no_score(tmp_path: Path, config: Config):
    run = trained_run(tmp_path / "run", token_config(config, train__eval_every=0))
    assert "not scored" in model_card(run, "mine", 1, None)
    assert "FLOP" not in model_card(run, "mine", 1, None)


def test_a_folder_with_something_in_it_is_left_alone(cascade_run: RunDir, tmp_path: Path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="not an empty folder"):
        HuggingFaceExport(cascade_run, ONE_FILE).write(out)
    assert [path.name for path in out.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"objective__kind": "denoise"}, "objective.kind = denoise"),
        (
            {"model__layer": "local", "model__taps": 3, "model__kv_heads": 0},
            "model.layer = local has a filter",
        ),
        ({"vocab__sha256": ""}, "a model of bytes reads 258 ids and predicts 256"),
        ({"model__biases": "qkv"}, "both model.qk_norm and model.biases"),
    ],
)
def test_what_no_other_program_computes_is_refused(
    config: Config, settings: dict[str, object], reason: str
):
    with pytest.raises(ConfigError, match=reason):
        refuse_unexportable(token_config(config, **settings))


def test_a_product_is_refused_where_there_are_several_predictions(config: Config):
    cascade = token_config(config)
    with pytest.raises(ConfigError, match="export the readout final"):
        refuse_unexportable(cascade, "product")
    refuse_unexportable(cascade, "final")
    refuse_unexportable(cascade.end_to_end(), "product")


def test_a_run_without_weights_says_so(tmp_path: Path, config: Config):
    run = RunDir.create(tmp_path / "run", token_config(config))
    with pytest.raises(BlocktrainError, match="train it first"):
        HuggingFaceExport(run, ONE_FILE)


def test_an_altered_block_is_not_exported(cascade_run: RunDir):
    path, _ = cascade_run.weights_file(0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(RunError, match="altered"):
        HuggingFaceExport(cascade_run, ONE_FILE)
