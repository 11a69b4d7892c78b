"""A port of this machine, taken before anything is announced. Knows nothing of what is spoken."""

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
