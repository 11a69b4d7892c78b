"""Where a coordinator is reached, as people write it: a host, HOST:PORT, or a URL."""

import re

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
