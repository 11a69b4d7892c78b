"""The run a coordinator serves: its settings, secrets, ledger and chunk store.

Any number of coordinators may open the same run, because all they share is in the ledger and the
store.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from blocktrain.config import Config, from_toml
from blocktrain.data.corpus import Bytes, Corpus
from blocktrain.errors import NotFoundError
from blocktrain.ledger.ledger import Ledger
from blocktrain.ledger.rows import RunRow
from blocktrain.protocol import identity
from blocktrain.protocol.messages import (
    PROTOCOL,
    WHOLE_BYTES,
    WHOLE_WEIGHTS_BYTES,
    Blob,
    RunDescription,
)
from blocktrain.protocol.tls import Authority
from blocktrain.storage.blobs import Blobs
from blocktrain.storage.chunks import ChunkStore

PIECE_BYTES = 1 << 20


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

    @property
    def blobs(self) -> Blobs:
        return Blobs(self.chunks)

    @property
    def batch_bytes(self) -> int:
        return self.config.bytes_per_step


def run_row(ledger: Ledger) -> RunRow:
    with ledger.read() as tx:
        row = tx.run()
    if row is None:
        raise NotFoundError(
            "this ledger holds no run; start one with: blocktrain coordinator --config"
        )
    return row


def open_run(ledger: Ledger, chunks: ChunkStore, clock: Callable[[], float]) -> Run:
    row = run_row(ledger)
    corpus, config = json.loads(row.corpus), from_toml(row.config)
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
            whole_bytes=_whole_bytes(config, chunks),
        ),
        created=row.created,
    )


def create_run(
    config: Config,
    corpus: Corpus,
    weights: Sequence[Path],
    ledger: Ledger,
    chunks: ChunkStore,
    now: float,
) -> None:
    """Store the text and each block's version 0, and record the run. If another coordinator
    recorded one meanwhile, that one is the run."""
    blobs, run = Blobs(chunks), identity.new_identifier()
    authority = Authority.create(run, now)
    splits = {
        split: {
            "blob": blobs.write(_pieces(data)).model_dump(),
            "digest": corpus.digests.get(split, ""),
        }
        for split, data in corpus.splits.items()
    }
    first_versions = [blobs.write(_file_pieces(path)) for path in weights]
    with ledger.write() as tx:
        if not tx.may_create_run():
            return
        tx.create_run(
            RunRow(
                id=run,
                config=config.to_toml(),
                corpus=json.dumps(splits),
                token_secret=identity.new_secret().encode(),
                authority_certificate=authority.certificate_pem,
                authority_key=authority.key_pem,
                created=now,
            )
        )
        for block, blob in enumerate(first_versions):
            tx.create_block(block, config.train.steps, blob, now)


def _whole_bytes(config: Config, chunks: ChunkStore) -> int:
    """The largest update that is taken in one request; 0 if chunks go to a bucket directly."""
    if chunks.has_presigned_urls:
        return 0
    return WHOLE_WEIGHTS_BYTES if config.swarm.codec == "none" else WHOLE_BYTES


def _pieces(data: Bytes) -> Iterator[bytes]:
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES].tobytes()


def _file_pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from iter(lambda: file.read(PIECE_BYTES), b"")
