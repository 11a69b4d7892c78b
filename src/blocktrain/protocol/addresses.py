"""HOST:PORT as text, and listening sockets. Knows nothing of the protocols spoken over them."""

import re
import socket

from blocktrain.errors import ConfigError, UnreachableError

DEFAULT_PORT = 7070
_HOST_PORT = re.compile(r"(?:\[(?P<ipv6>[^\[\]]+)\]|(?P<host>[^:\[\]]*)):(?P<port>[0-9]{1,5})")

BACKLOG = 512


def bound_socket(host: str, port: int) -> socket.socket:
    """A listening socket. Its port is known before any address is announced."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets created with IPPROTO_TCP. Without it, a response in
    # two parts would be delayed by 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise UnreachableError(
            f"cannot listen on {join_host_port(host, port)}: {error.strerror};"
            " choose another address or port"
        ) from None
    return listener


def split_host_port(address: str, default_host: str = "") -> tuple[str, int]:
    """Host and port of `host:port` or `[ipv6]:port`; for `:port` the host is `default_host`."""
    parts = _HOST_PORT.fullmatch(address)
    host = (parts["ipv6"] or parts["host"] or default_host) if parts else ""
    if not parts or not host or int(parts["port"]) > 65535:
        raise ConfigError(
            f"{address!r} is not HOST:PORT; the port is 0 to 65535, and an IPv6 host needs brackets"
        )
    return host, int(parts["port"])


def join_host_port(host: str, port: int) -> str:
    """The inverse of `split_host_port`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_url(url: str) -> tuple[str, str, int]:
    """Scheme, host and port of `scheme://host:port`."""
    scheme, _, place = url.partition("://")
    return scheme, *split_host_port(place)


def as_url(address: str, scheme: str, port: int) -> str:
    """A URL from `host`, `host:port` or a URL. `scheme` and `port` are the defaults."""
    if "://" in address:
        return address
    has_port = "]:" in address or address.count(":") == 1
    place = address if has_port else join_host_port(address.strip("[]"), port)
    return f"{scheme}://{place}"
