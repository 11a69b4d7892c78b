"""The run that a coordinator serves: its settings, secrets, ledger and chunk store.

Any number of coordinators may open the same run: they share only the ledger and the store.
"""

import hmac
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from blocktrain.config import Config, from_toml
from blocktrain.data.corpus import Corpus
from blocktrain.errors import ConfigError, NotFoundError
from blocktrain.ledger.ledger import Ledger, Transaction
from blocktrain.ledger.schema import RunRow
from blocktrain.protocol import identity
from blocktrain.protocol.messages import (
    CHUNK_BYTES,
    MOST_TOKENIZER_BYTES,
    MOST_TOKENIZER_FILES,
    PROTOCOL,
    WHOLE_BYTES,
    WHOLE_WEIGHTS_BYTES,
    Blob,
    RunDescription,
)
from blocktrain.protocol.tls import Authority
from blocktrain.storage.blobs import Blobs
from blocktrain.storage.chunks import ChunkStore


@dataclass(frozen=True)
class Run:
    id: str
    config: Config
    ledger: Ledger
    chunks: ChunkStore
    clock: Callable[[], float]
    token_secret: bytes
    authority: Authority
    description: RunDescription
    created: float
    extended: float | None  # when it was last extended
    offer_bytes: int  # the most that an offer of an update can have, with a name for every chunk

    @property
    def blobs(self) -> Blobs:
        return Blobs(self.chunks)

    def require_checks(self, required: bool) -> None:
        """Whether updates are merged only once validators have checked them. All coordinators of
        the run follow this."""
        with self.ledger.write() as tx:
            tx.checks.require(required)

    def needed_blobs(self, tx: Transaction) -> set[str]:
        """Names of the blobs of the text, the tokenizer, and all stored versions and deltas."""
        versions = tx.versions.all()
        blobs = [
            *self.description.corpus.values(),
            *self.description.tokenizer.values(),
            *(v.weights for v in versions),
            *(v.velocity for v in versions if v.velocity),
            *(v.residual for v in versions if v.residual),
            *(d for state in tx.blocks.states() for d in tx.versions.deltas(state.index).values()),
        ]
        return {blob.name for blob in blobs}


SECRET_NUMBERS = 1 << 52  # how many there are; exact in JSON


def secret_number(run: Run, *parts: str | int) -> int:
    """A number that follows from these parts and the run's secret, for choices that workers must
    not foresee."""
    text = "/".join(map(str, ("choice", *parts))).encode()
    digest = hmac.digest(run.token_secret, text, "sha256")
    return int.from_bytes(digest[:8], "little") % SECRET_NUMBERS


def run_row(ledger: Ledger) -> RunRow:
    with ledger.read() as tx:
        row = tx.run()
    if row is None:
        raise NotFoundError(
            "this ledger holds no run; check --data-dir and --db, or start a run with:"
            " blocktrain coordinator --config NAME"
        )
    return row


def open_run(ledger: Ledger, chunks: ChunkStore, clock: Callable[[], float]) -> Run:
    row = run_row(ledger)
    corpus, config = json.loads(row.corpus), from_toml(row.config)
    tokenizer = json.loads(row.tokenizer or "{}")
    tokenised = {split: entry for split, entry in corpus.items() if "text_bytes" in entry}
    return Run(
        id=row.id,
        config=config,
        ledger=ledger,
        chunks=chunks,
        clock=clock,
        token_secret=row.token_secret,
        authority=Authority.load(row.authority_certificate, row.authority_key),
        description=RunDescription(
            run=row.id,
            protocol=PROTOCOL,
            config=row.config,
            corpus={split: Blob(**entry["blob"]) for split, entry in corpus.items()},
            corpus_digests={split: entry["digest"] for split, entry in corpus.items()},
            text_bytes={split: entry["text_bytes"] for split, entry in tokenised.items()},
            tokenizer={name: Blob(**blob) for name, blob in tokenizer.items()},
            whole_bytes=_whole_bytes(config, chunks),
        ),
        created=row.created,
        extended=row.extended,
        offer_bytes=_offer_bytes(ledger),
    )


def create_run(
    config: Config,
    corpus: Corpus,
    weights: Sequence[Path],
    ledger: Ledger,
    chunks: ChunkStore,
    now: float,
    tokenizer: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Store the text, the files of the tokenizer and version 0 of each block, and record the run.
    If another coordinator has recorded a run meanwhile, that run counts."""
    _check_size(tokenizer)
    blobs, run = Blobs(chunks), identity.new_identifier()
    authority = Authority.create(run, now)
    splits = {
        split: {
            "blob": blobs.write([data.data]).model_dump(),
            "digest": corpus.digests.get(split, ""),
            **({"text_bytes": corpus.bytes_of(data)} if tokenizer else {}),
        }
        for split, data in corpus.splits.items()
    }
    files = {name: blobs.write([data]).model_dump() for name, data in tokenizer.items()}
    first_versions = [blobs.write([np.memmap(path, mode="r").data]) for path in weights]
    with ledger.write() as tx:
        if not tx.may_create_run():
            return
        tx.create_run(
            RunRow(
                id=run,
                config=config.to_toml(),
                corpus=json.dumps(splits),
                tokenizer=json.dumps(files) if files else None,
                token_secret=identity.new_secret().encode(),
                authority_certificate=authority.certificate_pem,
                authority_key=authority.key_pem,
                created=now,
            )
        )
        for block, blob in enumerate(first_versions):
            tx.create_block(block, config.train.steps, blob, now)


def _check_size(tokenizer: Mapping[str, bytes]) -> None:
    """ConfigError if workers would refuse the files."""
    size = sum(map(len, tokenizer.values()))
    if len(tokenizer) > MOST_TOKENIZER_FILES or size > MOST_TOKENIZER_BYTES:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} files of {size / 1e6:.0f} MB together; workers"
            f" accept at most {MOST_TOKENIZER_FILES} files of {MOST_TOKENIZER_BYTES / 1e6:.0f} MB;"
            " use a smaller tokenizer"
        )


OFFER_BYTES = 128 * 1024  # of an offer, without the names of its chunks
CHUNK_NAME_BYTES = 80


def _offer_bytes(ledger: Ledger) -> int:
    with ledger.read() as tx:
        sizes = [tx.versions.get(state.index).weights.size for state in tx.blocks.states()]
        largest = max(sizes, default=0)
    return OFFER_BYTES + CHUNK_NAME_BYTES * (largest // CHUNK_BYTES + 2)


def _whole_bytes(config: Config, chunks: ChunkStore) -> int:
    """The largest update accepted in one request; 0 if chunks go directly to a bucket."""
    if chunks.has_presigned_urls:
        return 0
    return WHOLE_WEIGHTS_BYTES if config.swarm.codec == "none" else WHOLE_BYTES
