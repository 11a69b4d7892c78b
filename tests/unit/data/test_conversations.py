"""Conversations as training text: what the loss counts, and what serving would ask for."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.published import Shelf
from tests.support.small_tokenizer import small_tokenizer
from tests.support.training import CPU
from torch import nn

from blocktrain.config import Config, DataConfig
from blocktrain.data.corpus import Corpus, load_corpus
from blocktrain.data.tokenizer import (
    MASKED_DTYPE,
    ByteTokenizer,
    SubwordTokenizer,
    Tokenizer,
    ids_of,
    trained_on,
)
from blocktrain.errors import ConfigError, DataError
from blocktrain.model.stack import assemble, initial_block
from blocktrain.serve.http.served_model import ServedModel
from blocktrain.training.evaluate import evaluate, solo_ce
from blocktrain.training.objective import Batch
from blocktrain.training.trainer import BlockTrainer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Bye!"},
    {"role": "assistant", "content": "See you."},
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(tmp_path / "cache"))


def chat_corpus(folder: Path, tokenizer: Tokenizer, *rows: Any, copies: int = 1) -> Corpus:
    """The same conversations in all three splits."""
    for split in ("train", "valid", "test"):
        lines = [json.dumps(row) for row in rows] * copies
        (folder / f"{split}.jsonl").write_text("\n\n".join(lines))
    return load_corpus(DataConfig(source=f"chat:{folder}/*.jsonl"), tokenizer)


def with_template(template: str) -> SubwordTokenizer:
    settings = json.dumps({"chat_template": template}).encode()
    return SubwordTokenizer({**small_tokenizer().files, "tokenizer_config.json": settings})


def told(corpus: Corpus, tokenizer: Tokenizer) -> tuple[str, str]:
    """The whole text, and what is trained on."""
    tokens = corpus.splits["train"]
    return tuple(  # type: ignore[return-value]
        "".join(tokenizer.decode([t]).decode() or tokenizer.special_name(t) for t in ids.tolist())
        for ids in (ids_of(tokens), trained_on(tokens))
    )


def test_without_a_template_answers_follow_the_prompts_that_serving_makes(
    tmp_path: Path, config: Config
):
    rows = {"messages": TALK}, {"prompt": "2+2=", "completion": "4"}
    corpus = chat_corpus(tmp_path, ByteTokenizer(), *rows)
    text, answers = told(corpus, ByteTokenizer())
    assert text.endswith("User: Bye!\nAssistant: See you.\n2+2=4\n")
    assert answers == "User:Hi.\nUser:See you.\n4\n"
    turns = [(message["role"], message["content"]) for message in TALK[:-1]]
    prompt, _ = ServedModel("m", config).conversation(turns, {})
    ids = ids_of(corpus.splits["train"])
    assert ids[: len(prompt)].tolist() == prompt
    assert corpus.splits["train"][len(prompt)] == ord("S")
    assert corpus.bytes_of(corpus.splits["train"]) == len(answers)


def test_a_template_decides_what_is_written_and_answers_end_with_its_token(tmp_path: Path):
    tokenizer = with_template(CHATML)
    corpus = chat_corpus(tmp_path, tokenizer, {"messages": TALK})
    text, answers = told(corpus, tokenizer)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello?")
    assert answers == "Hi.<|im_end|>\nSee you.<|im_end|>\n"
    assert tokenizer.token_id("<|im_end|>") in trained_on(corpus.splits["train"]).tolist()


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": "no conversation"}, "line 1: needs the field messages, or prompt and completion"),
        ({"messages": TALK[:2]}, "no message has the role assistant"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "one of the roles system"),
        ({"prompt": 4, "completion": "four"}, "needs a text as its content"),
    ],
)
def test_lines_that_are_no_conversation_are_named(tmp_path: Path, row: Any, says: str):
    with pytest.raises(DataError, match=says):
        chat_corpus(tmp_path, ByteTokenizer(), row)


def test_a_template_that_rewrites_earlier_answers_is_refused(tmp_path: Path):
    forgetful = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(DataError, match="split the conversation so that each has one answer"):
        chat_corpus(tmp_path, with_template(forgetful), {"messages": TALK})


@torch.no_grad()
def mean_loss(trainer: BlockTrainer, batch: Batch) -> float:
    return float(trainer.objective.loss(trainer.forward, batch).value)


@pytest.mark.parametrize("kind", ["end_to_end", "turns"])
@pytest.mark.parametrize("tokens", [256, 2048])
def test_only_answers_train_and_count(tmp_path: Path, config: Config, kind: str, tokens: int):
    """The loss is the mean over answers, however a batch is accumulated, and so is the score."""
    corpus = chat_corpus(tmp_path, ByteTokenizer(), {"messages": TALK}, copies=30)
    settings = config.with_settings(objective__kind=kind)
    if tokens > 256:  # computes the loss in chunks
        settings = settings.with_settings(vocab__sha256="other", vocab__size=tokens, vocab__bos=256)
    block = settings.block_count - 1
    trainer = BlockTrainer(settings, block, corpus, CPU, None, Shelf())
    trainer.run(0, 3)
    targets = trainer.windows[5]
    assert targets.dtype == MASKED_DTYPE and 0 < (targets >= 0).mean() < 0.7
    batch = trainer.objective.prepare(targets, 0)
    if trainer.predecessors:
        batch = batch._replace(inputs=trainer.predecessors.features(5, batch.inputs))
    logits = trainer.module(batch.inputs)
    ce = nn.functional.cross_entropy(
        logits.transpose(1, 2), batch.targets_BT.long(), reduction="none"
    )
    expected = float(ce[torch.tensor(targets >= 0)].mean().detach())
    assert mean_loss(trainer, batch) == pytest.approx(expected)
    parts = [batch.rows(at, at + 2) for at in (0, 2)]
    assert sum(mean_loss(trainer, part) for part in parts) / 2 == pytest.approx(expected)
    prefix = trainer.predecessors.prefix() if trainer.predecessors else None
    assert solo_ce(settings, block, trainer.module, targets, prefix) == pytest.approx(
        expected, rel=1e-4
    )


def test_the_score_of_a_model_is_per_byte_of_the_answers(tmp_path: Path, config: Config):
    corpus = chat_corpus(tmp_path, ByteTokenizer(), {"messages": TALK}, copies=30)
    plain = config.with_settings(objective__kind="end_to_end")
    windows = np.asarray(corpus.splits["valid"][: 32 * 4]).reshape(4, 32)
    untrained = assemble(plain, [initial_block(plain, 0)])
    score = evaluate(untrained, windows, text_bytes=corpus.bytes_of(windows)).default
    assert score.ce == pytest.approx(np.log(256))
    assert score.bytes_per_token == 1.0


def test_denoising_blocks_refuse_conversations(config: Config):
    with pytest.raises(ConfigError, match="does not work with denoising blocks"):
        config.with_settings(data__source="chat:talk.jsonl")
