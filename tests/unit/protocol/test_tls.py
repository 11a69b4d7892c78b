"""Real TLS over loopback: a server with a certificate of the run's authority, and clients."""

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from blocktrain.errors import ProtocolError, UntrustedError
from blocktrain.protocol.tls import Authority, Certificate, pinned_context

NOW = time.time()  # TLS itself looks at the clock
AUTHORITY = Authority.create("run00001", NOW)
OTHER = Authority.create("run00001", NOW)


@contextmanager
def server(
    certificate: Certificate,
    folder: Path,
    newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3,
) -> Iterator[int]:
    """Answers one connection with one word; yields its port."""
    (folder / "cert.pem").write_text(certificate.cert_pem)
    (folder / "key.pem").write_text(certificate.key_pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    context.maximum_version = newest
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        thread = threading.Thread(target=answer_once, args=(listener, context))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            thread.join()


def answer_once(listener: socket.socket, context: ssl.SSLContext) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(10)
        try:
            with context.wrap_socket(connection, server_side=True) as secure:
                secure.sendall(b"hello")
        except (ssl.SSLError, OSError):
            return  # the client turned away, which is what the test looks at


def greeting(port: int, context: ssl.SSLContext) -> tuple[bytes, str | None]:
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="any.example") as secure,
    ):
        return secure.recv(5), secure.version()


def turned_away(certificate: Certificate, folder: Path, authority: Authority) -> str:
    """Why a client that trusts this authority does not talk to a server with this certificate."""
    with (
        server(certificate, folder) as port,
        pytest.raises(ssl.SSLCertVerificationError) as caught,
    ):
        greeting(port, pinned(authority))
    return caught.value.verify_message


def pinned(authority: Authority) -> ssl.SSLContext:
    return pinned_context(authority.certificate_pem, authority.fingerprint)


def test_the_right_authority_connects_whatever_the_host_name(tmp_path: Path):
    certificate = AUTHORITY.issue_server(["somewhere.else.example"], NOW)
    with server(certificate, tmp_path) as port:
        assert greeting(port, pinned(AUTHORITY)) == (b"hello", "TLSv1.3")


def test_older_tls_versions_are_refused(tmp_path: Path):
    certificate = AUTHORITY.issue_server(["127.0.0.1"], NOW)
    with (
        server(certificate, tmp_path, ssl.TLSVersion.TLSv1_2) as port,
        pytest.raises(ssl.SSLError, match="protocol version"),
    ):
        greeting(port, pinned(AUTHORITY))


def test_an_authority_that_was_stored_and_loaded_signs_for_the_same_run(tmp_path: Path):
    loaded = Authority.load(AUTHORITY.certificate_pem, AUTHORITY.key_pem)
    with server(loaded.issue_server(["127.0.0.1"], NOW), tmp_path) as port:
        assert greeting(port, pinned(AUTHORITY))[0] == b"hello"


def test_another_authority_is_refused_even_of_the_same_name(tmp_path: Path):
    turned_away(OTHER.issue_server(["127.0.0.1"], NOW), tmp_path, AUTHORITY)


def test_a_coordinator_cannot_vouch_for_another(tmp_path: Path):
    coordinator = AUTHORITY.issue_server(["127.0.0.1"], NOW)
    posing = Authority.load(coordinator.cert_pem, coordinator.key_pem)
    issued = posing.issue_server(["127.0.0.1"], NOW)
    chain = Certificate(issued.cert_pem + coordinator.cert_pem, issued.key_pem)
    turned_away(chain, tmp_path, AUTHORITY)


def test_a_certificate_that_has_ended_is_refused(tmp_path: Path):
    long_ago = NOW - 2 * 365 * 86400
    ended = AUTHORITY.issue_server(["127.0.0.1"], long_ago)
    assert "expired" in turned_away(ended, tmp_path, AUTHORITY)


def test_an_authority_the_invite_does_not_name_is_refused():
    with pytest.raises(UntrustedError, match="does not match the invite"):
        pinned_context(AUTHORITY.certificate_pem, OTHER.fingerprint)


def test_a_second_certificate_cannot_slip_in():
    first, second = AUTHORITY.certificate_pem, OTHER.certificate_pem
    for both in (first + second, second + first):
        with pytest.raises(ProtocolError):
            pinned_context(both, AUTHORITY.fingerprint)


def test_no_other_authority_is_trusted():
    assert len(pinned(AUTHORITY).get_ca_certs()) == 1


@pytest.mark.parametrize("text", ["", "hello", "-----BEGIN CERTIFICATE-----", "é"])
def test_text_that_is_not_a_certificate_is_refused(text: str):
    with pytest.raises(ProtocolError):
        pinned_context(text, AUTHORITY.fingerprint)


def test_broken_base64_is_refused():
    broken = "-----BEGIN CERTIFICATE-----\nabcde\n-----END CERTIFICATE-----\n"
    with pytest.raises(ProtocolError):
        pinned_context(broken, AUTHORITY.fingerprint)
