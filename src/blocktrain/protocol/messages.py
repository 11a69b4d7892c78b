"""Messages between coordinator and worker about runs, leases and updates; types of their fields.

Every JSON body of the HTTP protocol (docs/PROTOCOL.md) is a message of this module, of
`check_messages` or of `status_messages`: immutable, strictly typed, closed to unknown fields.
Tensors travel separately, as chunks named by their hash. Knows nothing of transport or storage.
"""

from operator import not_
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from blocktrain.codec import CODECS
from blocktrain.errors import ProtocolError

PROTOCOL = 1
# Listed after PROTOCOL by a coordinator that reads commitments and may ask to reveal their files.
PROTOCOL_WITH_COMMITMENTS = 2
CHUNK_BYTES = 8 * 1024 * 1024
MOST_CHUNKS = 1 << 16  # per blob: 512 GiB
MOST_DIFFERENCES = 1024  # per answer
MOST_DOWNLOADS = 256  # per message: at most a third of the smallest limit of a body
MOST_SEGMENTS = 8  # per commitment
MOST_REVEALED = 8  # files per request
MOST_TOKENIZER_FILES = 8
MOST_TOKENIZER_BYTES = 64 * 1024 * 1024  # of all its files

Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Identifier = Annotated[str, StringConstraints(pattern=r"^[0-9a-z]{8,64}$")]
Base64 = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
# Names are shown in terminals and web pages, so control characters are not allowed, and neither are
# those that change the direction of text. The first releases accepted the latter.
CONTROLS = r"\x00-\x1f\x7f-\x9f"
DIRECTIONS = r"\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
Name = Annotated[
    str, StringConstraints(min_length=1, max_length=80, pattern=f"^[^{CONTROLS}{DIRECTIONS}]*$")
]
StoredName = Annotated[
    str, StringConstraints(min_length=1, max_length=80, pattern=f"^[^{CONTROLS}]*$")
]
BearerToken = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,1024}$")]
Reason = Annotated[str, StringConstraints(max_length=500, pattern=r"^[^\x00]*$")]
FileName = Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z_][0-9A-Za-z_.-]{0,63}$")]
Count = Annotated[int, Field(ge=0, le=2**53)]
Reported = Annotated[int, Field(ge=0, le=2**40)]  # reported by workers; bounded, so that sums fit
Total = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1, le=2**53)]
BlockIndex = Annotated[int, Field(ge=0, le=4095)]
Role = Literal["train", "evaluate", "validate"]


def _known_codec(name: str) -> str:
    if name not in CODECS:
        raise ValueError(f"unknown codec {name!r}")
    return name


Codec = Annotated[
    str, AfterValidator(_known_codec), WithJsonSchema({"enum": list(CODECS), "type": "string"})
]
Split = Literal["train", "valid", "test"]


def first_problem(error: ValidationError) -> tuple[str, str]:
    """Path of the first invalid field ("" for the whole message), and what is wrong with it."""
    first = error.errors(include_url=False, include_input=False)[0]
    return ".".join(map(str, first["loc"])), first["msg"]


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Hello(Message):
    """The coordinator's run, and the protocol versions it speaks."""

    run: Identifier
    protocols: tuple[int, ...]


class Addresses(Message):
    """Where the run's coordinators are or will be, as https://host:port."""

    addresses: tuple[Annotated[str, StringConstraints(max_length=300)], ...] = Field(max_length=16)


class Blob(Message):
    """A file in the run's store: the hash of its recipe, and its size in bytes."""

    name: Hash
    size: Count


class Recipe(Message):
    """A blob's chunks in order; all but the last are 8 MiB long."""

    size: Count
    chunks: tuple[Hash, ...] = Field(max_length=MOST_CHUNKS)


class BlobAnswer(Message):
    """A recipe. If the object store serves chunks directly, `urls` has a presigned URL for each
    chunk."""

    recipe: Recipe
    urls: dict[Hash, str] | None = None


class Join(Message):
    """Join the run. `signature` is made by the private key over run and invite."""

    invite: Base64
    public_key: Base64
    name: Name
    device: Name
    protocols: tuple[int, ...] = Field(max_length=16)
    signature: Base64


class RunDescription(Message):
    """What a worker needs to know before its first lease. `corpus`: an array of tokens per split,
    `text_bytes`: the size of its text, `tokenizer`: files by name. The last two are left out if
    tokens are bytes, because the first release does not have them."""

    run: Identifier
    protocol: int
    config: str  # TOML
    corpus: dict[Split, Blob]
    corpus_digests: dict[Split, str]
    text_bytes: dict[Split, Count] = Field(default_factory=dict, exclude_if=not_)
    tokenizer: dict[FileName, Blob] = Field(
        default_factory=dict, max_length=MOST_TOKENIZER_FILES, exclude_if=not_
    )
    whole_bytes: Count  # updates up to this size may be sent in one request with their offer


class Joined(Message):
    """The worker is registered. `token` authorizes its requests for `token_seconds`."""

    worker: Identifier
    role: Role
    token: BearerToken
    token_seconds: int
    description: RunDescription


class TokenRequest(Message):
    """Request a new token, signed by the worker's key."""

    worker: Identifier
    time: Count  # seconds since 1970; prevents the replay of an old request
    signature: Base64


class Token(Message):
    """Authorizes a worker's requests for `token_seconds`."""

    token: BearerToken
    token_seconds: int


class LeaseRequest(Message):
    """Request work. `blocks`: those that the worker can train; null: any. `held_block`: the block
    in its memory. `trained`: the last lease it has trained, if it can continue without a new base;
    the update follows. `at_once`: the worker makes that update after this answer, so the
    coordinator should not delay it. `transfer_seconds`: duration of its last download and upload
    together. `run_steps`: `train.steps` of the settings that it has, if the run was extended."""

    blocks: tuple[BlockIndex, ...] | None = None
    held_block: BlockIndex | None = None
    trained: Identifier | None = None
    at_once: bool = False
    steps_per_second: float | None = Field(default=None, gt=0, lt=1e6)
    transfer_seconds: float = Field(default=0.0, ge=0, lt=1e6)
    run_steps: Positive | None = Field(default=None, exclude_if=not_)


class Predecessor(Message):
    """The version of an earlier block whose features a block of a cascade reads."""

    block: BlockIndex
    version: Count
    weights: Blob


class Differences(Message):
    """The deltas from one version of a block to another, in order. Empty if some are no longer
    stored; the worker then downloads the whole version."""

    differences: tuple[Blob, ...] = Field(max_length=MOST_DIFFERENCES)


class Lease(Message):
    """Train `block` from `base_version` on batches first_batch .. first_batch + steps - 1.

    Step j (from 0) uses the learning rate of step schedule_start + j * schedule_stride. If the
    lease `continues` another lease of the same worker, `base_version` does not contain that lease's
    update yet; training starts from the base plus what that lease learned.
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
    """No work is available now; ask again after `seconds`."""

    kind: Literal["wait"] = "wait"
    seconds: float
    reason: Reason


class Finished(Message):
    """The run is over: every block is trained on all its batches."""

    kind: Literal["finished"] = "finished"


class Reveal(Message):
    """A request to send files of a lease's commitment, because a part of the lease will be
    replayed."""

    lease: Identifier
    files: tuple[Hash, ...] = Field(min_length=1, max_length=MOST_REVEALED)


class LeaseAnswer(Message):
    """`last_words`: the block of the `trained` lease has no batches left, so its update is the
    final one and should leave out as little as possible. `reveal`: of an earlier lease."""

    model_config = ConfigDict(
        validate_by_name=True, validate_by_alias=True, serialize_by_alias=True
    )

    answer: Lease | Wait | Finished = Field(discriminator="kind")
    final_update: bool = Field(
        default=False, validation_alias="last_words", serialization_alias="last_words"
    )
    reveal: Reveal | None = Field(default=None, exclude_if=not_)


class Downloaded(Message):
    """Bytes that a worker downloaded for versions of a block: `whole` versions, `differences`
    (deltas), and `raw`, the full size of the same versions."""

    block: BlockIndex
    whole: Reported
    differences: Reported
    raw: Reported


Downloads = Annotated[tuple[Downloaded, ...], Field(max_length=MOST_DOWNLOADS)]


class LeaseReturn(Message):
    """Give a lease back early, so that another worker can have it."""

    fence: Positive
    reason: Reason
    downloads: Downloads = ()


class LeaseProgress(Message):
    """A heartbeat. `loss`: mean over the lease so far. `ends`: the worker stops here, since its
    deadline is near. The lease then has `steps_done` steps; the other batches are leased again."""

    fence: Positive
    steps_done: Count
    loss: float | None = None
    ends: bool = Field(default=False, exclude_if=not_)


class LeaseState(Message):
    """Whether the worker still holds a lease. If `open` is false, the worker should stop training
    it."""

    open: bool
    seconds_left: float
    reason: Reason = ""


class Commitment(Message):
    """Names of files that show how a lease was trained. All are weights files in canonical form.

    `weights` and `moments`: the block and its optimizer at the start of the lease and after each of
    its segments, which are equally long (swarm/replay.py). With a codec, `learned` is what was
    encoded, and `residual` what the encoding left out. `predecessors`: the versions that a block of
    a cascade read, one for each block before it. The worker keeps the files for a while, and sends
    some of them if the coordinator asks.
    """

    weights: tuple[Hash, ...] = Field(min_length=2, max_length=MOST_SEGMENTS + 1)
    moments: tuple[Hash, ...] = Field(min_length=2, max_length=MOST_SEGMENTS + 1)
    learned: Hash | None = None
    residual: Hash | None = None
    predecessors: tuple[Count, ...] = Field(default=(), max_length=4096)

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if len(self.weights) != len(self.moments):
            raise ValueError(
                "a commitment must name as many states of the optimizer as of the weights"
            )
        return self


class UpdateClaim(Message):
    """The fields that a worker signs, in this order."""

    run: Identifier
    worker: Identifier
    lease: Identifier
    fence: Positive
    block: BlockIndex
    base_version: Count
    codec: Codec
    recipe: Recipe
    loss: float | None = None
    commitment: Commitment | None = Field(default=None, exclude_if=not_)


class UpdateOffer(Message):
    """A signed update, whose chunks follow. `downloads` are counted when the update is
    committed."""

    claim: UpdateClaim
    signature: Base64
    downloads: Downloads = ()


class UploadState(Message):
    """The missing chunks. If the object store accepts chunks directly, `urls` has a presigned URL
    for each of them."""

    missing: tuple[Hash, ...]
    urls: dict[Hash, str] | None = None


class Receipt(Message):
    """The result of an update. Committing again returns the same receipt."""

    state: Literal["pending", "merged", "refused"]
    reason: Reason = ""
    weight: float = 0.0  # 1 in time, less if the update is late


class RevealOffer(Message):
    """The recipes of the files that the coordinator asked for. Their chunks follow. None: the
    worker does not have them any more."""

    recipes: tuple[Recipe, ...] = Field(max_length=MOST_REVEALED)


class Refusal(Message):
    """Every error response: a code for programs, a sentence for people."""

    error: Literal[
        "malformed", "unauthorized", "forbidden", "not_found", "conflict", "gone", "too_large",
        "slow_down", "unavailable", "internal",
    ]  # fmt: skip
    reason: str


STATUS_OF = {  # of the response with a refusal
    "malformed": 422, "unauthorized": 401, "forbidden": 403, "not_found": 404, "conflict": 409,
    "gone": 410, "too_large": 413, "slow_down": 429, "unavailable": 503, "internal": 500,
}  # fmt: skip
CODE_OF = {status: code for code, status in STATUS_OF.items()}


# A small update can be sent in one request: the length of the offer, the offer, the data.
WHOLE_BYTES = 1024 * 1024  # limit with a codec
# Limit without a codec. Workers of such a run get their next lease only after their update is
# offered, so a larger update over a slow link would delay training.
WHOLE_WEIGHTS_BYTES = 64 * 1024
LARGEST_OFFER = 64 * 1024
PREFIX_BYTES = 4
LARGEST_BODY = PREFIX_BYTES + LARGEST_OFFER + WHOLE_BYTES


def whole_update_head(offer: UpdateOffer) -> bytes:
    """The bytes before the data: the offer's length and the offer."""
    text = offer.model_dump_json().encode()
    return len(text).to_bytes(PREFIX_BYTES, "little") + text


def split_whole_update(body: bytes) -> tuple[bytes, memoryview]:
    """Split the body of a whole update into the offer, as JSON, and the data."""
    length = int.from_bytes(body[:PREFIX_BYTES], "little")
    start = PREFIX_BYTES + length
    if not 0 < length <= LARGEST_OFFER or start > len(body):
        raise ProtocolError("the body must begin with the offer's length, followed by the offer")
    return body[PREFIX_BYTES:start], memoryview(body)[start:]
