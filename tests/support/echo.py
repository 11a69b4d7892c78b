"""Two ends of a connection that measure the line between them, as small programs.

echo.py serve ADDRESS      prints its port; counts what it gets, echoes what is one byte
echo.py ask ADDRESS PORT BYTES    prints JSON: round trips in ms, rate in Mbit/s
"""

import json
import socket
import sys
import time

PROBES = 9
DONE = b"."


def serve(address: str) -> None:
    listener = socket.create_server((address, 0))
    print(listener.getsockname()[1], flush=True)  # noqa: T201
    connection, _ = listener.accept()
    with connection:
        for _ in range(PROBES):
            connection.sendall(connection.recv(1))
        left = int.from_bytes(connection.recv(8), "big")
        while left:
            left -= len(connection.recv(min(left, 1 << 20)))
        connection.sendall(DONE)


def ask(address: str, port: int, size: int) -> None:
    with socket.create_connection((address, port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(PROBES):
            began = time.perf_counter()
            connection.sendall(DONE)
            connection.recv(1)
            trips.append((time.perf_counter() - began) * 1e3)
        began = time.perf_counter()
        connection.sendall(size.to_bytes(8, "big") + bytes(size))
        connection.recv(1)
        taken = time.perf_counter() - began
    print(json.dumps({"trips_ms": trips, "mbit": size * 8 / 1e6 / taken}))  # noqa: T201


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        ask(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
