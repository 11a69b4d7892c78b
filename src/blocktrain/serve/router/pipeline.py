"""The router's connections to its stages, and the routes of requests through them.

The router has block 0. A route is a sequence of stages that together have all later blocks.
"""

import asyncio
import logging
import random
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise, product
from types import MappingProxyType
from typing import Protocol

from blocktrain.config import Config
from blocktrain.errors import BlocktrainError, ProtocolError, UnreachableError
from blocktrain.protocol.framing import FrameKind, FrameMessage
from blocktrain.serve.ring.activations import Row
from blocktrain.serve.ring.connection import Dial, RingConnection
from blocktrain.serve.ring.envelope import (
    FailureHead,
    StepEnvelope,
    StepResult,
    prefill_message,
    read_failure,
    read_result,
    release_message,
    step_message,
)

Edge = tuple[str, str]
NO_WORK: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class StageInfo:
    """A connected stage: its address, its blocks, and how much work it has."""

    address: str
    first: int
    stop: int  # one after its last block
    load: float = 0


Route = tuple[str, ...]


def choose_route(
    stages: Sequence[StageInfo], blocks: int, broken: Collection[Edge] = ()
) -> Route | None:
    """The route whose busiest stage has the least load; among equals the shortest. None if there is
    no route. `broken`: pairs of stages that cannot reach each other."""
    routes = _routes(stages, 1, blocks, broken)
    best = min(routes, key=_burden, default=None)
    return None if best is None else tuple(stage.address for stage in best)


def missing_blocks(stages: Sequence[StageInfo], blocks: int) -> list[int]:
    """Blocks that no stage has."""
    served = {block for stage in stages for block in range(stage.first, stage.stop)}
    return [block for block in range(1, blocks) if block not in served]


def _burden(route: Sequence[StageInfo]) -> tuple[float, int, list[str]]:
    load = max((stage.load for stage in route), default=0)
    return load, len(route), [stage.address for stage in route]


def _routes(
    stages: Sequence[StageInfo], block: int, blocks: int, broken: Collection[Edge], before: str = ""
) -> list[list[StageInfo]]:
    """The best route through each stage that starts with this block."""
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
BROKEN_SECONDS = 10.0  # how long to avoid a pair of stages that could not connect

log = logging.getLogger(__name__)


class PipelineListener(Protocol):
    """The receiver of the pipeline's events: the engine."""

    def arrived(self, result: StepResult) -> None: ...

    def failed(self, address: str, failure: FailureHead) -> None: ...

    def lost(self, address: str) -> None: ...

    def joined(self) -> None: ...


class Pipeline:
    """Connections to all stages, kept open until cancelled."""

    def __init__(self, addresses: Sequence[str], config: Config, dial: Dial) -> None:
        self._addresses, self._dial = addresses, dial
        self._blocks, self._vocabulary = config.block_count, config.vocabulary
        self._connections: dict[str, RingConnection] = {}
        self._broken: dict[Edge, float] = {}
        self._errors: dict[str, str] = {}  # last error of each address without a stage

    async def run(self, listener: PipelineListener) -> None:
        """Keep a connection to every stage until cancelled."""
        async with asyncio.TaskGroup() as keepers:
            for address in dict.fromkeys(self._addresses):
                keepers.create_task(self._keep(address, listener))

    @property
    def stages(self) -> list[StageInfo]:
        """The connected stages."""
        return [
            StageInfo(address, blocks[0], blocks[-1] + 1)
            for address, connection in self._connections.items()
            for blocks in [connection.hello["blocks"]]
        ]

    @property
    def missing(self) -> str:
        """Why there is no route; empty if there is one."""
        blocks = missing_blocks(self.stages, self._blocks)
        if blocks:
            errors = "; ".join(_named(address, error) for address, error in self._errors.items())
            listed = ", ".join(map(str, blocks))
            return f"no stage has block {listed}" + (errors and f" ({errors})")
        if self.route() is None:
            return (
                "the stages cannot reach each other; check their --announce addresses and firewalls"
            )
        return ""

    def route(self, work: Mapping[str, float] = NO_WORK) -> Route | None:
        """The best route for a request; `work`: how much each stage has to do already."""
        now = time.monotonic()
        self._broken = {edge: until for edge, until in self._broken.items() if until > now}
        stages = [replace(stage, load=work.get(stage.address, 0.0)) for stage in self.stages]
        return choose_route(stages, self._blocks, self._broken)

    def is_open(self, route: Route) -> bool:
        """Whether the stages of a route are connected, and can reach each other as far as known."""
        now = time.monotonic()
        return all(address in self._connections for address in route) and not any(
            self._broken.get(edge, 0.0) > now for edge in pairwise(route)
        )

    def avoid(self, edge: Edge) -> None:
        """Avoid routes over this pair of stages for a while."""
        self._broken[edge] = time.monotonic() + BROKEN_SECONDS

    async def prefill(self, rows: Sequence[Row], route: Route) -> None:
        """Send a prefill to all stages of a route at once."""
        message = prefill_message(rows, self._vocabulary)
        await asyncio.gather(*(self._connection(address).send(message) for address in route))

    async def send(self, step: StepEnvelope, route: Route) -> None:
        await self._connection(route[0]).send(step_message(step, self._vocabulary))

    async def release(self, request: int, route: Route, keep: int = 0) -> None:
        """Tell the stages that a context is no longer needed, except for copies of its first `keep`
        positions."""
        message = release_message({request: keep})
        for address in route:
            if address in self._connections:
                await self._connections[address].send(message)

    def _connection(self, address: str) -> RingConnection:
        if address not in self._connections:
            raise UnreachableError(f"the connection to the stage at {address} is lost")
        return self._connections[address]

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
        """Use a connection until it ends."""
        address = connection.hello.get("address") or dialled
        if address in self._connections:
            self._errors[dialled] = (
                f"two stages have the address {address}; give each its own --announce"
            )
            connection.close()
            await asyncio.sleep(LONGEST_REDIAL_SECONDS)
            return
        self._connections[address] = connection
        blocks = ", ".join(map(str, connection.hello["blocks"]))
        log.info("stage %s connected with blocks %s", address, blocks)
        listener.joined()
        try:
            await self._introduce()
            while True:
                message = await connection.receive()
                match message.kind:
                    case FrameKind.RESULT:
                        listener.arrived(read_result(message, self._vocabulary))
                    case FrameKind.FAILURE:
                        listener.failed(address, read_failure(message))
                    case kind:
                        raise ProtocolError(f"a stage may not send {kind.name}")
        except BlocktrainError as error:
            self._errors[dialled] = str(error)
            log.warning("stage %s is gone: %s", address, error)
        finally:
            del self._connections[address]
            connection.close()
            listener.lost(address)

    async def _introduce(self) -> None:
        """Tell every stage to connect to those that may follow it, before the first step needs the
        connection."""
        for stage, successor in product(self.stages, repeat=2):
            if successor.first == stage.stop:
                message = FrameMessage(FrameKind.DIAL, meta={"address": successor.address})
                with suppress(BlocktrainError):  # its own task notices a lost stage
                    await self._connection(stage.address).send(message)


def _named(address: str, error: str) -> str:
    """The error, preceded by the address unless the error starts with that."""
    return error if error.startswith(address) else f"{address}: {error}"
