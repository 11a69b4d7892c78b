"""Messages between router and stages (steps, prefills, releases, failures), validated on arrival.

A step carries its route: the stages still to come, and the router that waits for the result. Knows
nothing of connections or models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field, StringConstraints, ValidationError

from blocktrain.config import Vocabulary
from blocktrain.errors import ProtocolError
from blocktrain.numerics.sampling import Sampling
from blocktrain.protocol.framing import FrameKind, FrameMessage
from blocktrain.protocol.messages import Message, first_problem
from blocktrain.serve.ring.activations import (
    EMPTY,
    WIRE_TYPES,
    Activations,
    Array,
    Choice,
    Predictions,
    Row,
    pack,
    unpack,
)
from blocktrain.serve.ring.laps import UNTIMED, Laps

MAX_HOPS = 64
MAX_ROWS = 1024
MAX_POSITIONS = 1 << 20
MAX_TOP = 256
MAX_FAILURE = 1000  # characters
MAX_BIASES = 1024
MAX_LAPS = 1024  # of a stage
TokenId = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]  # JSON's keys are texts

Count = Field(ge=0, le=MAX_POSITIONS)
Identifier = Field(ge=0, lt=2**63)

StageLaps = Annotated[dict[str, float], Field(max_length=MAX_LAPS)]
Profile = dict[str, StageLaps] | None  # by stage; None: nothing is measured

AHead = TypeVar("AHead", bound=Message)


class RowHead(Message):
    """A row without its ids, and with the fields of its `choice`. Omitted fields have their
    defaults."""

    request: int = Identifier
    start: int = Count
    length: int = Count
    read: int = Count
    source: int = Field(0, ge=0, lt=2**63)
    temperature: float = Field(0.0, ge=0.0)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    seed: int = Field(0, ge=0, lt=2**63)
    position: int = Field(0, ge=0, lt=2**63)
    top: int = Field(0, ge=0, le=MAX_TOP)
    refine: bool = False
    answer_from: int = Field(0, ge=0, le=MAX_POSITIONS)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: dict[TokenId, float] = Field({}, max_length=MAX_BIASES)

    @property
    def choice(self) -> Choice:
        sampling = Sampling(
            self.temperature, self.top_k, self.top_p, self.seed, self.min_p, self.presence_penalty,
            self.frequency_penalty, {int(token): bias for token, bias in self.bias.items()},
        )  # fmt: skip
        return Choice(sampling, self.position, self.top, self.refine, self.answer_from)


class RowsHead(Message):
    rows: list[RowHead] = Field(min_length=1, max_length=MAX_ROWS)


class StepHead(RowsHead):
    router: str = Field(max_length=64)
    hops: list[str] = Field(max_length=MAX_HOPS)
    wire: Literal["fp32", "bf16", "int8"]
    seconds: dict[str, float] = Field(default_factory=dict, max_length=MAX_HOPS)
    profile: Profile = Field(None, max_length=MAX_HOPS)


class ResultHead(Message):
    requests: list[int] = Field(min_length=1, max_length=MAX_ROWS)
    read: list[Annotated[int, Count]] = Field(min_length=1, max_length=MAX_ROWS)
    seconds: dict[str, float] = Field(max_length=MAX_HOPS)
    profile: Profile = Field(None, max_length=MAX_HOPS)


class ReleaseHead(Message):
    """Requests that have ended. `keep`: how many positions of each context may be copied later."""

    requests: list[int] = Field(max_length=MAX_ROWS)
    keep: list[Annotated[int, Count]] = Field([], max_length=MAX_ROWS)


class FailureHead(Message):
    """Requests whose step failed, and why. `hop` is a stage that could not be reached."""

    requests: list[int] = Field(max_length=MAX_ROWS)
    code: Literal["missing_prefix", "cache_full", "unreachable", "failed"]
    message: str = Field(max_length=MAX_FAILURE)
    hop: str = ""


@dataclass(frozen=True)
class StepEnvelope:
    """A step with its route. `hops`: the stages still to come; `seconds`: time spent in each
    stage; `profile`: the laps of each stage, if they are measured; `laps`: those of the stage that
    has the step now."""

    activations: Activations
    router: str
    hops: tuple[str, ...]
    wire: str = "fp32"
    seconds: Mapping[str, float] = field(default_factory=dict)
    profile: Mapping[str, Mapping[str, float]] | None = None
    laps: Laps = UNTIMED

    @property
    def route(self) -> tuple[str, tuple[str, ...], str]:
        """The router, the stages still to come, and the wire format. Steps with equal routes can be
        computed together."""
        return self.router, self.hops, self.wire


@dataclass(frozen=True)
class StepResult:
    """The last stage's predictions for each request, and the time spent in each stage."""

    predictions: Mapping[int, Predictions]
    seconds: Mapping[str, float]
    profile: Mapping[str, Mapping[str, float]] | None = None


def step_message(step: StepEnvelope, vocabulary: Vocabulary) -> FrameMessage:
    """A message to the next stage."""
    rows, readout = step.activations.rows, step.activations.readout_RV
    packed = pack(step.activations.state, step.wire)
    if readout.size:
        packed += pack(readout, step.wire)
    meta = {
        "router": step.router,
        "hops": list(step.hops),
        "rows": [_row_meta(row) for row in rows],
        "wire": step.wire,
        **_times(step),
    }
    return FrameMessage(FrameKind.STEP, meta=meta, arrays=(_ids(rows, vocabulary), *packed))


def read_step(message: FrameMessage, vocabulary: Vocabulary) -> StepEnvelope:
    laps = Laps()
    head = _checked(StepHead, message.meta)
    count = len(WIRE_TYPES[head.wire])
    ids, *packed = message.arrays or [EMPTY]
    rows = _rows(head.rows, ids, vocabulary)
    if len(packed) not in (count, 2 * count):
        raise ProtocolError(
            f"a step has {len(packed)} arrays of numbers; {count} or {2 * count} are expected"
        )
    state = unpack(packed[:count], head.wire)
    readout = unpack(packed[count:], head.wire) if packed[count:] else EMPTY
    if state.ndim != 2 or readout.ndim != 2:
        raise ProtocolError("a step's arrays do not match its rows")
    activations = Activations(rows, state, readout)
    hops = tuple(head.hops)
    if head.profile is None:
        return StepEnvelope(activations, head.router, hops, head.wire, head.seconds)
    laps.lap("decode")
    return StepEnvelope(activations, head.router, hops, head.wire, head.seconds, head.profile, laps)


def result_message(step: StepEnvelope, vocabulary: Vocabulary) -> FrameMessage:
    """A message to the router, with only the predictions."""
    rows, predicted = step.activations.rows, step.activations.predictions
    assert predicted is not None  # the last block predicts
    meta = {
        "requests": [row.request for row in rows],
        "read": [row.read for row in rows],
        **_times(step),
    }
    kind = id_type(vocabulary)
    arrays = [predicted.tokens_R.astype(kind), predicted.log_probs_R, predicted.next_log_probs_R]
    if predicted.top_tokens_RK.size:
        arrays += [predicted.top_tokens_RK.astype(kind), predicted.top_log_probs_RK]
    return FrameMessage(FrameKind.RESULT, meta=meta, arrays=tuple(arrays))


def read_result(message: FrameMessage, vocabulary: Vocabulary) -> StepResult:
    head, arrays = _checked(ResultHead, message.meta), list(message.arrays)
    ends = list(accumulate(head.read))
    if len(arrays) == 3:
        arrays += [np.zeros((ends[-1], 0), arrays[0].dtype), np.zeros((ends[-1], 0), np.float32)]
    if len(head.requests) != len(ends):
        raise ProtocolError(
            f"a result has {len(head.requests)} requests, but read positions of {len(ends)}"
        )
    if len(arrays) != 5:
        raise ProtocolError(f"a result has {len(message.arrays)} arrays; 3 or 5 are expected")
    predicted = Predictions(*arrays)
    if not _fits(predicted, ends[-1], vocabulary):
        raise ProtocolError("a result's arrays do not match its requests")
    parts = zip(head.requests, head.read, ends, strict=True)
    by_request = {r: predicted[end - read : end] for r, read, end in parts}
    return StepResult(by_request, head.seconds, head.profile)


def _fits(predicted: Predictions, positions: int, vocabulary: Vocabulary) -> bool:
    tokens = (predicted.tokens_R, predicted.top_tokens_RK)
    log_probs = (predicted.log_probs_R, predicted.next_log_probs_R, predicted.top_log_probs_RK)
    return (
        all(each.dtype == id_type(vocabulary) for each in tokens)
        and all((each < vocabulary.size).all() for each in tokens)
        and all(each.dtype == np.float32 and np.isfinite(each).all() for each in log_probs)
        and all(each.shape == (positions,) for each in (predicted.tokens_R, *log_probs[:2]))
        and predicted.top_tokens_RK.shape == predicted.top_log_probs_RK.shape
        and predicted.top_tokens_RK.shape[:1] == (positions,)
    )


def prefill_message(rows: Sequence[Row], vocabulary: Vocabulary) -> FrameMessage:
    meta = {"rows": [_row_meta(row) for row in rows]}
    return FrameMessage(FrameKind.PREFILL, meta=meta, arrays=(_ids(rows, vocabulary),))


def read_prefill(message: FrameMessage, vocabulary: Vocabulary) -> tuple[Row, ...]:
    head = _checked(RowsHead, message.meta)
    if len(message.arrays) != 1:
        raise ProtocolError("a prefill must have exactly one array, the ids")
    return _rows(head.rows, message.arrays[0], vocabulary)


def release_message(keep: Mapping[int, int]) -> FrameMessage:
    """`keep`: by request, how many positions of its context may be copied later."""
    return FrameMessage(
        FrameKind.RELEASE, meta={"requests": list(keep), "keep": list(keep.values())}
    )


def read_release(message: FrameMessage) -> dict[int, int]:
    head = _checked(ReleaseHead, message.meta)
    if len(head.keep) != len(head.requests):
        raise ProtocolError("a release must say of every request how much to keep")
    return dict(zip(head.requests, head.keep, strict=True))


def failure_message(requests: Sequence[int], code: str, text: str, hop: str = "") -> FrameMessage:
    meta = {"requests": requests, "code": code, "message": text[:MAX_FAILURE], "hop": hop}
    return FrameMessage(FrameKind.FAILURE, meta=meta)


def read_failure(message: FrameMessage) -> FailureHead:
    return _checked(FailureHead, message.meta)


def id_type(vocabulary: Vocabulary) -> npt.DTypeLike:
    """The type of ids on the wire."""
    return np.uint16 if vocabulary.ids <= 1 << 16 else np.uint32


def _ids(rows: Sequence[Row], vocabulary: Vocabulary) -> Array:
    return np.concatenate([row.ids for row in rows]).astype(id_type(vocabulary))


def _row_meta(row: Row) -> dict[str, Any]:
    choice = {**vars(row.choice), **vars(row.choice.sampling)}
    predicted = {
        name: value for name, value in choice.items() if value != _DEFAULTS.get(name, value)
    }
    place = {"request": row.request, "start": row.start, "length": len(row.ids), "read": row.read}
    return place | predicted | ({"source": row.source} if row.source else {})


_DEFAULTS = {name: each.default for name, each in RowHead.model_fields.items()}


def _times(step: StepEnvelope) -> dict[str, Any]:
    """The times that a message reports. The profile is left out unless it is measured, so that
    members of the ring that do not know it can be in it too."""
    step.laps.lap("encode")
    times: dict[str, Any] = {"seconds": _rounded(step.seconds)}
    if step.profile is not None:
        times["profile"] = {stage: _rounded(laps) for stage, laps in step.profile.items()}
    return times


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {stage: round(each, 6) for stage, each in seconds.items()}


def _rows(heads: Sequence[RowHead], ids: Array, vocabulary: Vocabulary) -> tuple[Row, ...]:
    ends = list(accumulate(head.length for head in heads))
    is_typed = ids.dtype == id_type(vocabulary) and ids.shape == (ends[-1],)
    if not is_typed or (ids >= vocabulary.ids).any():
        raise ProtocolError("a message's ids do not match its rows")
    if any(not head.length or head.read > head.length for head in heads):
        raise ProtocolError("a row is empty, or reads more positions than it has")
    cut = np.split(ids.astype(np.uint32), ends[:-1])
    return tuple(
        Row(head.request, head.start, own, head.read, head.choice, head.source)
        for head, own in zip(heads, cut, strict=True)
    )


def _checked(model: type[AHead], meta: dict[str, Any]) -> AHead:
    try:
        return model.model_validate(meta)
    except ValidationError as error:
        where, problem = first_problem(error)
        raise ProtocolError(f"a message is malformed at {where or 'its head'}: {problem}") from None
