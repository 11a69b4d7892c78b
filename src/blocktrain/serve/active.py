"""One request on its way through an engine: where it is, and what it waits for."""

import asyncio
from dataclasses import dataclass, field

import numpy as np

from blocktrain.errors import BlocktrainError
from blocktrain.serve.decode import Decoding, Step
from blocktrain.serve.request import Account, Piece
from blocktrain.serve.routing import Route
from blocktrain.serve.work import Row

MOST_UNREAD = 32  # pieces a client may leave unread before its request rests


@dataclass(eq=False)
class Active:
    decoding: Decoding
    pieces: "asyncio.Queue[Piece | BlocktrainError]" = field(default_factory=asyncio.Queue)
    key: int = 0  # names its context in every cache; a fresh context gets a new one
    route: Route | None = None
    row: Row | None = None  # as it went out
    answer: np.ndarray | None = None
    flying: bool = False
    started: float = 0.0
    until: float | None = None  # when a flight, or the wait for a route, has lasted too long
    replays: int = 0
    lost: bool = False  # a cache that held its context is gone
    failure: bool = False
    gone: bool = False

    @property
    def account(self) -> Account:
        return self.decoding.account

    @property
    def complete(self) -> bool:
        """Nothing more will come but what is in the queue already."""
        return (self.decoding.finished or self.failure) and self.pieces.empty()

    @property
    def ready(self) -> bool:
        rests = self.pieces.qsize() >= MOST_UNREAD
        return not (self.flying or rests or self.failure or self.gone or self.decoding.finished)

    def fly(self, row: Row, now: float, seconds: float) -> None:
        self.row, self.flying, self.started, self.until = row, True, now, now + seconds

    def land(self, answer: np.ndarray) -> None:
        self.flying, self.until, self.answer = False, None, answer

    def waits_until(self, moment: float) -> None:
        if self.until is None:
            self.until = moment

    def start_over(self) -> None:
        """From its text, with the next step; an answer that is here already still counts."""
        self.flying, self.until, self.lost = False, None, True

    def next_step(self) -> Step:
        step = self.decoding.replay() if self.lost else self.decoding.step()
        assert step is not None  # it is not finished, or it would not be ready
        self.lost = False
        return step

    def fail(self, error: BlocktrainError) -> None:
        self.flying, self.until, self.failure = False, None, True
        self.pieces.put_nowait(error)
