"""import and export as a user runs them, with models of transformers and models trained here."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
import transformers
from tests.support.checkpoints import random_model, saved
from tests.support.commands import run_here
from tests.support.small_tokenizer import TEXT, small_tokenizer

from blocktrain.config import DataConfig
from blocktrain.data.corpus import evaluation_windows
from blocktrain.data.run_text import stored_text
from blocktrain.storage.run_dir import RunDir

HERE = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    saved(random_model("qwen2"), folder / "checkpoint")
    (folder / "text.txt").write_bytes(TEXT.read_bytes() * 8)
    done = run(folder, "import", "checkpoint", "--blocks", 2, "--out", "run", "--window", 64)
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 layers of width 64 in 2 blocks, window 64" in done.stdout
    return folder


def run(home: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    env = {**HERE, "BLOCKTRAIN_CACHE": str(home / "cache")}
    return run_here([*map(str, arguments)], home, env)


def test_info_says_where_the_model_is_from(home: Path):
    shown = run(home, "info", "run").stdout
    assert "imported from checkpoint" in shown
    assert "not trained" not in shown
    assert json.loads(run(home, "info", "run", "--json").stdout)["origin"]["source"] == "checkpoint"


def test_it_is_fine_tuned_in_turns_on_conversations_and_exported(home: Path):
    question = {"role": "user", "content": "What is the capital of France?"}
    talk = {"messages": [question, {"role": "assistant", "content": "The capital is Paris."}]}
    (home / "talks.jsonl").write_text("\n".join([json.dumps(talk)] * 600))
    settings = {
        "train.warm_start": "run", "data.source": "chat:talks.jsonl", "train.steps": 8,
        "objective.turn_steps": 4, "train.batch": 2, "train.lr": 3e-3, "train.warmup": 1,
        "model.tied_embeddings": "false",
    }  # fmt: skip
    options = [part for pair in settings.items() for part in ("--set", "{}={}".format(*pair))]
    done = run(home, "train", "--config", "run", "--out", "tuned", *options)
    assert done.returncode == 0, done.stderr

    def ce(name: str) -> float:
        scored = run(home, "eval", name, "--data", "chat:talks.jsonl", "--windows", 4, "--json")
        return float(json.loads(scored.stdout)["ce"])

    assert ce("tuned") < ce("run") - 0.1
    assert run(home, "export", "tuned", "--to", "hf", "--out", "tuned-hf").returncode == 0
    assert "in turns" in (home / "tuned-hf" / "README.md").read_text()
    model = transformers.AutoModelForCausalLM.from_pretrained(home / "tuned-hf")
    assert not model.config.tie_word_embeddings
    ours = {
        name: tensor for b in RunDir.open(home / "tuned").weights() for name, tensor in b.items()
    }
    assert torch.equal(model.lm_head.weight.float(), torch.from_numpy(ours["head.weight"]))


def test_without_a_warm_start_turns_are_warned_of(home: Path):
    warned = run(home, "train", "--config", "run", "--out", "other", "--set", "data.source=none")
    assert "set train.warm_start to the run of the model" in warned.stderr


def test_it_is_exported_for_transformers(home: Path):
    done = run(home, "export", "run", "--to", "hf", "--out", "hf", "--dtype", "bf16")
    assert done.returncode == 0, done.stderr
    card = (home / "hf" / "README.md").read_text()
    assert "Imported from checkpoint" in card
    model = transformers.AutoModelForCausalLM.from_pretrained(home / "hf")
    assert model.dtype == torch.bfloat16


def test_a_folder_that_is_no_model_and_no_name_is_refused(home: Path):
    refused = run(home, "import", "nowhere", "--blocks", 2, "--out", "refused")
    assert refused.returncode == 4
    assert refused.stderr == (
        "error: the folder nowhere does not exist; use a folder or OWNER/NAME\n"
    )
    assert not (home / "refused").exists()


def test_it_is_scored_on_a_text_that_is_named(home: Path):
    refused = run(home, "eval", "run")
    assert refused.returncode == 2
    assert "name one with --data" in refused.stderr
    done = run(home, "eval", "run", "--data", "text:text.txt", "--windows", 4, "--json")
    assert done.returncode == 0, done.stderr
    score = json.loads(done.stdout)
    assert [each["readout"] for each in score["scores"]] == ["final"]
    early = run(home, "eval", "run", "--data", "text:text.txt", "--blocks", 1)
    assert (early.returncode, "only the last block" in early.stderr) == (2, True)


def test_its_score_is_that_of_transformers(home: Path, monkeypatch: pytest.MonkeyPatch):
    done = run(home, "eval", "run", "--data", "text:text.txt", "--windows", 4, "--json",
               "--precision", "fp32")  # fmt: skip
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(home / "cache"))
    monkeypatch.chdir(home)
    corpus = stored_text(RunDir.open(home / "run"), DataConfig("text:text.txt")).corpus
    windows = evaluation_windows(corpus.split("valid"), 64, 4)
    targets = torch.tensor(windows.astype("int64"))
    context = torch.cat([torch.zeros_like(targets[:, :1]), targets[:, :-1]], dim=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(home / "checkpoint")
    with torch.no_grad():
        logits = model(context).logits.flatten(0, 1)
    theirs = float(torch.nn.functional.cross_entropy(logits, targets.flatten()))
    ours = json.loads(done.stdout)
    assert ours["ce_per_token"] == pytest.approx(theirs, abs=1e-3)
    text = small_tokenizer().decode(windows.ravel().tolist())
    assert ours["ce"] == pytest.approx(theirs * windows.size / len(text), abs=1e-3)


def test_it_writes_the_text_that_transformers_writes(home: Path):
    done = run(home, "generate", "run", "--prompt", "Unless required", "--tokens", 40,
               "--temperature", 0, "--precision", "fp32", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    model = transformers.AutoModelForCausalLM.from_pretrained(home / "checkpoint")
    tokenizer = small_tokenizer()
    ids = tokenizer.encode("Unless required")
    made = model.generate(
        torch.tensor([ids]), max_new_tokens=40, do_sample=False, pad_token_id=0, use_cache=True
    )[0, len(ids) :].tolist()
    expected = made[: made.index(0)] if 0 in made else made
    answer = json.loads(done.stdout)
    assert answer["tokens"] == len(expected)
    assert answer["text"] == tokenizer.decode(expected).decode(errors="replace")


def test_another_run_starts_from_it(home: Path):
    done = run(
        home, "train", "--config", "run/config.toml", "--out", "continued",
        *settings("objective.kind=end_to_end", "train.warm_start=run", "data.source=text:text.txt",
                  "train.steps=3", "train.batch=2", "train.lr=1e-3", "train.device=cpu"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    scores = [
        json.loads(run(home, "eval", each, "--data", "text:text.txt", "--json").stdout)["ce"]
        for each in ("run", "continued")
    ]
    assert scores[1] < scores[0]
    exported = run(home, "export", "continued", "--to", "hf", "--out", "continued-hf")
    assert exported.returncode == 0, exported.stderr
    card = (home / "continued-hf" / "README.md").read_text()
    assert "Trained end to end" in card
    assert "| 0 | 3 | 3 |" in card
    assert "FLOP" in card


def settings(*values: str) -> list[str]:
    return [part for value in values for part in ("--set", value)]
