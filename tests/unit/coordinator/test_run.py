"""A run's beginning: what is written down, and that it is found again."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.blobs import whole
from tests.support.coordinator import (
    SetClock,
    first_weights,
    make_corpus,
    make_run,
    open_stores,
    swarm_config,
    weights_now,
)
from tests.support.small_tokenizer import small_tokenizer

from blocktrain.coordinator.run import create_run, open_run
from blocktrain.data.corpus import Corpus
from blocktrain.errors import ConfigError, NotFoundError
from blocktrain.protocol.messages import PROTOCOL
from blocktrain.storage.tensor_file import encode


def test_a_new_run_holds_its_settings_its_text_and_every_blocks_first_version(tmp_path: Path):
    clock = SetClock()
    run = make_run(tmp_path, clock=clock)
    assert run.config == swarm_config()
    assert run.created == clock.now
    assert run.config.bytes_per_step == 2 * 8
    description = run.description
    assert (description.run, description.protocol) == (run.id, PROTOCOL)
    assert description.config == swarm_config().to_toml()
    corpus = make_corpus()
    assert description.corpus_digests == corpus.digests
    for split, data in corpus.splits.items():
        blob = description.corpus[split]  # type: ignore[index]
        assert blob.size == len(data)
        assert whole(run.blobs, blob) == data.tobytes()
    with run.ledger.read() as tx:
        states = tx.blocks.states()
    assert [(state.version, state.total_batches, state.next_batch) for state in states] == [
        (0, 40, 0),
        (0, 40, 0),
    ]
    for block in range(2):
        for name, tensor in first_weights(block).items():
            np.testing.assert_array_equal(weights_now(run, block)[name], tensor)
    run.ledger.close()


def test_every_coordinator_opens_the_same_run(tmp_path: Path):
    clock = SetClock()
    first = make_run(tmp_path, clock=clock)
    second = open_run(*open_stores(tmp_path), clock)
    assert (second.id, second.config, second.created) == (first.id, first.config, first.created)
    assert second.description == first.description
    assert second.token_secret == first.token_secret
    assert second.authority.fingerprint == first.authority.fingerprint
    first.ledger.close()
    second.ledger.close()


def test_every_run_has_a_name_and_secrets_of_its_own(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    assert first.id != second.id
    assert first.token_secret != second.token_secret
    assert first.authority.fingerprint != second.authority.fingerprint
    first.ledger.close()
    second.ledger.close()


def test_an_empty_ledger_holds_no_run(tmp_path: Path):
    ledger, chunks = open_stores(tmp_path)
    with pytest.raises(NotFoundError, match="holds no run"):
        open_run(ledger, chunks, SetClock())
    ledger.close()


def test_a_run_that_could_not_be_written_is_none(tmp_path: Path):
    ledger, chunks = open_stores(tmp_path)
    (tmp_path / "only").write_bytes(b"".join(encode(first_weights(0))))
    files = [tmp_path / "only", tmp_path / "missing"]
    with pytest.raises(FileNotFoundError):
        create_run(swarm_config(), make_corpus(), files, ledger, chunks, 0.0)
    with pytest.raises(NotFoundError):
        open_run(ledger, chunks, SetClock())
    ledger.close()


def test_a_tokenizer_is_stored_and_kept_with_the_run(tmp_path: Path):
    ledger, chunks = open_stores(tmp_path)
    tokenizer = small_tokenizer()
    config = replace(swarm_config(), vocab=tokenizer.vocabulary)
    text = b"some text" * 100
    tokens = np.array(tokenizer.encode(text.decode()), np.uint16)
    splits = dict.fromkeys(("train", "valid", "test"), tokens)
    corpus = Corpus("made", splits, {}, tokenizer.token_lengths())
    create_run(config, corpus, [], ledger, chunks, 0.0, tokenizer.files)
    run = open_run(ledger, chunks, SetClock())
    assert run.description.text_bytes == dict.fromkeys(splits, len(text))
    stored = {name: whole(run.blobs, blob) for name, blob in run.description.tokenizer.items()}
    assert stored == tokenizer.files
    with ledger.read() as tx:
        assert {blob.name for blob in run.description.tokenizer.values()} <= run.needed_blobs(tx)
    ledger.close()


def test_a_tokenizer_that_workers_would_refuse_is_refused(tmp_path: Path):
    ledger, chunks = open_stores(tmp_path)
    files = {f"{number}.json": b"{}" for number in range(9)}
    with pytest.raises(ConfigError, match="9 files"):
        create_run(swarm_config(), make_corpus(), [], ledger, chunks, 0.0, files)
    ledger.close()


def test_a_split_may_be_empty(tmp_path: Path):
    ledger, chunks = open_stores(tmp_path)
    corpus = make_corpus()
    corpus.splits["test"] = np.zeros(0, np.uint8)
    create_run(swarm_config(), corpus, [], ledger, chunks, 0.0)
    assert open_run(ledger, chunks, SetClock()).description.corpus["test"].size == 0
    ledger.close()
