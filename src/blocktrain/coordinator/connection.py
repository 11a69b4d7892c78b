"""A connection to a coordinator: uvicorn's own, with two differences.

What a worker sends is not copied on its way through, and a connection that nobody uses stays open
for longer than workers keep theirs, as long as there are not many: opening one takes a worker far
away two round trips, and both sides two milliseconds of a processor.
"""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

IDLE_SECONDS = 75
MANY = 256  # connections, each of which takes 50 KB of memory or more
IDLE_SECONDS_OF_MANY = 5


class Connection(HttpToolsProtocol):
    def on_body(self, body: bytes) -> None:
        if not self.cycle.body:
            self.cycle.body = b""  # type: ignore[assignment]  # to which a part is added as it is
        super().on_body(body)

    def on_response_complete(self) -> None:
        many = len(self.connections) > MANY
        self.timeout_keep_alive = IDLE_SECONDS_OF_MANY if many else IDLE_SECONDS
        super().on_response_complete()
