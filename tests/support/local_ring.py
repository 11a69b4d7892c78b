"""A serving ring of real sockets in one process: stages at their ports, and an engine in front."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from tests.support.serving import spell_byte, stage, text_of

from blocktrain.errors import UnreachableError
from blocktrain.model.stack import Stack
from blocktrain.protocol.addresses import bound_socket
from blocktrain.protocol.ring_keys import ROUTER, STAGE
from blocktrain.serve.ring.batch import SlotLimits
from blocktrain.serve.ring.compute import StageCompute
from blocktrain.serve.ring.connection import Hello, RingConnection
from blocktrain.serve.ring.handshake import RingListener, dial
from blocktrain.serve.ring.stage import Stage
from blocktrain.serve.ring.turns import CPU_CHUNK
from blocktrain.serve.router.decode import AnswerCost, GenerationRequest
from blocktrain.serve.router.engine import EngineLimits, RingEngine
from blocktrain.serve.router.first_block import DraftModel, FirstBlock
from blocktrain.serve.router.pipeline import Pipeline
from blocktrain.serve.router.profile import NO_PROFILER, Profiler

PATIENT = EngineLimits(requests=8, patience_seconds=20.0)
SECONDS = 30.0

Reach = Callable[[str], Awaitable[RingConnection]]


def anyone(hello: Hello) -> None:
    pass


class Ring:
    """Stages at their ports; one may be stopped, and stages kept from reaching each other."""

    def __init__(self, stack: Stack, readout: str = "product", chunk: int = CPU_CHUNK) -> None:
        self.stack, self.readout, self.chunk = stack, readout, chunk
        self.computes: list[StageCompute] = []
        self.servers: dict[str, RingListener] = {}
        self.runs: dict[str, asyncio.Task[None]] = {}
        self.cut: set[str] = set()  # addresses that no stage reaches

    def start(
        self,
        blocks: range,
        limits: SlotLimits | None = None,
        announced: str = "",
    ) -> str:
        listener = bound_socket("127.0.0.1", 0)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        computing = stage(self.stack, blocks, self.readout, limits or SlotLimits(16))
        hello = {"role": STAGE, "name": address, "blocks": list(blocks), "address": announced}
        served = Stage(f"block {blocks[0]}", computing, self._reach(hello, self.cut), self.chunk)
        self.computes.append(computing)
        self.servers[address] = RingListener(
            listener, None, lambda: hello, served.serve, roles=[ROUTER, STAGE], check=anyone
        )
        self.runs[address] = asyncio.create_task(served.run())
        return address

    async def stop(self, address: str) -> None:
        await self.servers.pop(address).close()
        self.runs.pop(address).cancel()

    def engine(
        self,
        limits: EngineLimits = PATIENT,
        wire: str = "fp32",
        reach: Reach | None = None,
        draft: DraftModel | None = None,
        profiler: Profiler = NO_PROFILER,
    ) -> RingEngine:
        pipeline = Pipeline(list(self.servers), self.stack.config, reach or self.reach)
        front = FirstBlock(stage(self.stack, range(1), self.readout))
        return RingEngine(front, pipeline, "a router", wire, limits, spell_byte, draft, profiler)

    async def reach(self, address: str) -> RingConnection:
        """As a router does."""
        hello = {"role": ROUTER, "name": "a router"}
        return await dial(address, None, hello, roles=[STAGE], check=anyone)

    def cached_requests(self) -> int:
        """Requests that any stage still has a context of."""
        return sum(len(compute.requests) for compute in self.computes)

    def _reach(self, hello: dict[str, object], cut: set[str]) -> Reach:
        async def reach(address: str) -> RingConnection:
            if address in cut:
                raise UnreachableError("no way there")
            return await dial(address, None, hello, roles=[STAGE], check=anyone)

        return reach


@asynccontextmanager
async def running(ring: Ring, engine: RingEngine) -> AsyncIterator[RingEngine]:
    task = asyncio.create_task(engine.run())
    try:
        await until(lambda: not engine.status()["missing"])
        yield engine
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for address in list(ring.servers):
            await ring.stop(address)


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not happened():
            await asyncio.sleep(0.01)


async def answer(
    engine: RingEngine, asked: GenerationRequest, account: AnswerCost | None = None
) -> bytes:
    pieces = engine.generate(asked, account or AnswerCost())
    return b"".join([text_of(piece) async for piece in pieces])
