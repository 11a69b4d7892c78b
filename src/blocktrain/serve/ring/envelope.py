"""Steps, prefills, releases and failures as messages of router and stages, validated on arrival.

A step is source-routed: it names the stages still to come and the router that waits for it. Knows
nothing of connections or models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from blocktrain.errors import ProtocolError
from blocktrain.numerics.sampling import Sampling
from blocktrain.protocol.framing import FrameKind, FrameMessage
from blocktrain.protocol.messages import first_problem
from blocktrain.serve.ring import wire
from blocktrain.serve.stage.batch import Activations, Refinement, Row
from blocktrain.vocabulary import BYTES, IDS

MAX_HOPS = 64
MAX_ROWS = 1024
MAX_POSITIONS = 1 << 20

Count = Field(ge=0, le=MAX_POSITIONS)
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
    hops: list[str] = Field(max_length=MAX_HOPS)
    rows: list[RowHead] = Field(min_length=1, max_length=MAX_ROWS)
    wire: Literal["fp32", "bf16", "int8"]
    seconds: dict[str, float] = Field(default_factory=dict, max_length=MAX_HOPS)


class RowsHead(Strict):
    rows: list[RowHead] = Field(min_length=1, max_length=MAX_ROWS)


class ReleaseHead(Strict):
    requests: list[int] = Field(max_length=MAX_ROWS)


class FailureHead(Strict):
    """Requests whose step failed, and why; `hop` is a stage that could not be reached."""

    requests: list[int] = Field(max_length=MAX_ROWS)
    code: Literal["missing_prefix", "cache_full", "unreachable", "failed"]
    message: str = Field(max_length=1000)
    hop: str = ""


@dataclass(frozen=True)
class StepEnvelope:
    """A step on its way: `hops` are the stages still to come, `seconds` what each stage took."""

    activations: Activations
    router: str
    hops: tuple[str, ...]
    wire: str = "fp32"
    seconds: tuple[tuple[str, float], ...] = ()

    @property
    def route(self) -> tuple[str, tuple[str, ...], str]:
        """Steps with the same route can be computed together."""
        return self.router, self.hops, self.wire

    def carrying(self, activations: Activations) -> "StepEnvelope":
        """The same envelope around other activations."""
        return replace(self, activations=activations)

    def after(self, activations: Activations, stage: str, seconds: float) -> "StepEnvelope":
        """The envelope once a stage has computed its blocks."""
        return replace(self, activations=activations, seconds=(*self.seconds, (stage, seconds)))

    def next_hop(self) -> tuple[str, "StepEnvelope"]:
        return self.hops[0], replace(self, hops=self.hops[1:])


# In a HELLO: this side reads steps without a readout. Release 0.1 does not send it.
READS_BARE_STEPS = {"reads_bare_steps": True}


def takes_bare_steps(hello: Mapping[str, Any]) -> bool:
    """Whether a stage needs no readout of earlier blocks, as it uses the last one's alone."""
    return hello.get("readout") == "final" and READS_BARE_STEPS.items() <= hello.items()


def step_message(step: StepEnvelope, *, bare: bool = False) -> FrameMessage:
    """To the next stage; `bare` leaves the readout out."""
    activations = step.activations
    readout = () if bare else wire.pack(activations.readout_RV, step.wire)
    return _message(FrameKind.STEP, step, (*readout, *wire.pack(activations.state, step.wire)))


def result_message(step: StepEnvelope) -> FrameMessage:
    """To the router, with the readout alone."""
    return _message(FrameKind.RESULT, step, wire.pack(step.activations.readout_RV, step.wire))


def _message(kind: FrameKind, step: StepEnvelope, arrays: Sequence[np.ndarray]) -> FrameMessage:
    rows = step.activations.rows
    head = StepHead(
        router=step.router,
        hops=list(step.hops),
        rows=[_row_head(row) for row in rows],
        wire=step.wire,  # type: ignore[arg-type]
        seconds=dict(step.seconds),
    )
    return FrameMessage(kind, meta=head.model_dump(), arrays=(_ids(rows), *arrays))


def read_step(message: FrameMessage) -> StepEnvelope:
    head = _checked(StepHead, message.meta)
    count = wire.arrays_of(head.wire)
    ids, *packed = message.arrays or [np.zeros(0, np.uint16)]
    rows = _rows(head.rows, ids)
    expected = {count} if message.kind is FrameKind.RESULT else {count, 2 * count}
    if len(packed) not in expected:
        raise ProtocolError(f"a step has {len(packed)} arrays, expected {max(expected)}")
    shape = (sum(row.read for row in rows), BYTES)
    readout = np.zeros(shape, np.float32)
    if message.kind is FrameKind.RESULT or len(packed) == 2 * count:
        readout, packed = wire.unpack(packed[:count], head.wire), packed[count:]
    state = wire.unpack(packed, head.wire) if packed else readout[:, :0]
    if readout.shape != shape or state.ndim != 2:
        raise ProtocolError("a step's arrays do not match its rows")
    return StepEnvelope(
        Activations(rows, state, readout),
        head.router,
        tuple(head.hops),
        head.wire,
        tuple(head.seconds.items()),
    )


def prefill_message(rows: Sequence[Row]) -> FrameMessage:
    head = RowsHead(rows=[_row_head(row) for row in rows])
    return FrameMessage(FrameKind.PREFILL, meta=head.model_dump(), arrays=(_ids(rows),))


def read_prefill(message: FrameMessage) -> tuple[Row, ...]:
    head = _checked(RowsHead, message.meta)
    if len(message.arrays) != 1:
        raise ProtocolError("a prefill has one array, the ids")
    return _rows(head.rows, message.arrays[0])


def release_message(requests: Sequence[int]) -> FrameMessage:
    return FrameMessage(FrameKind.RELEASE, meta=ReleaseHead(requests=list(requests)).model_dump())


def read_release(message: FrameMessage) -> list[int]:
    return _checked(ReleaseHead, message.meta).requests


def failure_message(requests: Sequence[int], code: str, text: str, hop: str = "") -> FrameMessage:
    head = FailureHead(requests=list(requests), code=code, message=text[:1000], hop=hop)  # type: ignore[arg-type]
    return FrameMessage(FrameKind.ERROR, request=requests[0], meta=head.model_dump())


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
        raise ProtocolError("a message's ids do not match its rows")
    rows, at = [], 0
    for head in heads:
        if not head.length or head.read > head.length:
            raise ProtocolError("a row is empty, or reads more positions than it has")
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
