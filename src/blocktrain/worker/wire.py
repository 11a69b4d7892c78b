"""HTTP/1.1 over kept connections, for bodies of many megabytes: an httpx transport.

httpx's own hands a body on in records of TLS, each through a parser written in Python; receiving
took most of a processor of a fast line. Here the standard library's client reads, and what arrived
together is handed on together. A request with the extension `room`, a memoryview, has its answer
received there: what is handed on are parts of it, one after another, as long as there is room.
Bodies that are sent say their length. Knows nothing of who is asked for what; any number of threads
may use it.
"""

import http.client
import selectors
import ssl
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

PIECE_BYTES = 256 * 1024
GATHER_SECONDS = 0.02  # for which bytes that came wait for more; where none come, until the timeout

NO_ROOM = memoryview(b"")

Origin = tuple[str, str, int]


class Wire(httpx.BaseTransport):
    def __init__(self, context: ssl.SSLContext, idle_seconds: float) -> None:
        """`idle_seconds`: for how long a connection that nobody uses is worth keeping."""
        self._context, self._idle_seconds = context, idle_seconds
        self._lock = threading.Lock()
        self._closed = False
        self._idle: dict[Origin, list[tuple[float, http.client.HTTPConnection]]] = defaultdict(list)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        url, timeout = request.url, request.extensions["timeout"]
        origin = (url.scheme, url.host, url.port or (443 if url.scheme == "https" else 80))
        connection = self._connection(origin, timeout["connect"])
        try:
            with _translated(httpx.ReadError):
                connection.sock.settimeout(timeout["read"])
                answer = _exchanged(connection, request)
            # As they came: a proxy may write more into a header than ASCII.
            headers = [
                (name.encode("latin-1"), v.encode("latin-1")) for name, v in answer.getheaders()
            ]
            room = request.extensions.pop("room", NO_ROOM)
            body = _Body(self, origin, connection, answer, room)
            return httpx.Response(answer.status, headers=headers, stream=body)
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle = [connection for kept in self._idle.values() for _, connection in kept]
            self._idle.clear()
        for connection in idle:
            connection.close()

    def keep(self, origin: Origin, connection: http.client.HTTPConnection) -> None:
        """A connection that may be used again; not by a client that another thread has closed."""
        with self._lock:
            if not self._closed:
                self._idle[origin].append((time.monotonic(), connection))
                return
        connection.close()

    def _connection(self, origin: Origin, patience: float) -> http.client.HTTPConnection:
        while kept := self._kept(origin):
            if _is_alive(kept):
                return kept
            kept.close()
        scheme, host, port = origin
        made = (
            http.client.HTTPSConnection(host, port, timeout=patience, context=self._context)
            if scheme == "https"
            else http.client.HTTPConnection(host, port, timeout=patience)
        )
        with _translated(httpx.ConnectError):
            made.connect()
        return made

    def _kept(self, origin: Origin) -> http.client.HTTPConnection | None:
        """The one used last; those that were idle for too long are closed."""
        oldest = time.monotonic() - self._idle_seconds
        with self._lock:
            idle = self._idle[origin]
            found = idle.pop()[1] if idle and idle[-1][0] >= oldest else None
            gone = [connection for since, connection in idle if since < oldest]
            self._idle[origin] = [entry for entry in idle if entry[0] >= oldest]
        for connection in gone:
            connection.close()
        return found


class _Body(httpx.SyncByteStream):
    """Its connection is kept once all of it was read, and closed if not."""

    def __init__(
        self,
        wire: Wire,
        origin: Origin,
        connection: http.client.HTTPConnection,
        answer: http.client.HTTPResponse,
        room: memoryview,
    ) -> None:
        self._wire, self._origin, self._connection = wire, origin, connection
        self._answer, self._whole = answer, answer.length == 0
        self._room = room
        self._failure: Exception | None = None

    def __iter__(self) -> Iterator[bytes]:
        with _translated(httpx.ReadError):
            while piece := self._gathered():
                yield piece  # type: ignore[misc]  # as good as bytes to all who read on
        if self._answer.length:
            raise httpx.RemoteProtocolError("the answer was cut short")
        self._whole = True

    def close(self) -> None:
        self._room = NO_ROOM  # httpx's objects refer to each other, and so stay for a while
        self._answer.close()
        if self._whole and not self._answer.will_close:
            self._wire.keep(self._origin, self._connection)
        else:
            self._connection.close()

    def _gathered(self) -> memoryview:
        """What has come, and what comes right behind it. A failure is told after what came before
        it was handed on: a download goes on from there."""
        if self._failure:
            raise self._failure
        room = self._next_room()
        size, until = 0, time.monotonic() + GATHER_SECONDS
        try:
            while size < len(room) and (count := self._received(room[size:])):
                size += count
                if time.monotonic() > until:
                    break
        except (OSError, http.client.HTTPException) as failure:
            if not size:
                raise
            self._failure = failure
        self._room = self._room[size:]
        return room[:size]

    def _next_room(self) -> memoryview:
        left = PIECE_BYTES if self._answer.length is None else self._answer.length
        size = min(PIECE_BYTES, left)
        return self._room[:size] or memoryview(bytearray(size))

    def _received(self, room: memoryview) -> int:
        """So many bytes came next; 0 where it ends."""
        answer = self._answer
        if answer.length is None:  # it tells the lengths of its parts
            part = answer.read1(len(room))
            room[: len(part)] = part
            return len(part)
        count = answer.fp.readinto1(room[: answer.length])
        answer.length -= count
        return count


def _exchanged(
    connection: http.client.HTTPConnection, request: httpx.Request
) -> http.client.HTTPResponse:
    target = request.url.raw_path.decode("ascii")
    connection.putrequest(request.method, target, skip_host=True, skip_accept_encoding=True)
    for name, value in request.headers.raw:
        connection.putheader(name.decode("ascii"), value)
    connection.endheaders()
    assert isinstance(request.stream, httpx.SyncByteStream)
    broken = False
    for part in request.stream:
        try:
            connection.send(part)
        except OSError:
            broken = True  # whoever takes no more of it may have said why
            break
    answer = connection.getresponse()
    answer.will_close = answer.will_close or broken
    if answer.length is None and not answer.chunked:  # or its head was cut short
        answer.close()  # it has the socket: the connection has let go of what ends with it
        raise http.client.HTTPException("the answer does not say where it ends")
    return answer


@contextmanager
def _translated(error: type[httpx.TransportError]) -> Iterator[None]:
    try:
        yield
    except TimeoutError as late:
        raise httpx.ReadTimeout(str(late) or "timed out") from None
    except http.client.HTTPException as odd:
        raise httpx.RemoteProtocolError(str(odd) or type(odd).__name__) from None
    except OSError as failure:
        raise error(str(failure)) from None


def _is_alive(connection: http.client.HTTPConnection) -> bool:
    """Nothing to be read where nothing was asked: neither an end nor a surprise."""
    with selectors.DefaultSelector() as selector:
        selector.register(connection.sock, selectors.EVENT_READ)
        return not selector.select(0)
