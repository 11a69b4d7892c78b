"""Which stages a request goes through: a pure function of who is there.

Knows nothing of connections. The router holds block 0; a route covers all blocks after it, in
order, each stage with the blocks it holds.
"""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from blocktrain.errors import BlocktrainError, ProtocolError, UnreachableError
from blocktrain.protocol.framing import FrameMessage, Kind
from blocktrain.serve.ring.connection import Dial, RingConnection
from blocktrain.serve.ring.envelope import (
    FailureHead,
    StepEnvelope,
    prefill_message,
    read_failure,
    read_step,
    release_message,
    step_message,
)
from blocktrain.serve.stage.batch import Row

Edge = tuple[str, str]


@dataclass(frozen=True)
class StagePlace:
    """A stage that answers: where it is, what it holds, how much it has to do."""

    address: str
    first: int
    stop: int  # the block after its last
    load: int = 0


Route = tuple[str, ...]


def choose(
    places: Sequence[StagePlace], blocks: int, broken: Collection[Edge] = ()
) -> Route | None:
    """The route whose busiest stage has least to do; of those the shortest. None: blocks are
    missing. `broken` are pairs of stages that do not reach each other."""
    found = _ways(places, 1, blocks, frozenset(broken))
    best = min(found, key=_burden, default=None)
    return None if best is None else tuple(place.address for place in best)


def missing(places: Sequence[StagePlace], blocks: int) -> list[int]:
    """The blocks that no stage holds."""
    held = {block for place in places for block in range(place.first, place.stop)}
    return [block for block in range(1, blocks) if block not in held]


def _burden(way: Sequence[StagePlace]) -> tuple[int, int, list[str]]:
    return max((place.load for place in way), default=0), len(way), [p.address for p in way]


def _ways(
    places: Sequence[StagePlace], block: int, blocks: int, broken: frozenset[Edge], before: str = ""
) -> list[list[StagePlace]]:
    """The best way on through each stage that holds the next block."""
    if block >= blocks:
        return [[]]
    result = []
    for place in places:
        if place.first != block or (before, place.address) in broken:
            continue
        onward = _ways(places, place.stop, blocks, broken, place.address)
        if onward:
            result.append([place, *min(onward, key=_burden)])
    return result


FIRST_REDIAL_SECONDS, LONGEST_REDIAL_SECONDS = 0.1, 2.0
BROKEN_SECONDS = 10.0  # how long two stages that did not reach each other are kept apart

log = logging.getLogger(__name__)


class Listener(Protocol):
    """Who is told what comes back."""

    def arrived(self, step: StepEnvelope) -> None: ...

    def failed(self, address: str, failure: FailureHead) -> None: ...

    def lost(self, address: str) -> None: ...

    def joined(self) -> None: ...


class Pipeline:
    def __init__(
        self,
        addresses: Sequence[str],
        blocks: int,
        dial: Dial,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._addresses = addresses
        self._blocks = blocks
        self._dial = dial
        self._clock = clock
        self._stages: dict[str, RingConnection] = {}
        self._places: dict[str, StagePlace] = {}
        self._load: Counter[str] = Counter()
        self._broken: dict[Edge, float] = {}
        self._why: dict[str, str] = {}  # per address that is not there, the last error

    async def run(self, listener: Listener) -> None:
        """Hold a connection to every stage, for as long as the router lives."""
        async with asyncio.TaskGroup() as keepers:
            for address in dict.fromkeys(self._addresses):
                keepers.create_task(self._keep(address, listener))

    @property
    def places(self) -> list[StagePlace]:
        """The stages that are there, with the requests that go through each."""
        return [replace(place, load=self._load[place.address]) for place in self._places.values()]

    @property
    def missing(self) -> str:
        """What stands in the way of a route, in words; empty when nothing does."""
        blocks = missing(self.places, self._blocks)
        if blocks:
            gone = "; ".join(_named(address, why) for address, why in self._why.items())
            return f"no stage holds block {', '.join(map(str, blocks))}" + (gone and f" ({gone})")
        return "" if self.route() is not None else "the stages do not reach each other"

    def route(self) -> Route | None:
        now = self._clock()
        self._broken = {edge: until for edge, until in self._broken.items() if until > now}
        return choose(self.places, self._blocks, self._broken)

    def enter(self, route: Route) -> None:
        """A request goes this way from now on."""
        self._load.update(route)

    def leave(self, route: Route) -> None:
        self._load.subtract(route)

    def keep_apart(self, edge: Edge) -> None:
        self._broken[edge] = self._clock() + BROKEN_SECONDS

    async def prefill(self, rows: Sequence[Row], route: Route) -> None:
        """To every stage at once: each reads the raw context by itself."""
        message = prefill_message(rows)
        await asyncio.gather(*(self._stage(address).send(message) for address in route))

    async def send(self, step: StepEnvelope, route: Route) -> None:
        await self._stage(route[0]).send(step_message(step))

    async def release(self, requests: Sequence[int], route: Route) -> None:
        message = release_message(requests)
        for address in route:
            if address in self._stages:
                await self._stages[address].send(message)

    def _stage(self, address: str) -> RingConnection:
        try:
            return self._stages[address]
        except KeyError:
            raise UnreachableError(f"{address} is gone") from None

    async def _keep(self, address: str, listener: Listener) -> None:
        pause = FIRST_REDIAL_SECONDS
        while True:
            try:
                connection = await self._dial(address)
            except BlocktrainError as error:
                if self._why.get(address) != str(error):
                    log.warning("stage %s", _named(address, str(error)))
                self._why[address] = str(error)
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, LONGEST_REDIAL_SECONDS)
                continue
            pause = FIRST_REDIAL_SECONDS
            self._why.pop(address, None)
            await self._attend(connection, address, listener)

    async def _attend(self, connection: RingConnection, dialled: str, listener: Listener) -> None:
        """One connection's life, from hello to its end."""
        held = connection.hello["blocks"]
        address = connection.hello.get("address") or dialled
        if address in self._stages:
            self._why[dialled] = f"another stage says that it is at {address}"
            connection.close()
            await asyncio.sleep(LONGEST_REDIAL_SECONDS)
            return
        self._stages[address] = connection
        self._places[address] = StagePlace(address, held[0], held[-1] + 1)
        log.info("stage %s is there, blocks %s", address, ", ".join(map(str, held)))
        listener.joined()
        try:
            await self._introduce()
            while True:
                self._deliver(address, await connection.receive(), listener)
        except BlocktrainError as error:
            self._why[dialled] = str(error)
            log.warning("stage %s is gone: %s", address, error)
        finally:
            del self._stages[address], self._places[address]
            connection.close()
            listener.lost(address)

    async def _introduce(self) -> None:
        """Stages that follow each other connect before the first step needs them to."""
        for place in self.places:
            for following in self.places:
                if following.first == place.stop:
                    meta = {"address": following.address}
                    with suppress(BlocktrainError):  # its own listener notices who is gone
                        await self._stage(place.address).send(FrameMessage(Kind.DIAL, meta=meta))

    def _deliver(self, address: str, message: FrameMessage, listener: Listener) -> None:
        if message.kind is Kind.RESULT:
            listener.arrived(read_step(message))
        elif message.kind is Kind.ERROR:
            listener.failed(address, read_failure(message))
        else:
            raise ProtocolError(f"a stage sent {message.kind.name}")


def _named(address: str, why: str) -> str:
    """An error with its address, once."""
    return why if why.startswith(address) else f"{address}: {why}"
