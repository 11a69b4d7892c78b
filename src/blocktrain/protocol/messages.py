"""What coordinator and worker say to each other: frozen, strict, versioned; unknown fields refused.

Every body of the HTTP protocol (docs/PROTOCOL.md) is one of these. Knows nothing of transport,
storage or torch. Tensors never travel inside a message: they are chunks, named by their hash.
"""

from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
)

from blocktrain.codec.registry import CODECS
from blocktrain.errors import ProtocolError

PROTOCOL = 1
CHUNK_BYTES = 8 * 1024 * 1024
MOST_CHUNKS = 1 << 16  # of one blob: 512 GiB
MOST_DIFFERENCES = 1024  # in one answer
MOST_DOWNLOADS = 256  # told at once: no more than a third of the smallest body's limit

Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Identifier = Annotated[str, StringConstraints(pattern=r"^[0-9a-z]{8,64}$")]
Base64 = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
# Names are shown in terminals: no character that commands one.
Name = Annotated[
    str, StringConstraints(min_length=1, max_length=80, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")
]
Reason = Annotated[str, StringConstraints(max_length=500, pattern=r"^[^\x00]*$")]
Count = Annotated[int, Field(ge=0, le=2**53)]
Reported = Annotated[int, Field(ge=0, le=2**40)]  # so that sums of what anyone says stay numbers
Total = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1, le=2**53)]
BlockIndex = Annotated[int, Field(ge=0, le=4095)]
Role = Literal["train", "evaluate"]


def _known_codec(name: str) -> str:
    if name not in CODECS:
        raise ValueError(f"no codec is named {name!r}")
    return name


Codec = Annotated[
    str, AfterValidator(_known_codec), WithJsonSchema({"enum": list(CODECS), "type": "string"})
]
Split = Literal["train", "valid", "test"]
WorkerState = Literal["training", "waiting", "away", "lost", "banned"]


def first_problem(error: ValidationError) -> tuple[str, str]:
    """The first invalid field as a dotted path ("" for the whole), and what is wrong with it."""
    first = error.errors(include_url=False, include_input=False)[0]
    return ".".join(map(str, first["loc"])), first["msg"]


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Hello(Message):
    """Before anything else: who answers, and which versions of the protocol it speaks."""

    run: Identifier
    protocols: tuple[int, ...]


class Blob(Message):
    """A file in the run's store: the name of its recipe, and its size."""

    name: Hash
    size: Count


class Recipe(Message):
    """A blob as its chunks in order; all but the last are CHUNK_BYTES long."""

    size: Count
    chunks: tuple[Hash, ...] = Field(max_length=MOST_CHUNKS)


class BlobAnswer(Message):
    """A recipe, and where the store gives chunks away itself, an address for each of them."""

    recipe: Recipe
    urls: dict[Hash, str] | None = None


class Join(Message):
    invite: Base64
    public_key: Base64
    name: Name
    device: Name
    protocols: tuple[int, ...] = Field(max_length=16)
    signature: Base64


class RunDescription(Message):
    run: Identifier
    protocol: int
    config: str  # TOML
    corpus: dict[Split, Blob]
    corpus_digests: dict[Split, str]
    whole_bytes: Count  # updates of at most so many may be sent whole: see `protocol.whole`


class Joined(Message):
    worker: Identifier
    role: Role
    token: str
    token_seconds: int
    description: RunDescription


class TokenRequest(Message):
    worker: Identifier
    time: Count  # seconds since 1970, so that an old request cannot be sent again
    signature: Base64


class Token(Message):
    token: str
    token_seconds: int


class LeaseRequest(Message):
    """`held_block`: the block the worker still has in memory, with its optimizer.
    `trained`: the lease it has come to the end of, and from there can go on; the update follows.
    `at_once`: it follows once this is answered, so that no better answer is to be waited for.
    `transfer_seconds`: what its last download and upload took together."""

    blocks: tuple[BlockIndex, ...] | None = None
    held_block: BlockIndex | None = None
    trained: Identifier | None = None
    at_once: bool = False
    steps_per_second: float | None = Field(default=None, gt=0, lt=1e6)
    transfer_seconds: float = Field(default=0.0, ge=0, lt=1e6)


class Predecessor(Message):
    block: BlockIndex
    version: Count
    weights: Blob


class Differences(Message):
    """What leads from one version of a block to another, in order; none where some of it is not
    kept any more: then the whole version is to be fetched."""

    differences: tuple[Blob, ...] = Field(max_length=MOST_DIFFERENCES)


class Lease(Message):
    """Train `block` from `base_version` on batches first_batch .. first_batch + steps - 1.

    Step j of them (from 0) takes the learning rate of step schedule_start + j * schedule_stride.
    Where it `continues` a lease of the same worker, whose update `base_version` does not hold yet,
    training begins with what was learned in that one added to the base.
    """

    kind: Literal["lease"] = "lease"
    lease: Identifier
    fence: Positive
    block: BlockIndex
    base_version: Count
    base: Blob
    first_batch: Count
    steps: Positive
    schedule_start: Count
    schedule_stride: Positive
    seconds_left: float
    continues: Identifier | None = None
    predecessors: tuple[Predecessor, ...] = ()


class Wait(Message):
    """Nothing to do right now."""

    kind: Literal["wait"] = "wait"
    seconds: float
    reason: Reason


class Finished(Message):
    """The run is over: every block has seen all its text."""

    kind: Literal["finished"] = "finished"


class LeaseAnswer(Message):
    """`last_words`: nothing of the block that was `trained` is left to hand out, so its update had
    better say all that the worker has not told yet."""

    answer: Lease | Wait | Finished = Field(discriminator="kind")
    last_words: bool = False


class Downloaded(Message):
    """What a worker has moved to have versions of a block: whole ones, differences, and what all
    of these versions would have been whole."""

    block: BlockIndex
    whole: Reported
    differences: Reported
    raw: Reported


Downloads = Annotated[tuple[Downloaded, ...], Field(max_length=MOST_DOWNLOADS)]


class LeaseReturn(Message):
    fence: Positive
    reason: Reason
    downloads: Downloads = ()


class LeaseProgress(Message):
    fence: Positive
    steps_done: Count
    loss: float | None = None


class LeaseState(Message):
    """What the coordinator thinks of a lease; `open` false: stop, it is no longer yours."""

    open: bool
    seconds_left: float
    reason: Reason = ""


class UpdateClaim(Message):
    """What a worker signs: exactly these fields, in this order (see `protocol.identity`)."""

    run: Identifier
    worker: Identifier
    lease: Identifier
    fence: Positive
    block: BlockIndex
    base_version: Count
    codec: Codec
    recipe: Recipe
    loss: float | None = None


class UpdateOffer(Message):
    """`downloads`: what was not reported yet; counted when this is committed."""

    claim: UpdateClaim
    signature: Base64
    downloads: Downloads = ()


class UploadState(Message):
    """Which chunks are still missing, and where the store takes them itself, an address each."""

    missing: tuple[Hash, ...]
    urls: dict[Hash, str] | None = None


class Receipt(Message):
    """What became of an update. Sending it again gives the same answer."""

    state: Literal["pending", "merged", "refused"]
    reason: Reason = ""
    weight: float = 0.0  # of the batch bytes it covers; under 1 for a late one


class Score(Message):
    """A score of the assembled model (block null) or of one block, on named windows."""

    block: BlockIndex | None
    versions: tuple[Count, ...] = Field(max_length=4096)
    split: Split
    windows: Identifier
    ce: float
    downloads: Downloads = ()


class Moved(Message):
    """Bytes that were moved: updates up, versions down, whole ones and differences; and what the
    same would have been whole, in fp32 (`raw`)."""

    up: Total = 0
    up_raw: Total = 0
    down_whole: Total = 0
    down_differences: Total = 0
    down_raw: Total = 0


class BlockStatus(Message):
    index: BlockIndex
    version: Count
    weights: Blob
    ce: float | None
    ce_note: Reason = ""
    bytes_trained: Count
    progress: float  # share of the run's batches that are merged
    replicas: Count  # workers that hold a lease of it, or whose update waits to be merged
    # Leases met in time / those met or missed; one given back is neither. None before the first.
    participation: float | None
    pending_updates: Count
    moved: Moved


class WorkerStatus(Message):
    worker: Identifier
    name: Name
    role: Role
    device: Name
    block: BlockIndex | None
    state: WorkerState
    bytes_trained: Count
    updates: Count
    seconds_since_seen: float
    moved: Moved


class Status(Message):
    run: Identifier
    state: Literal["running", "finished"]
    ce: float | None  # of the assembled model
    ce_note: Reason = ""
    codec: Codec
    blocks: tuple[BlockStatus, ...]
    workers: tuple[WorkerStatus, ...]
    seconds: float


class Event(Message):
    number: Positive
    time: float
    kind: Literal[
        "joined", "leased", "returned", "uploaded", "merged", "late", "refused", "lost", "scored",
        "banned", "finished",
    ]  # fmt: skip
    worker: Identifier | None = None
    block: BlockIndex | None = None
    detail: Reason = ""


class Refusal(Message):
    """Every error of the protocol: a code for programs, a sentence for people."""

    error: Literal[
        "malformed", "unauthorized", "forbidden", "not_found", "conflict", "gone", "too_large",
        "slow_down", "unavailable", "internal",
    ]  # fmt: skip
    reason: str


WHOLE_BYTES = 1024 * 1024  # the largest update that may travel so
# Without a codec a worker gets its next lease once the one before is known to be offered: larger
# ones are offered first, so that a slow line does not keep it from training.
WHOLE_WEIGHTS_BYTES = 64 * 1024
LARGEST_OFFER = 64 * 1024
PREFIX_BYTES = 4
LARGEST_BODY = PREFIX_BYTES + LARGEST_OFFER + WHOLE_BYTES


def whole_update_head(offer: UpdateOffer) -> bytes:
    """What goes before the data."""
    text = offer.model_dump_json().encode()
    return len(text).to_bytes(PREFIX_BYTES, "little") + text


def split_whole_update(body: bytes) -> tuple[bytes, memoryview]:
    """The offer's JSON, and the data."""
    length = int.from_bytes(body[:PREFIX_BYTES], "little")
    start = PREFIX_BYTES + length
    if not 0 < length <= LARGEST_OFFER or start > len(body):
        raise ProtocolError("the body does not begin with an offer and its length")
    return body[PREFIX_BYTES:start], memoryview(body)[start:]
