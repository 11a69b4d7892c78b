"""What happens in a run, as lines for whoever started its coordinator: few enough to be read."""

import threading
import time
from typing import TYPE_CHECKING

import click

from blocktrain.cli.plain import plain

if TYPE_CHECKING:
    from blocktrain.coordinator.service import Service
    from blocktrain.protocol.messages import Event

LOOK_SECONDS = 1.0
VERSION_SECONDS = 5.0  # between two lines about versions of the same block
MOST_AT_ONCE = 1000
FINISHED = "the run is finished: blocktrain fetch INVITE --out runs/ours"


class Chronicle:
    """Reads the run's events in a thread of its own, from now on."""

    def __init__(self, service: "Service") -> None:
        self._reports = service.reports
        self._names: dict[str, str] = {}
        self._told_version: dict[int, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="chronicle", daemon=True)

    def __enter__(self) -> None:
        self._after = self._reports.last_event()
        if self._reports.status().state == "finished":
            _tell("done", FINISHED)
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        from sqlalchemy.exc import SQLAlchemyError

        while not self._ended.wait(LOOK_SECONDS):
            try:
                self._look()
            except SQLAlchemyError:
                continue  # a ledger that does not answer is told of by others

    def _look(self) -> None:
        while events := self._reports.events(self._after, MOST_AT_ONCE):
            for event in events:
                self._show(event)
            self._after = events[-1].number

    def _show(self, event: "Event") -> None:
        who, block = self._name(event.worker), f"block {event.block}"
        if event.kind == "joined":
            _tell("joined", who)
        elif event.kind == "merged" and self._is_time_for(event.block):
            _tell(block, event.detail)
        elif event.kind == "returned":
            _tell("back", f"{block} from {who}: {event.detail}")
        elif event.kind == "lost":
            _tell("lost", f"{who} was not heard of; its {event.detail} of {block} go to others")
        elif event.kind == "refused":
            _tell("refused", f"an update of {block} from {who}: {event.detail}")
        elif event.kind == "banned":
            _tell("banned", who)
        elif event.kind == "scored" and event.block is None:
            _tell("score", event.detail)
        elif event.kind == "finished":
            _tell("done", FINISHED)

    def _is_time_for(self, block: int | None) -> bool:
        assert block is not None, "every version is one of a block"
        now = time.monotonic()
        if now - self._told_version.get(block, -VERSION_SECONDS) < VERSION_SECONDS:
            return False
        self._told_version[block] = now
        return True

    def _name(self, worker: str | None) -> str:
        if worker is None:
            return ""
        if worker not in self._names:
            known = self._reports.status().workers
            self._names = {each.worker: f"{each.name} ({each.worker})" for each in known}
        return self._names.get(worker, worker)


def _tell(label: str, text: str) -> None:
    click.echo(f"{label:7s} {plain(text)}")
