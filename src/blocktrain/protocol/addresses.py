"""A port of this machine, taken before anything is announced. Knows nothing of what is spoken."""

import re
import socket

from blocktrain.errors import UnreachableError

BACKLOG = 512


def bound_socket(host: str, port: int) -> socket.socket:
    """Listening, so that the real port is known and nobody else can take it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named, because asyncio sends at once (TCP_NODELAY) on none but sockets that say they are TCP:
    # an answer in two pieces would wait 40 ms between them.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise UnreachableError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listener


DEFAULT_PORT = 7070

_URL = re.compile(r"[a-z]+://")


def as_url(written: str, scheme: str, port: int) -> str:
    """With what was left out filled in; whether there is such a place is not known here."""
    if _URL.match(written):
        return written
    return f"{scheme}://{_with_port(written, port)}"


def host_of(url: str) -> str:
    return url.partition("://")[2].rpartition(":")[0].strip("[]")


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def _with_port(name: str, port: int) -> str:
    has_port = name.rpartition(":")[2].isdigit() and (name.count(":") == 1 or "]:" in name)
    if has_port:
        return name
    bare_v6 = name.count(":") > 1 and not name.endswith("]")
    return f"[{name}]:{port}" if bare_v6 else f"{name}:{port}"
