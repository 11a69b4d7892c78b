"""Stages as processes on this machine, one per block: started together, started again when one
dies, gone with the process that started them."""

import asyncio
import json
import logging
import sys
from pathlib import Path

from blocktrain import threads
from blocktrain.errors import UnavailableError

COMMAND = (sys.executable, "-m", "blocktrain.cli.main", "stage")
PAUSE_SECONDS = 0.2  # before a stage that died is started again
STARTING_SECONDS = 120.0  # loading a large block takes its time

log = logging.getLogger(__name__)


class LocalStages:
    def __init__(self, run: Path, blocks: range, keys: Path, options: list[str]) -> None:
        self._run = run
        self._blocks = blocks
        self._keys = keys
        self._options = options
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self.addresses: dict[int, str] = {}

    async def start(self) -> list[str]:
        """All of them; their addresses, in the order of the blocks."""
        await asyncio.gather(*(self._start(block, "127.0.0.1:0") for block in self._blocks))
        return [self.addresses[block] for block in self._blocks]

    async def keep(self) -> None:
        """Start again what dies, at the address it had."""
        async with asyncio.TaskGroup() as keepers:
            for block in self._blocks:
                keepers.create_task(self._keep(block))

    async def stop(self) -> None:
        """At once: they keep nothing, and whoever asked for it waits."""
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()
        for process in self._processes.values():
            await process.wait()

    async def _keep(self, block: int) -> None:
        while True:
            code = await self._processes[block].wait()
            log.warning("the stage of block %s ended with %s and is started again", block, code)
            await asyncio.sleep(PAUSE_SECONDS)
            try:
                await self._start(block, self.addresses[block])
            except UnavailableError as error:
                log.warning("%s", error)

    async def _start(self, block: int, listen: str) -> None:
        command = [*COMMAND, str(self._run), "--block", str(block), "--listen", listen, "--json"]
        share = max(1, threads.machine_threads() // (len(self._blocks) + 1))
        command += ["--threads", str(share)]
        command += ["--keys", str(self._keys), "--name", f"stage-{block}"]
        command += ["--until-stdin-closes", *self._options]
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the router, which ends them after the answers
        )
        self._processes[block] = process
        assert process.stdout
        async with asyncio.timeout(STARTING_SECONDS):
            line = await process.stdout.readline()
        if not line:
            raise UnavailableError(
                f"the stage of block {block} did not start; it ended with {await process.wait()}"
            )
        self.addresses[block] = json.loads(line)["listening"]
