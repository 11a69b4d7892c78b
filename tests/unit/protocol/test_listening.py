"""A port, as those who answer on it need it."""

import asyncio
import socket

from blocktrain.protocol.listening import bound_socket


def test_answers_in_pieces_do_not_wait_for_each_other() -> None:
    async def scene() -> None:
        accepted: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()

        async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted.set_result(writer.get_extra_info("socket"))

        listener = bound_socket("127.0.0.1", 0)
        async with await asyncio.start_server(accept, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            answering = await accepted
            assert answering.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            writer.close()
            await writer.wait_closed()

    asyncio.run(scene())
