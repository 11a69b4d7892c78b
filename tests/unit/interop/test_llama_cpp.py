"""llama.cpp itself reads exported models: `make llama-cpp` builds it and runs this file."""

from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoints import FAMILIES, random_model, saved
from tests.support.small_tokenizer import small_tokenizer
from tests.support.training import CPU

from blocktrain.config import Config
from blocktrain.interop.checkpoint import open_checkpoint
from blocktrain.interop.gguf_file import GgufExport
from blocktrain.interop.importing import Import
from blocktrain.serve.router.first_block import generate
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.stored_models import load_stack

from .conftest import token_config, trained_run

pytestmark = pytest.mark.llama_cpp

TEXT = "Unless required by law, 1234 isn't \u00e9t\u00e9\n\n  agreed"
TOKENS = 64


@pytest.fixture(scope="module")
def llama_cpp() -> Any:
    return pytest.importorskip(
        "llama_cpp", reason="needs llama-cpp-python, which `make llama-cpp` builds in 5 minutes"
    )


def greedy_in_llama_cpp(
    llama_cpp: Any, path: Path, start: list[int]
) -> tuple[list[int], list[int]]:
    """The tokens of the text, and those that follow them and `start`."""
    f32 = llama_cpp.GGML_TYPE_F32  # of the cache, which is f16 by default
    model = llama_cpp.Llama(
        str(path), n_ctx=256, n_threads=1, n_gpu_layers=0, type_k=f32, type_v=f32, verbose=False
    )
    ids = model.tokenize(TEXT.encode(), add_bos=False)
    made = model.generate([*start, *ids], temp=0.0, top_k=1, repeat_penalty=1.0)
    tokens = [token for token, _ in zip(made, range(TOKENS), strict=False)]
    model.close()
    return ids, tokens


def assert_the_same(llama_cpp: Any, run: RunDir, folder: Path, start: list[int]) -> list[int]:
    path = GgufExport(run, "f32").write(folder / "model.gguf")
    prompt = small_tokenizer().encode(TEXT)
    ids, theirs = greedy_in_llama_cpp(llama_cpp, path, start)
    ours = list(generate(load_stack(run, CPU), prompt, TOKENS, readout="final"))
    assert ids == prompt
    assert theirs[: len(ours)] == ours
    return ours


def test_a_cascade_trained_here_writes_the_same_64_tokens(
    llama_cpp: Any, tmp_path: Path, config: Config
):
    settings = {
        "model__window": 128,
        "train__steps": 150,
        "train__batch": 8,
        "train__eval_every": 0,
    }
    run = trained_run(tmp_path / "run", token_config(config, **settings))
    ours = assert_the_same(llama_cpp, run, tmp_path, [run.config.vocabulary.bos])
    assert len(ours) == TOKENS
    assert len(set(ours)) > 8


@pytest.mark.parametrize("name", list(FAMILIES))
def test_an_imported_model_writes_the_same_tokens(llama_cpp: Any, tmp_path: Path, name: str):
    model = random_model(name, bos_token_id=None, eos_token_id=None)
    checkpoint = saved(model, tmp_path / "checkpoint")
    run = Import(open_checkpoint(str(checkpoint)), 2).write(tmp_path / "run")
    assert_the_same(llama_cpp, run, tmp_path, [])
