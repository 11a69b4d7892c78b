"""The messages between coordinator and worker: frozen and strict, with unknown fields refused.

Every JSON body of the HTTP protocol (docs/PROTOCOL.md) is one of these. Tensors travel separately,
as chunks named by their hash. Knows nothing of transport or storage.
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
MOST_DOWNLOADS = 256  # in one message: at most a third of the smallest body's limit

Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Identifier = Annotated[str, StringConstraints(pattern=r"^[0-9a-z]{8,64}$")]
Base64 = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
# Names are shown in terminals: control characters could command one.
Name = Annotated[
    str, StringConstraints(min_length=1, max_length=80, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")
]
Reason = Annotated[str, StringConstraints(max_length=500, pattern=r"^[^\x00]*$")]
Count = Annotated[int, Field(ge=0, le=2**53)]
Reported = Annotated[int, Field(ge=0, le=2**40)]  # by a worker; bounded, so that sums fit
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
    """The run that answers, and the protocol versions it speaks."""

    run: Identifier
    protocols: tuple[int, ...]


class Blob(Message):
    """A file in the run's store: the hash of its recipe, and its size in bytes."""

    name: Hash
    size: Count


class Recipe(Message):
    """A blob's chunks in order; all but the last are 8 MiB long."""

    size: Count
    chunks: tuple[Hash, ...] = Field(max_length=MOST_CHUNKS)


class BlobAnswer(Message):
    """A recipe. If the object store serves chunks itself, `urls` has a presigned URL for each."""

    recipe: Recipe
    urls: dict[Hash, str] | None = None


class Join(Message):
    """Take part in the run. `signature`: by the private key, over run and invite."""

    invite: Base64
    public_key: Base64
    name: Name
    device: Name
    protocols: tuple[int, ...] = Field(max_length=16)
    signature: Base64


class RunDescription(Message):
    """What a worker needs to know of a run before its first lease."""

    run: Identifier
    protocol: int
    config: str  # TOML
    corpus: dict[Split, Blob]
    corpus_digests: dict[Split, str]
    whole_bytes: Count  # updates up to this size may be sent in one request with their offer


class Joined(Message):
    """The worker is registered. `token` authorizes its requests for `token_seconds`."""

    worker: Identifier
    role: Role
    token: str
    token_seconds: int
    description: RunDescription


class TokenRequest(Message):
    """Request a new token, signed by the worker's key."""

    worker: Identifier
    time: Count  # seconds since 1970: an old request cannot be replayed
    signature: Base64


class Token(Message):
    """Authorizes a worker's requests for `token_seconds`."""

    token: str
    token_seconds: int


class LeaseRequest(Message):
    """Request work. `blocks`: those the worker can train, null for any. `held_block`: the block in
    its memory. `trained`: the lease after which it can go on without a new base; its update
    follows. `at_once`: that update is made after this answer, so the coordinator should not delay
    it. `transfer_seconds`: how long its last download and upload took together."""

    blocks: tuple[BlockIndex, ...] | None = None
    held_block: BlockIndex | None = None
    trained: Identifier | None = None
    at_once: bool = False
    steps_per_second: float | None = Field(default=None, gt=0, lt=1e6)
    transfer_seconds: float = Field(default=0.0, ge=0, lt=1e6)


class Predecessor(Message):
    """The version of an earlier block whose outputs a cascade's block is trained on."""

    block: BlockIndex
    version: Count
    weights: Blob


class Differences(Message):
    """The deltas from one version of a block to another, in order. Empty if some are no longer
    stored: then the version has to be downloaded whole."""

    differences: tuple[Blob, ...] = Field(max_length=MOST_DIFFERENCES)


class Lease(Message):
    """Train `block` from `base_version` on batches first_batch .. first_batch + steps - 1.

    Step j (from 0) uses the learning rate of step schedule_start + j * schedule_stride. If it
    `continues` another lease of the same worker, `base_version` does not contain that one's update
    yet, and training starts from the base plus what was learned in it.
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
    """There is nothing to do now; ask again after `seconds`."""

    kind: Literal["wait"] = "wait"
    seconds: float
    reason: Reason


class Finished(Message):
    """The run is over: every block was trained on all its text."""

    kind: Literal["finished"] = "finished"


class LeaseAnswer(Message):
    """`last_words`: the block of the `trained` lease has no text left, so its update is the final
    one and should leave out as little as possible."""

    model_config = ConfigDict(
        validate_by_name=True, validate_by_alias=True, serialize_by_alias=True
    )

    answer: Lease | Wait | Finished = Field(discriminator="kind")
    final_update: bool = Field(
        default=False, validation_alias="last_words", serialization_alias="last_words"
    )


class Downloaded(Message):
    """Bytes a worker has downloaded to get versions of a block: `whole` versions, `differences`
    (deltas), and `raw`, the full size of these versions."""

    block: BlockIndex
    whole: Reported
    differences: Reported
    raw: Reported


Downloads = Annotated[tuple[Downloaded, ...], Field(max_length=MOST_DOWNLOADS)]


class LeaseReturn(Message):
    """Give a lease back before its end, so that another worker can have it."""

    fence: Positive
    reason: Reason
    downloads: Downloads = ()


class LeaseProgress(Message):
    """A heartbeat. `loss`: the mean so far."""

    fence: Positive
    steps_done: Count
    loss: float | None = None


class LeaseState(Message):
    """Whether a lease is still the worker's; if `open` is false, it should stop."""

    open: bool
    seconds_left: float
    reason: Reason = ""


class UpdateClaim(Message):
    """What a worker signs: exactly these fields, in this order."""

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
    """A signed update whose chunks follow. `downloads`: counted when the update is committed."""

    claim: UpdateClaim
    signature: Base64
    downloads: Downloads = ()


class UploadState(Message):
    """The chunks that are missing. If the object store takes chunks itself, `urls` has a presigned
    URL for each."""

    missing: tuple[Hash, ...]
    urls: dict[Hash, str] | None = None


class Receipt(Message):
    """What became of an update. Committing it again gives the same answer."""

    state: Literal["pending", "merged", "refused"]
    reason: Reason = ""
    weight: float = 0.0  # relative to its batches; under 1 if the update is late


class Score(Message):
    """A cross entropy of one block, or of the assembled model if `block` is null."""

    block: BlockIndex | None
    versions: tuple[Count, ...] = Field(max_length=4096)
    split: Split
    windows: Identifier
    ce: float
    downloads: Downloads = ()


class Moved(Message):
    """Bytes of updates (up) and versions (down, whole or as deltas). `raw`: the size of the same as
    whole fp32 blocks."""

    up: Total = 0
    up_raw: Total = 0
    down_whole: Total = 0
    down_differences: Total = 0
    down_raw: Total = 0


class BlockStatus(Message):
    """The state of one block."""

    index: BlockIndex
    version: Count
    weights: Blob
    ce: float | None
    ce_note: Reason = ""
    bytes_trained: Count
    progress: float  # share of the run's batches that are merged
    replicas: Count  # workers with a lease of it or an update that waits to be merged
    # Leases completed in time / completed or missed, without those given back; None: none yet.
    participation: float | None
    pending_updates: Count
    moved: Moved


class WorkerStatus(Message):
    """The state of one worker."""

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
    """The state of a run."""

    run: Identifier
    state: Literal["running", "finished"]
    ce: float | None  # of the assembled model
    ce_note: Reason = ""
    codec: Codec
    blocks: tuple[BlockStatus, ...]
    workers: tuple[WorkerStatus, ...]
    seconds: float


class Event(Message):
    """Something that happened in the run."""

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
    """Every error response: a code for programs, a sentence for people."""

    error: Literal[
        "malformed", "unauthorized", "forbidden", "not_found", "conflict", "gone", "too_large",
        "slow_down", "unavailable", "internal",
    ]  # fmt: skip
    reason: str


# A small update can be sent in one request: the length of the offer, the offer, the data.
WHOLE_BYTES = 1024 * 1024  # the largest with a codec
# The largest without a codec: there, a worker gets its next lease only after its update was
# offered, and a larger one over a slow line would keep it from training.
WHOLE_WEIGHTS_BYTES = 64 * 1024
LARGEST_OFFER = 64 * 1024
PREFIX_BYTES = 4
LARGEST_BODY = PREFIX_BYTES + LARGEST_OFFER + WHOLE_BYTES


def whole_update_head(offer: UpdateOffer) -> bytes:
    """What precedes the data: the offer and its length."""
    text = offer.model_dump_json().encode()
    return len(text).to_bytes(PREFIX_BYTES, "little") + text


def split_whole_update(body: bytes) -> tuple[bytes, memoryview]:
    """The offer's JSON, and the data."""
    length = int.from_bytes(body[:PREFIX_BYTES], "little")
    start = PREFIX_BYTES + length
    if not 0 < length <= LARGEST_OFFER or start > len(body):
        raise ProtocolError("the body does not start with the length of an offer and the offer")
    return body[PREFIX_BYTES:start], memoryview(body)[start:]
