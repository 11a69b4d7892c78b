"""One HTTP answer while it is generated: several choices side by side, whole or as an event stream.

A client may be slow: every event waits until the one before it is sent, and a client that reads
nothing for `patience` seconds is given up (StalledError). A client that leaves cancels the work.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from blocktrain.errors import BlocktrainError, StalledError
from blocktrain.serve.http.admission import AdmissionQueue, ServerMetrics
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
