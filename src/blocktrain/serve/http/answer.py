"""Answers one HTTP request: waits for admission, generates, and sends the answer whole or streamed.

Knows no request format.
"""

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NoReturn

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from blocktrain.errors import BlocktrainError, StalledError
from blocktrain.serve.http.admission import AdmissionQueue, QueuedRequest
from blocktrain.serve.http.metrics import REPORT, ServerMetrics
from blocktrain.serve.http.openai import CompletionRequest, api_error
from blocktrain.serve.http.replies import (
    Json,
    ResponseFormat,
    TextDelta,
    Transcript,
    cost_body,
    usage_body,
)
from blocktrain.serve.router.decode import AnswerCost, GenerationRequest
from blocktrain.serve.router.engine import RingEngine

TRUNCATED = "x-truncated-prompt-tokens"
STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

log = logging.getLogger(__name__)


class EventStream:
    """Server-sent events. The first event sends the headers; until then an error can set the
    status."""

    def __init__(
        self, send: Send, patience: float, headers: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._send = send
        self._patience = patience
        self._headers = [(name.encode(), text.encode()) for name, text in headers.items()]
        self._turn = asyncio.Lock()
        self.started = False

    async def write(self, *events: Json) -> None:
        await self._body(b"".join(map(_event, events)), more=True)

    async def end(self, error: Json | None = None) -> None:
        """End the stream with [DONE], or with an error as the last event."""
        await self._body(_event(error) if error else b"data: [DONE]\n\n", more=False)

    async def _body(self, data: bytes, *, more: bool) -> None:
        messages: list[Json] = [{"type": "http.response.body", "body": data, "more_body": more}]
        async with self._turn:
            if not self.started:
                self.started = True
                headers = [*STREAM_HEADERS, *self._headers]
                start = {"type": "http.response.start", "status": 200, "headers": headers}
                messages.insert(0, start)
            try:
                async with asyncio.timeout(self._patience):
                    for message in messages:
                        await self._send(message)
            except TimeoutError:
                raise StalledError(f"the client read nothing for {self._patience:g} s") from None


def _event(content: Json) -> bytes:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n".encode()


@dataclass
class AnswerChoice:
    """One of the answers to an HTTP request, and its progress."""

    index: int
    request: GenerationRequest
    transcript: Transcript
    cost: AnswerCost = field(default_factory=AnswerCost)
    deltas: list[TextDelta] = field(default_factory=list)  # empty if the answer is streamed
    opened: bool = False  # the first chunk has been written


@dataclass(eq=False)
class Answer(Response):
    """A response that is generated while it is sent. Errors before the first byte are raised."""

    engine: RingEngine
    request: CompletionRequest
    format: ResponseFormat
    admission: AdmissionQueue
    reports: ServerMetrics
    patience: float

    def __post_init__(self) -> None:
        self._events: EventStream | None = None  # until a stream begins
        self._queued: QueuedRequest | None = None  # until it has a place
        self._began_at, self._first_token_at = time.monotonic(), 0.0
        self._choices = [
            AnswerChoice(index, generation, Transcript(log_probs=self.request.log_probs))
            for index, generation in enumerate(self.request.generations)
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self.request.stream:
                self._events = EventStream(send, self.patience, self._truncation)
                await self._stream(self._events, receive, scope["request_id"])
            else:
                await self._whole(scope, receive, send)
        except ClientDisconnect:
            pass  # visible in the access log
        finally:
            scope[REPORT] = self._report()
            self.reports.answered([choice.cost for choice in self._choices])

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._generate(receive)
        choices = [
            self.format.choice(choice.index, TextDelta.joined(choice.deltas), choice.cost.reason)
            for choice in self._choices
        ]
        cost = cost_body([choice.cost for choice in self._choices])
        body = self.format.whole(choices, usage=self._usage(), blocktrain=cost)
        await JSONResponse(body, headers=self._truncation)(scope, receive, send)

    async def _stream(self, events: EventStream, receive: Receive, request_id: str) -> None:
        try:
            try:
                await self._generate(receive)
                if self.request.include_usage:
                    await events.write(self.format.chunk([], usage=self._usage()))
                await events.end()
            except Exception as error:
                if not events.started or isinstance(error, StalledError | ClientDisconnect):
                    raise
                bug = None if isinstance(error, BlocktrainError) else error
                log.warning("%s failed: %s", request_id, error, exc_info=bug)
                await events.end(api_error(error).body)
        except StalledError as error:
            log.warning("%s: %s", request_id, error)

    async def _generate(self, receive: Receive) -> None:
        """Generate all choices concurrently. The first error ends them all, as does a closing queue
        or a client that disconnects."""
        try:
            async with asyncio.TaskGroup() as watchers:
                watching = [
                    watchers.create_task(self.admission.closing()),
                    watchers.create_task(_disconnect(receive)),
                ]
                async with (
                    self.admission.enter(len(self._choices), self.request.tenant) as self._queued,
                    asyncio.TaskGroup() as answers,  # ends before the places are released
                ):
                    self.reports.admitted(self._queued.seconds)
                    for choice in self._choices:
                        answers.create_task(self._generate_one(choice))
                for task in watching:
                    task.cancel()
        except BaseExceptionGroup as failed:
            raise _first_error(failed) from None

    async def _generate_one(self, choice: AnswerChoice) -> None:
        async with aclosing(self.engine.generate(choice.request, choice.cost)) as pieces:
            async for piece in pieces:
                self._first_token_at = self._first_token_at or time.monotonic()
                self.reports.wrote(len(piece))
                await self._take(choice, choice.transcript.take(piece))
        await self._take(choice, choice.transcript.rest(), last=True)

    async def _take(self, choice: AnswerChoice, delta: TextDelta, *, last: bool = False) -> None:
        if self._events is None:
            choice.deltas.append(delta)
        elif chunks := self._chunks(choice, delta, last=last):
            await self._events.write(*chunks)

    def _chunks(self, choice: AnswerChoice, delta: TextDelta, *, last: bool) -> list[Json]:
        """OpenAI's chunks: an opening, the text, and an end with the answer's cost."""
        index, chunks = choice.index, []
        if not choice.opened and (opening := self.format.opening(index)):
            chunks.append(self._chunk(opening))
        choice.opened = True
        if last:
            ending = self.format.delta(index, delta, choice.cost.reason)
            chunks.append(self._chunk(ending, blocktrain=cost_body([choice.cost])))
        elif delta.text or delta.tokens:
            chunks.append(self._chunk(self.format.delta(index, delta)))
        return chunks

    def _chunk(self, choice: Json, **more: Json) -> Json:
        no_usage = {"usage": None} if self.request.include_usage else {}
        return self.format.chunk([choice], **no_usage, **more)

    def _report(self) -> Json:
        """This request's part of its line in the request log."""
        first = self._first_token_at
        generation = self.request.generations[0]
        return {
            "mode": generation.mode,
            "answers": len(self._choices),
            "first_token_seconds": round(first - self._began_at, 6) if first else None,
            "queue_seconds": round(self._queued.seconds, 6) if self._queued else None,
            "queue_length": self._queued.ahead if self._queued else None,
            **self._usage(),
            **cost_body([choice.cost for choice in self._choices]),
            "finish_reasons": [choice.cost.reason for choice in self._choices],
        }

    @property
    def _output_tokens(self) -> int:
        return sum(choice.cost.output_tokens for choice in self._choices)

    @property
    def _truncation(self) -> dict[str, str]:
        """A header if the model does not read all of the prompt."""
        count = self.request.truncated_tokens
        return {TRUNCATED: str(count)} if count else {}

    def _usage(self) -> Json:
        request = self.request
        firsts = {id(choice.request.prompt): choice for choice in reversed(self._choices)}
        cached = sum(choice.cost.cached_tokens for choice in firsts.values())
        return usage_body(
            request.prompt_tokens, self._output_tokens, request.truncated_tokens, cached
        )


def _first_error(error: BaseException) -> BaseException:
    return _first_error(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


async def _disconnect(receive: Receive) -> NoReturn:
    """Wait until the client disconnects. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect
