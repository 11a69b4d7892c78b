"""The router's connections to its stages, and the route a request takes through them.

The router has block 0; a route covers all blocks after it in order, each stage with the blocks it
has.
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
from blocktrain.protocol.framing import FrameKind, FrameMessage
from blocktrain.serve.ring.connection import Dial, RingConnection
from blocktrain.serve.ring.envelope import (
    FailureHead,
    StepEnvelope,
    prefill_message,
    read_failure,
    read_step,
    release_message,
    step_message,
    takes_bare_steps,
)
from blocktrain.serve.stage.batch import Row

Edge = tuple[str, str]


@dataclass(frozen=True)
class StageInfo:
    """A connected stage: its address, its blocks, and how many requests it works for."""

    address: str
    first: int
    stop: int  # the block after its last
    load: int = 0


Route = tuple[str, ...]


def choose_route(
    stages: Sequence[StageInfo], blocks: int, broken: Collection[Edge] = ()
) -> Route | None:
    """The route whose busiest stage has the least load; of equals the shortest. None: there is no
    route. `broken` are pairs of stages that cannot reach each other."""
    routes = _routes(stages, 1, blocks, frozenset(broken))
    best = min(routes, key=_burden, default=None)
    return None if best is None else tuple(stage.address for stage in best)


def missing_blocks(stages: Sequence[StageInfo], blocks: int) -> list[int]:
    """The blocks that no stage has."""
    served = {block for stage in stages for block in range(stage.first, stage.stop)}
    return [block for block in range(1, blocks) if block not in served]


def _burden(route: Sequence[StageInfo]) -> tuple[int, int, list[str]]:
    load = max((stage.load for stage in route), default=0)
    return load, len(route), [stage.address for stage in route]


def _routes(
    stages: Sequence[StageInfo], block: int, blocks: int, broken: frozenset[Edge], before: str = ""
) -> list[list[StageInfo]]:
    """The best route through each stage that begins with this block."""
    if block >= blocks:
        return [[]]
    result = []
    for stage in stages:
        if stage.first != block or (before, stage.address) in broken:
            continue
        onward = _routes(stages, stage.stop, blocks, broken, stage.address)
        if onward:
            result.append([stage, *min(onward, key=_burden)])
    return result


FIRST_REDIAL_SECONDS, LONGEST_REDIAL_SECONDS = 0.1, 2.0
BROKEN_SECONDS = 10.0  # how long a pair of stages that could not connect is avoided

log = logging.getLogger(__name__)


class PipelineListener(Protocol):
    """What the pipeline reports to: the engine."""

    def arrived(self, step: StepEnvelope) -> None: ...

    def failed(self, address: str, failure: FailureHead) -> None: ...

    def lost(self, address: str) -> None: ...

    def joined(self) -> None: ...


class Pipeline:
    """Connections to all stages, kept up until cancelled."""

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
        self._connections: dict[str, RingConnection] = {}
        self._stages: dict[str, StageInfo] = {}
        self._load: Counter[str] = Counter()
        self._broken: dict[Edge, float] = {}
        self._errors: dict[str, str] = {}  # of each address without a stage, the last one

    async def run(self, listener: PipelineListener) -> None:
        """Keep a connection to every stage until cancelled."""
        async with asyncio.TaskGroup() as keepers:
            for address in dict.fromkeys(self._addresses):
                keepers.create_task(self._keep(address, listener))

    @property
    def stages(self) -> list[StageInfo]:
        """The connected stages, with the number of requests that go through each."""
        return [replace(stage, load=self._load[stage.address]) for stage in self._stages.values()]

    @property
    def missing(self) -> str:
        """Why there is no route, in words; empty if there is one."""
        blocks = missing_blocks(self.stages, self._blocks)
        if blocks:
            errors = "; ".join(_named(address, error) for address, error in self._errors.items())
            listed = ", ".join(map(str, blocks))
            return f"no stage has block {listed}" + (errors and f" ({errors})")
        return "" if self.route() is not None else "the stages cannot reach each other"

    def route(self) -> Route | None:
        now = self._clock()
        self._broken = {edge: until for edge, until in self._broken.items() if until > now}
        return choose_route(self.stages, self._blocks, self._broken)

    def enter(self, route: Route) -> None:
        """Count a request that takes this route."""
        self._load.update(route)

    def leave(self, route: Route) -> None:
        self._load.subtract(route)

    def avoid(self, edge: Edge) -> None:
        """Use no route over this pair of stages for a while."""
        self._broken[edge] = self._clock() + BROKEN_SECONDS

    async def prefill(self, rows: Sequence[Row], route: Route) -> None:
        """To all stages of the route at once."""
        message = prefill_message(rows)
        await asyncio.gather(*(self._connection(address).send(message) for address in route))

    async def send(self, step: StepEnvelope, route: Route) -> None:
        connection = self._connection(route[0])
        await connection.send(step_message(step, bare=takes_bare_steps(connection.hello)))

    async def release(self, requests: Sequence[int], route: Route) -> None:
        message = release_message(requests)
        for address in route:
            if address in self._connections:
                await self._connections[address].send(message)

    def _connection(self, address: str) -> RingConnection:
        try:
            return self._connections[address]
        except KeyError:
            raise UnreachableError(f"the stage at {address} is gone") from None

    async def _keep(self, address: str, listener: PipelineListener) -> None:
        pause = FIRST_REDIAL_SECONDS
        while True:
            try:
                connection = await self._dial(address)
            except BlocktrainError as error:
                if self._errors.get(address) != str(error):
                    log.warning("stage %s", _named(address, str(error)))
                self._errors[address] = str(error)
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, LONGEST_REDIAL_SECONDS)
                continue
            pause = FIRST_REDIAL_SECONDS
            self._errors.pop(address, None)
            await self._serve(connection, address, listener)

    async def _serve(
        self, connection: RingConnection, dialled: str, listener: PipelineListener
    ) -> None:
        """Use one connection until it ends."""
        blocks = connection.hello["blocks"]
        address = connection.hello.get("address") or dialled
        if address in self._connections:
            self._errors[dialled] = f"another stage announces the address {address}"
            connection.close()
            await asyncio.sleep(LONGEST_REDIAL_SECONDS)
            return
        self._connections[address] = connection
        self._stages[address] = StageInfo(address, blocks[0], blocks[-1] + 1)
        log.info("stage %s connected, blocks %s", address, ", ".join(map(str, blocks)))
        listener.joined()
        try:
            await self._introduce()
            while True:
                self._deliver(address, await connection.receive(), listener)
        except BlocktrainError as error:
            self._errors[dialled] = str(error)
            log.warning("stage %s is gone: %s", address, error)
        finally:
            del self._connections[address], self._stages[address]
            connection.close()
            listener.lost(address)

    async def _introduce(self) -> None:
        """Let stages connect to their successors before the first step needs it."""
        for stage in self.stages:
            for successor in self.stages:
                if successor.first == stage.stop:
                    message = FrameMessage(FrameKind.DIAL, meta={"address": successor.address})
                    with suppress(BlocktrainError):  # a lost stage is noticed by its own task
                        await self._connection(stage.address).send(message)

    def _deliver(self, address: str, message: FrameMessage, listener: PipelineListener) -> None:
        if message.kind is FrameKind.RESULT:
            listener.arrived(read_step(message))
        elif message.kind is FrameKind.ERROR:
            listener.failed(address, read_failure(message))
        else:
            raise ProtocolError(f"a stage may not send {message.kind.name}")


def _named(address: str, error: str) -> str:
    """An error with its address, unless it begins with it."""
    return error if error.startswith(address) else f"{address}: {error}"
