"""Real web servers in a thread of the test."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import HTTPServer

import uvicorn

READY_SECONDS = 10.0


@contextmanager
def listening(server: uvicorn.Server, listener: socket.socket) -> Iterator[str]:
    """Where it answers, as host:port."""
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        _wait_until_ready(server)
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@contextmanager
def serving(server: HTTPServer) -> Iterator[str]:
    """Serve until the block is left; gives the address."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def unused_address() -> str:
    """The address of a server that is not there."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{unused.getsockname()[1]}"


def _wait_until_ready(server: uvicorn.Server) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while not server.started:
        assert time.monotonic() < deadline, "the server does not start"
        time.sleep(0.005)
