"""The progress of the whole run, beside that of one worker."""

import threading
from random import Random
from types import TracebackType

from blocktrain.cli.status_tables import about_run
from blocktrain.errors import BlocktrainError
from blocktrain.worker.client import Client

FIRST_SECONDS, SECONDS = 5.0, 60.0  # before the first request, and between two
ANSWER_SECONDS = 20.0


class RunProgress:
    """Asks for the progress of the run from entering the context until it is left."""

    def __init__(self, client: Client, first_seconds: float = FIRST_SECONDS) -> None:
        self._client, self._first_seconds = client, first_seconds
        self._stop, self._random = threading.Event(), Random()
        self._text = ""
        self._thread = threading.Thread(target=self._work, name="run progress", daemon=True)

    def __enter__(self) -> "RunProgress":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()

    def text(self) -> str:
        """One line about the run; empty until it is known."""
        return self._text

    def _work(self) -> None:
        pause = self._first_seconds
        while not self._stop.wait(pause * self._random.uniform(1.0, 1.5)):
            pause = SECONDS
            deadline = self._client.deadline(ANSWER_SECONDS, lambda: not self._stop.is_set())
            try:
                overview = self._client.overview(deadline)
            except BlocktrainError:  # the worker itself reports what is wrong
                continue
            if overview is None:  # an older coordinator
                return
            self._text = about_run(overview)
