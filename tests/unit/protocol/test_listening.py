"""A port, as those who answer on it need it."""

import asyncio
import socket

from blocktrain.protocol.addresses import bound_socket


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
