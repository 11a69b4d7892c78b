"""A real HTTP proxy of this machine: CONNECT tunnels, and plain requests by absolute URL."""

import http.client
import socket
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

PIECE = 64 * 1024
HOP_BY_HOP = ("connection", "keep-alive", "proxy-connection", "transfer-encoding")


class HttpProxy:
    """`lines` are the requests it got, such as "CONNECT 127.0.0.1:4711"."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        lines = self.lines

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: object) -> None:
                pass

            def do_CONNECT(self) -> None:
                lines.append(f"CONNECT {self.path}")
                host, _, port = self.path.rpartition(":")
                with socket.create_connection((host, int(port))) as far:
                    self.send_response(200)
                    self.end_headers()
                    back = threading.Thread(target=_pump, args=(far, self.connection))
                    back.start()
                    _pump(self.connection, far)
                    back.join()
                self.close_connection = True

            def do_GET(self) -> None:
                lines.append(f"{self.command} {self.path}")
                url = urlsplit(self.path)
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                far = http.client.HTTPConnection(url.netloc)
                path = url._replace(scheme="", netloc="").geturl()
                far.request(self.command, path, body, dict(self.headers.items()))
                answer = far.getresponse()
                data = answer.read()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in HOP_BY_HOP:
                        self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)
                far.close()

            do_POST = do_PUT = do_GET

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while piece := source.recv(PIECE):
            sink.sendall(piece)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
