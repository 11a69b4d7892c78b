"""Server-sent events to one client, who may be slow: each waits until the one before is on its way.

A client that takes nothing for `patience` seconds is given up: StalledError.
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
from blocktrain.serve.http.replies import Fragment, Json, Reply, Transcript, cost, joined, usage
from blocktrain.serve.router.decode import Account, Piece, Request

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class EventStream:
    """Begun by the first event, so that until then an error can still be a status."""

    def __init__(self, send: Send, patience: float) -> None:
        self._send = send
        self._patience = patience
        self._turn = asyncio.Lock()
        self.started = False

    async def tell(self, *events: dict[str, Any]) -> None:
        lines = [f"data: {json.dumps(event, separators=(',', ':'))}\n\n" for event in events]
        async with self._turn:
            await self._begin()
            await self._put({"type": "http.response.body", "body": "".join(lines).encode(),
                             "more_body": True})  # fmt: skip

    async def end(self) -> None:
        async with self._turn:
            await self._begin()
            await self._put({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def break_off(self, error: dict[str, Any]) -> None:
        """The last event is an error; no [DONE] follows."""
        await self.tell(error)
        await self._put({"type": "http.response.body", "body": b""})

    async def _begin(self) -> None:
        if not self.started:
            self.started = True
            await self._put({"type": "http.response.start", "status": 200, "headers": [*HEADERS]})

    async def _put(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await self._send(message)
        except TimeoutError:
            raise StalledError(f"nothing was read for {self._patience:g} s") from None


log = logging.getLogger(__name__)


class AnswerEngine(Protocol):
    """What answers. `generate` gives pieces in order, without the stop string, and keeps the
    account; it is cancelled by closing it, or while it is waited for. It may raise
    OverloadedError, UnavailableError and ConfigError."""

    model: str

    def generate(self, request: Request, account: Account) -> AsyncGenerator[Piece, None]: ...

    def status(self) -> dict[str, Any]:
        """For people and probes; `alive` says whether every block can be computed."""


@dataclass
class Choice:
    """One answer while it is made."""

    index: int
    request: Request
    transcript: Transcript
    account: Account = field(default_factory=Account)

    @property
    def reason(self) -> str:
        return self.account.reason or "stop"


Emit = Callable[[Choice, Fragment, bool], Awaitable[None]]  # the last one with True


class Answer(Response):
    """A response that is made while it is sent; errors before its first byte are exceptions."""

    def __init__(
        self,
        engine: AnswerEngine,
        ask: CompletionRequest,
        reply: Reply,
        gate: AdmissionQueue,
        metrics: ServerMetrics,
        patience: float,
    ) -> None:
        self._engine, self._ask, self._reply = engine, ask, reply
        self._gate, self._metrics, self._patience = gate, metrics, patience
        self._choices = [
            Choice(index, request, Transcript(log_probs=ask.log_probs))
            for index, request in enumerate(ask.requests)
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._ask.stream:
            answering = self._stream(send, scope["request_id"])
        else:
            answering = self._whole(scope, receive, send)
        try:
            await while_connected(receive, answering)
        finally:
            self._metrics.answered([choice.account for choice in self._choices])

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        said: list[list[Fragment]] = [[] for _ in self._choices]

        async def keep(choice: Choice, fragment: Fragment, _: bool) -> None:
            said[choice.index].append(fragment)

        await self._generate(keep)
        dialect = self._reply.dialect
        choices = [
            dialect.choice(choice.index, joined(said[choice.index]), choice.reason)
            for choice in self._choices
        ]
        accounts = [choice.account for choice in self._choices]
        body = self._reply.whole(choices, self._usage(), cost(accounts))
        await JSONResponse(body)(scope, receive, send)

    async def _stream(self, send: Send, name: str) -> None:
        try:
            await self._tell(EventStream(send, self._patience), name)
        except StalledError as error:
            log.warning("%s: %s", name, error)

    async def _tell(self, events: EventStream, name: str) -> None:
        try:
            await self._generate(_ChoiceStream(events, self._reply, self._ask).tell)
            if self._ask.include_usage:
                await events.tell(self._reply.part([], usage=self._usage()))
            await events.end()
        except Exception as error:
            if not events.started or isinstance(error, StalledError):
                raise
            log.warning("%s broke off: %s", name, error, exc_info=_unforeseen(error))
            await events.break_off(api_error(error).body)

    async def _generate(self, emit: Emit) -> None:
        """All choices side by side; the first error ends them all, and so does a closing gate."""
        try:
            async with asyncio.TaskGroup() as open_hours:
                closing = open_hours.create_task(self._gate.closing())
                async with (
                    self._gate.enter(len(self._choices)),
                    asyncio.TaskGroup() as answers,  # all gone before their places are free
                ):
                    for choice in self._choices:
                        answers.create_task(self._generate_one(choice, emit))
                closing.cancel()
        except BaseExceptionGroup as failed:
            raise _first_of(failed) from None

    async def _generate_one(self, choice: Choice, emit: Emit) -> None:
        async with aclosing(self._engine.generate(choice.request, choice.account)) as pieces:
            async for piece in pieces:
                await emit(choice, choice.transcript.take(piece), False)
        await emit(choice, choice.transcript.rest(), True)

    def _usage(self) -> Json:
        written = sum(choice.transcript.bytes for choice in self._choices)
        return usage(self._ask.prompt_bytes, written)


@dataclass
class _ChoiceStream:
    """Fragments as OpenAI's chunks: an opening, the text, an end with what it cost."""

    events: EventStream
    reply: Reply
    ask: CompletionRequest
    opened: set[int] = field(default_factory=set)

    async def tell(self, choice: Choice, said: Fragment, last: bool) -> None:
        dialect, index = self.reply.dialect, choice.index
        chunks = []
        opening = None if index in self.opened else dialect.opening(index)
        if opening:
            self.opened.add(index)
            chunks.append(self._part(opening))
        if last:
            ending = dialect.delta(index, said, choice.reason)
            chunks.append(self._part(ending, blocktrain=cost([choice.account])))
        elif said.text or said.tokens:
            chunks.append(self._part(dialect.delta(index, said)))
        if chunks:
            await self.events.tell(*chunks)

    def _part(self, choice: Json, **more: Json) -> Json:
        unknown: dict[str, Json | None] = {"usage": None} if self.ask.include_usage else {}
        return self.reply.part([choice], **unknown, **more)


def _unforeseen(error: Exception) -> Exception | None:
    """Of a bug the log has the whole story."""
    return None if isinstance(error, BlocktrainError) else error


def _first_of(error: BaseException) -> BaseException:
    return _first_of(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do it to its end, or until the client leaves. The body must have been read."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_departure(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait({working, leaving})
    if not working.cancelled():
        working.result()


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
