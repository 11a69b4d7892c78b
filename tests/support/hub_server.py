"""A server that speaks the part of the hub's HTTP interface that huggingface_hub asks for."""

import hashlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import cast


class HubHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.respond(with_body=True)

    def do_HEAD(self) -> None:
        self.respond(with_body=False)

    def respond(self, *, with_body: bool) -> None:
        path, server = self.path.partition("?")[0], cast("HubServer", self.server)
        server.asked.append(f"{self.command} {path}")
        body = server.answer(path)
        self.send_response(404 if body is None else 200)
        if body is None and path.startswith("/api/"):
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", str(len(body or b"")))
        self.send_header("ETag", f'"{hashlib.sha256(body or b"").hexdigest()}"')
        self.send_header("X-Repo-Commit", server.commit)
        self.end_headers()
        if with_body and body:
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


class HubServer(ThreadingHTTPServer):
    """Answers what `answer` returns, at one commit, and notes what it is asked."""

    def __init__(self, commit: str) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.commit = commit
        self.asked: list[str] = []

    def answer(self, path: str) -> bytes | None:
        """The body of a path; None: there is nothing."""
        raise NotImplementedError

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"
