"""A small real HTTP server that holds chunks, answers what a test wrote down, and fails by plan.

It decides nothing: what a coordinator would think of a request is not its business.
"""

import re
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from blocktrain.errors import RefusedError
from blocktrain.protocol.messages import (
    CHUNK_BYTES,
    STATUS_OF,
    Blob,
    BlobAnswer,
    Message,
    Recipe,
    Refusal,
)
from blocktrain.storage.blobs import Blobs
from blocktrain.storage.chunks import name_of

PIECE = 64 * 1024

Answer = Callable[[bytes], Message | None]


@dataclass
class Fault:
    """What happens to the next requests that begin like this, e.g. "GET /v1/chunks"."""

    request: str
    status: int = 0  # answered instead of what was asked for
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    cut_after: int | None = None  # bytes of the answer's body, then the connection is gone
    seconds_between: float = 0.0  # bytes of the answer's body
    damaged: bool = False  # one bit of the answer's body
    wait: threading.Event | None = None  # before answering
    times: int = 1  # at most; a fault that never struck fails the test
    struck: int = field(default=0, init=False)


@dataclass(frozen=True)
class Seen:
    line: str  # GET /v1/hello
    headers: dict[str, str]
    body: bytes


class FaultServer:
    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.chunks: dict[str, bytes] = {}
        self.urls: dict[str, str] | None = None  # told with every blob
        self._faults: list[Fault] = []
        self._planned: list[Fault] = []  # all there ever were
        self.seen: list[Seen] = []
        self.bytes_sent = self.connections = 0
        self._answers: list[tuple[re.Pattern[str], Answer]] = []
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 20
            disable_nagle_algorithm = True

            def setup(self) -> None:
                server.connections += 1
                super().setup()

            def log_message(self, *arguments: object) -> None:
                pass

            def do_GET(self) -> None:
                server._serve(self)

            do_POST = do_PUT = do_GET

        self._http = _QuietServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        if tls:
            self._http.socket = tls.wrap_socket(
                self._http.socket, server_side=True, do_handshake_on_connect=False
            )
        self.address = f"http{'s' if tls else ''}://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        unused = [fault for fault in self._planned if not fault.struck]
        assert not unused, f"never struck, so that nothing was tested: {unused}"

    @property
    def faults(self) -> list[Fault]:
        return self._faults

    @faults.setter
    def faults(self, faults: list[Fault]) -> None:
        self._faults = faults
        known = {id(fault) for fault in self._planned}
        self._planned += [fault for fault in faults if id(fault) not in known]

    def on(self, request: str, answer: Answer) -> None:
        """What to answer to requests like "POST /v1/lease"; newer ones count first."""
        self._answers.insert(0, (re.compile(request), answer))

    def hold(self, data: bytes) -> Blob:
        """Have a blob, cut into chunks as they are in a run."""
        pieces = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
        self.chunks.update({name_of(piece): piece for piece in pieces})
        recipe = Recipe(size=len(data), chunks=tuple(map(name_of, pieces)))
        return Blobs(_Held(self.chunks)).add_recipe(recipe)  # type: ignore[arg-type]

    def lines(self, beginning: str = "") -> list[str]:
        with self._lock:
            return [seen.line for seen in self.seen if seen.line.startswith(beginning)]

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        line = f"{handler.command} {handler.path}"
        with self._lock:
            self.seen.append(Seen(line, dict(handler.headers.items()), body))
            fault = next((f for f in self.faults if f.times and line.startswith(f.request)), None)
            if fault:
                fault.times -= 1
                fault.struck += 1
        if fault and fault.wait:
            fault.wait.wait(20)
        if fault and fault.status:
            self._send(handler, fault.status, fault.body, fault.headers, fault)
            return
        status, answer, headers = self._answer(line, handler.headers.get("Range"), body)
        self._send(handler, status, answer, headers, fault)

    def _answer(
        self, line: str, span: str | None, body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        try:
            for pattern, answer in self._answers:
                if pattern.fullmatch(line):
                    message = answer(body)
                    return 200, message.model_dump_json().encode() if message else b"", {}
            if line.startswith("GET /v1/blobs/"):
                return 200, self._blob(line.rpartition("/")[2]).model_dump_json().encode(), {}
            if line.startswith("GET "):
                return _ranged(self._chunk(line.rpartition("/")[2]), span)
            if line.startswith("PUT "):
                name = line.rpartition("/")[2].partition("?")[0]
                if name_of(body) != name:
                    raise RefusedError("malformed", "these bytes have another hash")
                self.chunks[name] = body
                return 204, b"", {}
            raise RefusedError("not_found", f"nothing at {line}")
        except RefusedError as refused:
            refusal = Refusal(error=refused.code, reason=refused.reason)  # type: ignore[arg-type]
            return STATUS_OF[refused.code], refusal.model_dump_json().encode(), {}

    def _blob(self, name: str) -> BlobAnswer:
        recipe = Recipe.model_validate_json(self._chunk(name))
        return BlobAnswer(recipe=recipe, urls=self.urls)

    def _chunk(self, name: str) -> bytes:
        if name not in self.chunks:
            raise RefusedError("not_found", f"no chunk {name}")
        return self.chunks[name]

    def _send(
        self,
        handler: BaseHTTPRequestHandler,
        status: int,
        body: bytes,
        headers: dict[str, str],
        fault: Fault | None,
    ) -> None:
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        view = memoryview(body)
        if fault and fault.damaged:
            view = memoryview(bytes([body[0] ^ 1]) + body[1:])
        end = len(view) if fault is None or fault.cut_after is None else fault.cut_after
        piece = 1 if fault and fault.seconds_between else PIECE
        for start in range(0, end, piece):
            handler.wfile.write(view[start : min(start + piece, end)])
            self.bytes_sent += min(piece, end - start)
            time.sleep(fault.seconds_between if fault else 0.0)
        if end < len(view):
            handler.close_connection = True
            handler.wfile.flush()
            handler.connection.close()


class _QuietServer(ThreadingHTTPServer):
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """Connections that break are what this server is for."""


class _Held:
    """As much of a chunk store as adding a recipe needs."""

    def __init__(self, chunks: dict[str, bytes]) -> None:
        self._chunks = chunks

    def put(self, data: bytes | bytearray | memoryview) -> str:
        self._chunks[name_of(data)] = bytes(data)
        return name_of(data)


def _ranged(data: bytes, span: str | None) -> tuple[int, bytes, dict[str, str]]:
    if not span:
        return 200, data, {}
    start = int(span.removeprefix("bytes=").rstrip("-"))
    return 206, data[start:], {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
