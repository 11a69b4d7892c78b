"""Work as messages: what router and stages say to each other, checked before it is believed.

A step is source-routed: it names the stages that are still to come and the router that waits for
it. Knows nothing of connections or models.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from blocktrain.errors import ProtocolError
from blocktrain.protocol.framing import FrameMessage, Kind
from blocktrain.protocol.messages import first_problem
from blocktrain.serve.ring import wire
from blocktrain.serve.router.decode import Sampling
from blocktrain.serve.stage.batch import Refinement, Row, Work
from blocktrain.vocabulary import BYTES, IDS

MOST_HOPS = 64
MOST_ROWS = 1024
MOST_POSITIONS = 1 << 20

Count = Field(ge=0, le=MOST_POSITIONS)
Identifier = Field(ge=0, lt=2**63)


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


AHead = TypeVar("AHead", bound=Strict)


class RefinementHead(Strict):
    temperature: float = Field(ge=0.0, allow_inf_nan=False)
    top_k: int = Field(ge=0, le=BYTES)
    top_p: float = Field(gt=0.0, le=1.0)
    seed: int = Identifier
    position: int = Field(ge=0, lt=2**63)


class RowHead(Strict):
    request: int = Identifier
    start: int = Count
    length: int = Count
    read: int = Count
    refinement: RefinementHead | None = None


class StepHead(Strict):
    router: str = Field(max_length=64)
    hops: list[str] = Field(max_length=MOST_HOPS)
    rows: list[RowHead] = Field(min_length=1, max_length=MOST_ROWS)
    wire: Literal["fp32", "bf16", "int8"]
    seconds: dict[str, float] = Field(default_factory=dict, max_length=MOST_HOPS)


class RowsHead(Strict):
    rows: list[RowHead] = Field(min_length=1, max_length=MOST_ROWS)


class ReleaseHead(Strict):
    requests: list[int] = Field(max_length=MOST_ROWS)


class FailureHead(Strict):
    """Requests whose step went no further, and why; `hop` is the stage that was not reached."""

    requests: list[int] = Field(max_length=MOST_ROWS)
    code: Literal["missing_prefix", "cache_full", "unreachable", "failed"]
    message: str = Field(max_length=1000)
    hop: str = ""


@dataclass(frozen=True)
class StepEnvelope:
    """Work on its way: `hops` are the addresses still to come, `seconds` what each stage took."""

    work: Work
    router: str
    hops: tuple[str, ...]
    wire: str = "fp32"
    seconds: tuple[tuple[str, float], ...] = ()

    @property
    def way(self) -> tuple[str, tuple[str, ...], str]:
        """Steps that go the same way can be computed as one."""
        return self.router, self.hops, self.wire

    def of(self, work: Work) -> "StepEnvelope":
        """The same way with some of its rows."""
        return replace(self, work=work)

    def after(self, work: Work, stage: str, seconds: float) -> "StepEnvelope":
        """When a stage has done its part."""
        return replace(self, work=work, seconds=(*self.seconds, (stage, seconds)))

    def next_hop(self) -> tuple[str, "StepEnvelope"]:
        return self.hops[0], replace(self, hops=self.hops[1:])


def step_message(step: StepEnvelope, kind: Kind = Kind.STEP) -> FrameMessage:
    """As a result it carries the readout alone: nobody needs the state any more."""
    work = step.work
    head = StepHead(
        router=step.router,
        hops=list(step.hops),
        rows=[_row_head(row) for row in work.rows],
        wire=step.wire,  # type: ignore[arg-type]
        seconds=dict(step.seconds),
    )
    state = () if kind is Kind.RESULT else wire.pack(work.state, step.wire)
    arrays = (_ids(work.rows), *wire.pack(work.readout_RV, step.wire), *state)
    return FrameMessage(kind, meta=head.model_dump(), arrays=arrays)


def read_step(message: FrameMessage) -> StepEnvelope:
    head = _checked(StepHead, message.meta)
    count = wire.arrays_of(head.wire)
    ids, *packed = message.arrays or [np.zeros(0, np.uint16)]
    rows = _rows(head.rows, ids)
    expected = count if message.kind is Kind.RESULT else 2 * count
    if len(packed) != expected:
        raise ProtocolError(f"a step has {len(packed)} arrays, not {expected}")
    readout = wire.unpack(packed[:count], head.wire)
    state = wire.unpack(packed[count:], head.wire) if packed[count:] else readout[:, :0]
    if readout.shape != (sum(row.read for row in rows), BYTES) or state.ndim != 2:
        raise ProtocolError("a step's arrays do not fit its rows")
    return StepEnvelope(
        Work(rows, state, readout),
        head.router,
        tuple(head.hops),
        head.wire,
        tuple(head.seconds.items()),
    )


def prefill_message(rows: Sequence[Row]) -> FrameMessage:
    head = RowsHead(rows=[_row_head(row) for row in rows])
    return FrameMessage(Kind.PREFILL, meta=head.model_dump(), arrays=(_ids(rows),))


def read_prefill(message: FrameMessage) -> tuple[Row, ...]:
    head = _checked(RowsHead, message.meta)
    if len(message.arrays) != 1:
        raise ProtocolError("a prefill carries ids and nothing else")
    return _rows(head.rows, message.arrays[0])


def release_message(requests: Sequence[int]) -> FrameMessage:
    return FrameMessage(Kind.RELEASE, meta=ReleaseHead(requests=list(requests)).model_dump())


def read_release(message: FrameMessage) -> list[int]:
    return _checked(ReleaseHead, message.meta).requests


def failure_message(requests: Sequence[int], code: str, text: str, hop: str = "") -> FrameMessage:
    head = FailureHead(requests=list(requests), code=code, message=text[:1000], hop=hop)  # type: ignore[arg-type]
    return FrameMessage(Kind.ERROR, request=requests[0], meta=head.model_dump())


def read_failure(message: FrameMessage) -> FailureHead:
    return _checked(FailureHead, message.meta)


def _row_head(row: Row) -> RowHead:
    return RowHead(
        request=row.request,
        start=row.start,
        length=len(row.ids),
        read=row.read,
        refinement=_refinement_head(row.refinement) if row.refinement else None,
    )


def _refinement_head(refinement: Refinement) -> RefinementHead:
    sampling = refinement.sampling
    return RefinementHead(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        position=refinement.position,
    )


def _ids(rows: Sequence[Row]) -> np.ndarray:
    return np.concatenate([row.ids.astype(np.uint16, copy=False) for row in rows])


def _rows(heads: Sequence[RowHead], ids: np.ndarray) -> tuple[Row, ...]:
    total = sum(head.length for head in heads)
    if ids.dtype != np.uint16 or ids.shape != (total,) or (ids >= IDS).any():
        raise ProtocolError("the ids of a message do not fit its rows")
    rows, at = [], 0
    for head in heads:
        if not head.length or head.read > head.length:
            raise ProtocolError("a row reads more positions than it has")
        rows.append(
            Row(
                head.request,
                head.start,
                ids[at : at + head.length],
                head.read,
                _refinement(head.refinement),
            )
        )
        at += head.length
    return tuple(rows)


def _refinement(head: RefinementHead | None) -> Refinement | None:
    if head is None:
        return None
    sampling = Sampling(head.temperature, head.top_k, head.top_p, head.seed)
    return Refinement(sampling, head.position)


def _checked(model: type[AHead], meta: dict[str, Any]) -> AHead:
    try:
        return model.model_validate(meta)
    except ValidationError as error:
        field, problem = first_problem(error)
        raise ProtocolError(f"a message is malformed at {field or 'its head'}: {problem}") from None
