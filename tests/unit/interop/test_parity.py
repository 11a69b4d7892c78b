"""The same numbers as transformers, in both directions, and nothing lost on the way."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from tests.support.checkpoints import FAMILIES, TOKENS, random_model, saved
from tests.support.training import CPU

from blocktrain.interop.checkpoint import open_checkpoint
from blocktrain.interop.hugging_face import HuggingFaceExport
from blocktrain.interop.importing import Import
from blocktrain.serve.router.first_block import generate
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.stored_models import load_stack

TOLERANCE = 1e-4
POSITIONS = 128


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str) -> transformers.PreTrainedModel:
    return random_model(family)


@pytest.fixture(scope="module")
def folder(
    family: str, model: transformers.PreTrainedModel, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return saved(model, tmp_path_factory.mktemp(family) / "checkpoint")


@pytest.fixture(scope="module")
def run(folder: Path) -> RunDir:
    return Import(open_checkpoint(str(folder)), blocks=2).write(folder.parent / "run")


@pytest.fixture(scope="module")
def exported(run: RunDir) -> Path:
    return HuggingFaceExport(run, shard_bytes=100_000).write(run.path.parent / "exported")


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, TOKENS, (2, POSITIONS), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def log_probs(model: transformers.PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(model(ids).logits, dim=-1)


def test_an_imported_model_computes_the_same(
    run: RunDir, model: transformers.PreTrainedModel, ids: torch.Tensor
):
    (ours,) = load_stack(run, CPU).log_probs(ids)
    assert (ours - log_probs(model, ids)).abs().max() <= TOLERANCE


def test_an_exported_model_computes_the_same(run: RunDir, exported: Path, ids: torch.Tensor):
    (ours,) = load_stack(run, CPU).log_probs(ids)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported)
    assert (ours - log_probs(theirs, ids)).abs().max() <= TOLERANCE


def test_both_write_the_same_tokens(
    run: RunDir, model: transformers.PreTrainedModel, ids: torch.Tensor
):
    stack = load_stack(run, CPU)
    endless = replace(stack, config=run.config.with_settings(vocab__eos=()))
    prompt = ids[0, :16].tolist()
    ours = list(generate(endless, prompt, POSITIONS, readout="final"))
    theirs = model.generate(
        torch.tensor([prompt]),
        generation_config=transformers.GenerationConfig(max_new_tokens=POSITIONS, do_sample=False),
    )
    assert ours == theirs[0, len(prompt) :].tolist()


def test_import_and_export_keep_every_bit(folder: Path, exported: Path):
    assert len(list(exported.glob("model-*.safetensors"))) > 1
    assert tensors(exported) == tensors(folder)


def test_the_config_loads_as_before(folder: Path, exported: Path):
    before, after = (
        transformers.AutoConfig.from_pretrained(path).to_dict() for path in (folder, exported)
    )
    for path in (before, after):
        path.pop("_name_or_path")
    assert after == before
    spelled = json.loads((exported / "config.json").read_text())
    assert spelled["rope_theta"] == spelled["rope_parameters"]["rope_theta"]
    assert spelled["torch_dtype"] == spelled["dtype"] == "float32"


def test_the_tokenizer_comes_along(folder: Path, exported: Path):
    before, after = map(transformers.AutoTokenizer.from_pretrained, (folder, exported))
    text = "Unless required by law, 1234 \u00e9t\u00e9\n\n  or agreed to in writing"
    assert after(text).input_ids == before(text).input_ids
    assert after.decode(after(text).input_ids) == text


def tensors(folder: Path) -> dict[str, tuple[str, str]]:
    """Every tensor by name: its type and the hash of its bytes."""
    result = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
                result[name] = str(tensor.dtype), hashlib.sha256(data).hexdigest()
    return result
