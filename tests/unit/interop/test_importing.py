"""What becomes of a checkpoint: types and bits are kept, memory is bounded, a killed import
continues, and what would give wrong numbers is refused by name."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.checkpoints import TOKENS, random_model, saved
from tests.support.small_tokenizer import small_tokenizer
from tests.support.training import CPU

from blocktrain.errors import BlocktrainError, ConfigError, RunError
from blocktrain.interop import checkpoint
from blocktrain.interop.checkpoint import open_checkpoint
from blocktrain.interop.importing import Import
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.stored_models import load_stack

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(random_model("qwen3"), tmp_path_factory.mktemp("model") / "checkpoint")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    copy = tmp_path / "checkpoint"
    copy.mkdir()
    for path in original.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def imported(folder: Path, blocks: int = 2, window: int | None = None) -> Import:
    return Import(open_checkpoint(str(folder)), blocks, window)


def edit(path: Path, change: Change) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def edit_tensors(folder: Path, change: Change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def refusal(folder: Path, kind: type[BlocktrainError] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        imported(folder)
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_keep_their_type(tmp_path: Path, dtype: torch.dtype):
    model = random_model("qwen2").to(dtype)
    run = imported(saved(model, tmp_path / "checkpoint")).write(tmp_path / "run")
    weights = dict(model.named_parameters())
    up = torch.cat([weights[f"model.layers.2.mlp.{half}_proj.weight"] for half in ("gate", "up")])
    block = load_file(run.path / "block-1.safetensors")
    assert block["layers.0.mlp.up.weight"].dtype == dtype
    assert torch.equal(block["layers.0.mlp.up.weight"], up)


@pytest.mark.parametrize("blocks", [1, 3])
def test_the_layers_are_cut_into_blocks(folder: Path, tmp_path: Path, blocks: int):
    run = imported(folder, blocks).write(tmp_path / "run")
    assert run.config.depths == ((3,) if blocks == 1 else (1, 1, 1))
    ids = torch.arange(20)[None]
    (ours,) = load_stack(run, CPU).log_probs(ids)
    two_blocks = imported(folder, 2).write(tmp_path / "other")
    assert torch.equal(ours, load_stack(two_blocks, CPU).log_probs(ids)[0])


def test_a_tied_embedding_is_the_head_of_another_block_too(tmp_path: Path):
    model = random_model("llama")
    run = imported(saved(model, tmp_path / "checkpoint"), 3).write(tmp_path / "run")
    assert run.config.model.tied_embeddings
    assert torch.equal(
        load_file(run.path / "block-2.safetensors")["head.weight"],
        load_file(run.path / "block-0.safetensors")["embed.weight"],
    )


def test_the_run_has_the_ids_of_the_configs(folder: Path):
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 0], "bos_token_id": 0}')
    vocabulary = imported(folder).config.vocabulary
    assert (vocabulary.size, vocabulary.eos, vocabulary.bos) == (TOKENS, (1, 0), 0)
    assert not vocabulary.starts_with_bos


def test_a_tokenizer_that_begins_with_a_token_is_known(folder: Path):
    described = json.loads((folder / "tokenizer.json").read_text())
    start = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(described))
    assert imported(folder).config.vocabulary.starts_with_bos


def test_the_files_beside_the_weights_become_part_of_the_run(folder: Path, tmp_path: Path):
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    run = imported(folder).write(tmp_path / "run")
    assert run.tokenizer_files()["chat_template.jinja"] == b"{{ messages }}"
    assert "generation_config.json" in run.tokenizer_files()
    assert run.origin == {
        "source": str(folder),
        "revision": "",
        "config": json.loads((folder / "config.json").read_text()),
    }


def test_no_more_positions_than_wanted(folder: Path):
    assert imported(folder).config.model.window == 256
    assert imported(folder, window=64).config.model.window == 64
    edit(folder / "config.json", lambda c: c.update(max_position_embeddings=100_000))
    assert imported(folder).config.model.window == 4096
    with pytest.raises(ConfigError, match="--window 100001 exceeds the 100000 positions"):
        imported(folder, window=100_001)


def test_a_sliding_window_that_never_slides_is_allowed(tmp_path: Path):
    model = random_model("mistral", sliding_window=32)
    folder = saved(model, tmp_path / "checkpoint")
    run = imported(folder).write(tmp_path / "run")
    assert run.config.model.window == 32
    ids = torch.arange(32)[None]
    (ours,) = load_stack(run, CPU).log_probs(ids)
    with torch.no_grad():
        theirs = torch.log_softmax(model(ids).logits, dim=-1)
    assert (ours - theirs).abs().max() < 1e-4
    with pytest.raises(ConfigError, match="sliding-window attention"):
        imported(folder, window=64)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "Qwen3ForSequenceClassification"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"layer_types": ["linear_attention"] * 3}, "linear_attention"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized weights"),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"num_hidden_layers": 1}, "--blocks 2"),
        ({"hidden_size": None}, "config.json lacks"),
    ],
)
def test_an_unsupported_setting_is_named(folder: Path, change: dict[str, Any], named: str):
    edit(folder / "config.json", lambda config: config.update(change))
    assert named in refusal(folder)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("lm_head.weight"), "lacks the tensor lm_head.weight; set tie_word"),
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "lacks the tensor model.layers.1"),
        (lambda t: t.update(extra=torch.zeros(2)), "does not describe: extra"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), "norm.weight has shape [3]"),
        (
            lambda t: t.update(
                {"model.layers.0.self_attn.k_proj.weight": torch.zeros(64, 64).half()}
            ),
            "have different types",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(folder: Path, change: Change, says: str):
    edit_tensors(folder, change)
    assert says in refusal(folder, RunError)


def test_a_copy_of_a_tied_embedding_is_left_out_and_another_head_refused(tmp_path: Path):
    folder = saved(random_model("llama"), tmp_path / "checkpoint")
    copy = lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})  # noqa: E731
    edit_tensors(folder, copy)
    assert imported(folder).size > 0
    edit_tensors(folder, lambda t: t["lm_head.weight"].add_(1))
    assert "does not describe: lm_head.weight" in refusal(folder, RunError)


def test_a_model_without_a_tokenizer_says_how_to_make_one(folder: Path):
    (folder / "tokenizer.json").unlink()
    assert "save_pretrained" in refusal(folder, BlocktrainError)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(folder: Path, name: str):
    (folder / name).unlink()
    assert name in refusal(folder, RunError)


def test_pickled_weights_are_not_read(folder: Path):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pickled" in refusal(folder, RunError)


def test_an_index_cannot_name_files_elsewhere(folder: Path):
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "outside its folder" in refusal(folder, RunError)


def test_no_tensor_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checkpoint, "COPY_BYTES", 1 << 16)
    model = random_model("qwen3", layers=2, hidden_size=512, intermediate_size=1024)
    planned = imported(saved(model, tmp_path / "checkpoint"), 1)
    assert planned.size > 10_000_000
    tracemalloc.start()
    planned.write(tmp_path / "run")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


class Killed(BaseException):
    pass


def killed_at(size: int) -> Callable[[int], None]:
    """Stops an import once it has copied so many bytes."""
    copied = 0

    def on_copied(count: int) -> None:
        nonlocal copied
        copied += count
        if copied >= size:
            raise Killed

    return on_copied


def test_a_killed_import_goes_on_with_the_next_block(folder: Path, tmp_path: Path):
    planned, out = imported(folder, 3), tmp_path / "run"
    with pytest.raises(Killed):
        planned.write(out, killed_at(planned.size * 2 // 3))
    first = (out / "block-0.safetensors").stat().st_mtime_ns
    with pytest.raises(RunError, match="no version yet"):
        RunDir.open(out).block_weights(0)
    copied: list[int] = []
    run = imported(folder, 3).write(out, copied.append)
    assert (out / "block-0.safetensors").stat().st_mtime_ns == first
    assert sum(copied) >= planned.size
    whole = imported(folder, 3).write(tmp_path / "whole")
    assert [*map(run.block_weights, range(3))][1].keys() == whole.block_weights(1).keys()
    for index in range(3):
        name = f"block-{index}.safetensors"
        assert (out / name).read_bytes() == (whole.path / name).read_bytes()
    assert {path.name for path in out.iterdir()} == {path.name for path in whole.path.iterdir()}


def test_another_import_into_the_same_folder_starts_anew(folder: Path, tmp_path: Path):
    planned, out = imported(folder, 3), tmp_path / "run"
    (folder / "chat_template.jinja").write_text("of the first")
    with pytest.raises(Killed):
        imported(folder, 3).write(out, killed_at(planned.size * 2 // 3))
    (folder / "chat_template.jinja").unlink()
    (out / "block-2.safetensors.0a.partial").write_bytes(b"half")
    run = imported(folder, 1).write(out)
    assert "chat_template.jinja" not in run.tokenizer_files()
    assert [path.name for path in out.glob("block-*")] == ["block-0.safetensors"]
    assert len(load_stack(run, CPU).log_probs(torch.zeros(1, 4, dtype=torch.long))) == 1


def test_a_folder_with_something_else_is_left_alone(folder: Path, tmp_path: Path):
    out = tmp_path / "mine"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="not empty"):
        imported(folder).write(out)
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    done = imported(folder).write(tmp_path / "run")
    with pytest.raises(RunError, match="contains a model already"):
        imported(folder).write(done.path)


def test_too_small_a_disk_is_noticed_before_anything_is_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    usage = checkpoint.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(RunError, match=r"needs 0\.\d GB, but only 0\.0 GB are free"):
        imported(folder).write(tmp_path / "new" / "run")
    assert not (tmp_path / "new").exists()


def test_an_altered_block_is_noticed(folder: Path, tmp_path: Path):
    run = imported(folder).write(tmp_path / "run")
    path = run.path / "block-1.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(RunError, match="altered"):
        load_stack(RunDir.open(run.path), CPU)


def test_the_tokens_are_those_of_the_checkpoint(folder: Path, tmp_path: Path):
    run = imported(folder).write(tmp_path / "run")
    assert run.tokenizer_files()["tokenizer.json"] == small_tokenizer().files["tokenizer.json"]
