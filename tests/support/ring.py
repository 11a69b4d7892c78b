"""A serving ring as real processes: stages that may be killed, frozen and started again at their
addresses, and a router in front of them."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
from tests.support.processes import Processes, Running, free_port

from blocktrain.protocol.ring_keys import ROUTER, STAGE, Keyring

SECONDS = 90.0  # a process that loads torch on a busy machine takes its time


class Ring:
    """One stage for each name, as {name: blocks}; more than one may hold the same blocks."""

    def __init__(self, processes: Processes, run: Path, stages: dict[str, str], *router: str):
        self._processes, self._run = processes, run
        self._keys = processes.folder / "keys"
        keyring = Keyring(self._keys)
        keyring.add(ROUTER, ROUTER)
        for name in stages:
            keyring.add(STAGE, name)
        self._blocks = stages
        self._ports = {name: free_port() for name in stages}
        self.stages: dict[str, Running] = {}
        self._of_this_run: dict[str, bool] = {}
        for name in stages:
            self.start(name)
        port = free_port()
        addresses = ",".join(f"127.0.0.1:{port}" for port in self._ports.values())
        self.router = processes.serve(
            run, f"127.0.0.1:{port}", "--stages", addresses, "--keys", self._keys, *router
        )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0)

    def start(self, name: str, run: Path | None = None) -> None:
        listen = f"127.0.0.1:{self._ports[name]}"
        where = (self._blocks[name], listen, self._keys)
        self.stages[name] = self._processes.stage(run or self._run, name, *where)
        self._of_this_run[name] = run is None

    def close(self) -> None:
        self.client.close()

    def mend(self) -> None:
        """Every stage there is, of this run, and known to the router."""
        for name, stage in self.stages.items():
            stage.thaw()
            if not self._of_this_run[name]:
                stage.kill()
            if stage.code is not None:
                self.start(name)
        self.wait(len(self.stages))

    def busy(self) -> Running:
        """The stage that works at the request under way, of those that could be missed."""
        load = self.client.get("/health").json()["engine"]["stages"]
        ports = {name: port for name, port in self._ports.items() if name != "one"}
        by_address = {f"127.0.0.1:{port}": name for name, port in ports.items()}
        return next(
            self.stages[by_address[stage["address"]]]
            for stage in load
            if stage["address"] in by_address and stage["requests"]
        )

    def until_it_says(self, words: str, **fields: object) -> httpx.Response:
        """The answer once it has these words, because a router has noticed."""
        answers: list[httpx.Response] = []

        def says() -> bool:
            answers.append(self.ask(**fields))
            return words in answers[-1].text

        self._processes.wait_for(words, says, SECONDS)
        return answers[-1]

    def wait(self, stages: int) -> None:
        """Until so many stages are known to the router."""
        self._processes.wait_for(f"{stages} stages", lambda: self.known() == stages, SECONDS)

    def known(self) -> int:
        try:
            return len(self.client.get("/health").json()["engine"]["stages"])
        except httpx.TransportError:
            return -1

    def ask(self, **fields: object) -> httpx.Response:
        return self.client.post("/v1/completions", json=fields)

    def text(self, **fields: object) -> str:
        answer = self.ask(**fields)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    def stream(self, **fields: object) -> Iterator[str]:
        """The text as it comes."""
        body = {**fields, "stream": True}
        with self.client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    yield from (choice["text"] for choice in event["choices"])
