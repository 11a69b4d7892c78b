"""Answers of one HTTP request: admitted when there is a place, generated, sent whole or streamed.

Knows no request format and no stage.
"""

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from blocktrain.errors import BlocktrainError, OverloadedError, StalledError, UnavailableError
from blocktrain.serve.http.openai import CompletionRequest, api_error
from blocktrain.serve.http.replies import (
    Json,
    ResponseFormat,
    TextDelta,
    Transcript,
    cost_body,
    joined,
    usage_body,
)
from blocktrain.serve.router.decode import AnswerCost, GenerationRequest, Piece


class AdmissionQueue:
    def __init__(self, places: int, queue: int, queue_seconds: float) -> None:
        self.places = places
        self._free = places
        self._max_waiting = queue
        self._queue_seconds = queue_seconds
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._closed = asyncio.Event()

    @property
    def inside(self) -> int:
        return self.places - self._free

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        """Admit no further request, and wake what waits in `closing`."""
        self._closed.set()

    async def closing(self) -> NoReturn:
        """Wait until the queue is closed, then raise UnavailableError."""
        await self._closed.wait()
        raise UnavailableError("the server is stopping")

    @asynccontextmanager
    async def enter(self, places: int) -> AsyncIterator[None]:
        await self._take(places)
        try:
            yield
        finally:
            self._give_back(places)

    async def _take(self, places: int) -> None:
        if not self._waiting and places <= self._free:
            self._free -= places
            return
        if len(self._waiting) >= self._max_waiting:
            raise OverloadedError(
                f"the server is full: {self.inside} answers in progress, {self.waiting} waiting"
            )
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((places, turn))
        try:
            async with asyncio.timeout(self._queue_seconds):
                await turn
        except (asyncio.CancelledError, TimeoutError) as error:
            if turn.cancelled():
                self._waiting.remove((places, turn))
                self._admit()  # smaller requests behind this one may fit
            else:
                self._give_back(places)  # admitted in the same moment
            if isinstance(error, TimeoutError):
                raise OverloadedError(
                    f"the server is full: no answer ended within {self._queue_seconds:g} s"
                ) from None
            raise

    def _give_back(self, places: int) -> None:
        self._free += places
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            places, turn = self._waiting[0]
            if turn.cancelled():
                return  # its own task is about to remove it and to call this again
            self._waiting.popleft()
            self._free -= places
            turn.set_result(None)


SUMS = {
    "prompt_bytes": "Bytes of prompts read",
    "output_bytes": "Bytes of answers written",
    "traversals": "Traversals of the ring",
    "drafted": "Bytes drafted",
    "accepted": "Drafted bytes that were accepted",
    "replays": "Contexts sent again after a stage or its cache lost them",
}


class ServerMetrics:
    def __init__(self, queue: AdmissionQueue) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "blocktrain_serve_requests", "Requests answered", ["path", "status"], registry=registry
        )
        self._seconds = Histogram(
            "blocktrain_serve_request_seconds", "From a request's headers to the end of its"
            " answer", ["path"], registry=registry,
        )  # fmt: skip
        self._sums = {
            name: Counter(f"blocktrain_serve_{name}", text, registry=registry)
            for name, text in SUMS.items()
        }
        self._stages = Counter(
            "blocktrain_serve_stage_seconds", "Time spent in a stage", ["stage"], registry=registry
        )
        for name, text, value in (
            ("answering", "Answers in progress", lambda: queue.inside),
            ("waiting", "Requests that wait for a place", lambda: queue.waiting),
        ):
            Gauge(f"blocktrain_serve_{name}", text, registry=registry).set_function(value)

    def requested(self, path: str, status: int, seconds: float) -> None:
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def answered(self, costs: Sequence[AnswerCost]) -> None:
        for cost in costs:
            for name, total in self._sums.items():
                total.inc(getattr(cost, name))
            for stage, seconds in cost.stage_seconds.items():
                self._stages.labels(stage).inc(seconds)

    def page(self) -> tuple[bytes, str]:
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


OUTPUT_TOKENS = "output_tokens"  # in the request's scope, for the access log
STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

log = logging.getLogger(__name__)


class AnswerEngine(Protocol):
    """What the HTTP side needs of an engine; `router.engine.RingEngine` is one."""

    model: str

    def generate(self, request: GenerationRequest, cost: AnswerCost) -> AsyncGenerator[Piece, None]:
        """Final pieces in order, without the stop string; fills in `cost`. Closing the generator
        cancels the work. May raise OverloadedError, UnavailableError and ConfigError."""
        ...

    def status(self) -> dict[str, Any]:
        """For people and probes; `alive` says whether every block can be computed."""
        ...


class EventStream:
    """Server-sent events. The first one sends the headers; until then an error can be a status."""

    def __init__(self, send: Send, patience: float) -> None:
        self._send = send
        self._patience = patience
        self._turn = asyncio.Lock()
        self.started = False

    async def write(self, *events: dict[str, Any]) -> None:
        lines = [f"data: {json.dumps(event, separators=(',', ':'))}\n\n" for event in events]
        await self._body("".join(lines).encode(), more=True)

    async def end(self) -> None:
        await self._body(b"data: [DONE]\n\n", more=False)

    async def end_with(self, error: dict[str, Any]) -> None:
        """The last event is an error; no [DONE] follows."""
        await self.write(error)
        await self._body(b"", more=False)

    async def _body(self, data: bytes, *, more: bool) -> None:
        async with self._turn:
            if not self.started:
                self.started = True
                headers = [*STREAM_HEADERS]
                await self._put(type="http.response.start", status=200, headers=headers)
            await self._put(type="http.response.body", body=data, more_body=more)

    async def _put(self, **message: Any) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await self._send(message)
        except TimeoutError:
            raise StalledError(f"the client read nothing for {self._patience:g} s") from None


@dataclass
class Choice:
    """One of the answers to an HTTP request, while it is generated."""

    index: int
    request: GenerationRequest
    transcript: Transcript
    cost: AnswerCost = field(default_factory=AnswerCost)

    @property
    def reason(self) -> str:
        return self.cost.reason or "stop"


Emit = Callable[[Choice, TextDelta, bool], Awaitable[None]]  # True with a choice's last delta


class Answer(Response):
    """A response that is generated while it is sent; errors before its first byte are raised."""

    def __init__(
        self,
        engine: AnswerEngine,
        request: CompletionRequest,
        response_format: ResponseFormat,
        admission: AdmissionQueue,
        metrics: ServerMetrics,
        patience: float,
    ) -> None:
        self._engine, self._request, self._format = engine, request, response_format
        self._admission, self._metrics, self._patience = admission, metrics, patience
        self._choices = [
            Choice(index, generation, Transcript(log_probs=request.log_probs))
            for index, generation in enumerate(request.generations)
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._request.stream:
            work = self._stream(EventStream(send, self._patience), scope["request_id"])
        else:
            work = self._whole(scope, receive, send)
        try:
            await while_connected(receive, work)
        finally:
            scope[OUTPUT_TOKENS] = self._output_bytes
            self._metrics.answered([choice.cost for choice in self._choices])

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        deltas: list[list[TextDelta]] = [[] for _ in self._choices]

        async def keep(choice: Choice, delta: TextDelta, _: bool) -> None:
            deltas[choice.index].append(delta)

        await self._generate(keep)
        choices = [
            self._format.choice(choice.index, joined(deltas[choice.index]), choice.reason)
            for choice in self._choices
        ]
        cost = cost_body([choice.cost for choice in self._choices])
        body = self._format.whole(choices, usage=self._usage(), blocktrain=cost)
        await JSONResponse(body)(scope, receive, send)

    async def _stream(self, events: EventStream, request_id: str) -> None:
        try:
            await self._generate(_ChunkWriter(events, self._format, self._request).write)
            if self._request.include_usage:
                await events.write(self._format.chunk([], usage=self._usage()))
            await events.end()
        except StalledError as error:
            log.warning("%s: %s", request_id, error)
        except Exception as error:
            if not events.started:
                raise
            bug = None if isinstance(error, BlocktrainError) else error
            log.warning("%s broke off: %s", request_id, error, exc_info=bug)
            await self._end_with(events, error, request_id)

    async def _end_with(self, events: EventStream, error: Exception, request_id: str) -> None:
        try:
            await events.end_with(api_error(error).body)
        except StalledError as stalled:
            log.warning("%s: %s", request_id, stalled)

    async def _generate(self, emit: Emit) -> None:
        """All choices side by side; the first error ends them all, and so does a closing queue."""
        try:
            async with asyncio.TaskGroup() as until_closed:
                closing = until_closed.create_task(self._admission.closing())
                async with (
                    self._admission.enter(len(self._choices)),
                    asyncio.TaskGroup() as answers,  # ends before the places are given back
                ):
                    for choice in self._choices:
                        answers.create_task(self._generate_one(choice, emit))
                closing.cancel()
        except BaseExceptionGroup as failed:
            raise _first_of(failed) from None

    async def _generate_one(self, choice: Choice, emit: Emit) -> None:
        async with aclosing(self._engine.generate(choice.request, choice.cost)) as pieces:
            async for piece in pieces:
                await emit(choice, choice.transcript.take(piece), False)
        await emit(choice, choice.transcript.rest(), True)

    @property
    def _output_bytes(self) -> int:
        return sum(choice.transcript.bytes for choice in self._choices)

    def _usage(self) -> Json:
        return usage_body(self._request.prompt_bytes, self._output_bytes)


@dataclass
class _ChunkWriter:
    """Deltas as OpenAI's chunks: an opening, the text, and an end with what it cost."""

    events: EventStream
    format: ResponseFormat
    request: CompletionRequest
    opened: set[int] = field(default_factory=set)

    async def write(self, choice: Choice, delta: TextDelta, last: bool) -> None:
        index = choice.index
        chunks = []
        opening = None if index in self.opened else self.format.opening(index)
        if opening:
            self.opened.add(index)
            chunks.append(self._chunk(opening))
        if last:
            ending = self.format.delta(index, delta, choice.reason)
            chunks.append(self._chunk(ending, blocktrain=cost_body([choice.cost])))
        elif delta.text or delta.tokens:
            chunks.append(self._chunk(self.format.delta(index, delta)))
        if chunks:
            await self.events.write(*chunks)

    def _chunk(self, choice: Json, **more: Json) -> Json:
        no_usage: dict[str, Json | None] = {"usage": None} if self.request.include_usage else {}
        return self.format.chunk([choice], **no_usage, **more)


def _first_of(error: BaseException) -> BaseException:
    return _first_of(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run until the work ends or the client leaves. The request's body must have been read."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait({working, leaving})
    if not working.cancelled():
        working.result()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
