"""HOST:PORT as text, and the sockets that listen there."""

import asyncio
import socket

import pytest

from blocktrain.errors import ConfigError
from blocktrain.protocol.addresses import (
    as_url,
    bound_socket,
    join_host_port,
    split_host_port,
    split_url,
)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:80", "127.0.0.1", 80),
        ("a.example:0", "a.example", 0),
        ("[::1]:7070", "::1", 7070),
    ],
)
def test_an_address_is_split_and_joined_again(text: str, host: str, port: int):
    assert split_host_port(text) == (host, port)
    assert join_host_port(host, port) == text
    assert split_url(f"https://{text}") == ("https", host, port)


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":80", "::1:80", "[::1]", "host:65536", "host:-1", "host:٣"]
)
def test_what_is_no_address_is_refused(text: str):
    with pytest.raises(ConfigError, match="is not HOST:PORT"):
        split_host_port(text)


def test_a_listener_may_leave_its_host_out():
    assert split_host_port(":7070", default_host="0.0.0.0") == ("0.0.0.0", 7070)


@pytest.mark.parametrize(
    ("written", "url"),
    [
        ("host", "https://host:7070"),
        ("host:1", "https://host:1"),
        ("::1", "https://[::1]:7070"),
        ("[::1]", "https://[::1]:7070"),
        ("[::1]:1", "https://[::1]:1"),
        ("http://host:1", "http://host:1"),
    ],
)
def test_a_url_gets_the_scheme_and_port_it_lacks(written: str, url: str):
    assert as_url(written, "https", 7070) == url


def test_answers_in_pieces_do_not_wait_for_each_other() -> None:
    async def scene() -> int:
        sends_at_once: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            answering = writer.get_extra_info("socket")
            sends_at_once.set_result(answering.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = bound_socket("127.0.0.1", 0)
        async with await asyncio.start_server(accept, sock=listener):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            await reader.read()
            writer.close()
            await writer.wait_closed()
        return await sends_at_once

    assert asyncio.run(scene())
