import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from blocktrain.cli.main import cli
from blocktrain.errors import ConfigError, CorruptFileError, UntrustedError
from blocktrain.protocol.ring_keys import (
    ROUTER,
    STAGE,
    Keyring,
    client_context,
    member_of,
    server_context,
)

DAY = 24 * 3600.0
NOW = 1_800_000_000.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    keyring = Keyring(tmp_path / "keys", lambda: NOW)
    keyring.add(ROUTER, "router")
    keyring.add(STAGE, "stage-1")
    return keyring.folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def keys(*arguments: object) -> str:
    result = CliRunner().invoke(cli, ["keys", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_the_command_makes_an_authority_once_and_adds_members(tmp_path: Path):
    folder = tmp_path / "keys"
    assert [line.split()[:2] for line in keys(folder, "--stages", 2).splitlines()] == [
        ["made", "router"], ["made", "stage"], ["made", "stage"],
    ]  # fmt: skip
    first = contents(folder)
    names = ["ca", "router", "stage-1", "stage-2"]
    assert sorted(first) == sorted(f"{name}.{kind}" for name in names for kind in ("pem", "key"))
    said = keys(folder, "--stages", 2, "--name", "gpu", "--router", "second")
    assert [line.split()[0] for line in said.splitlines()] == [
        "kept", "made", "kept", "kept", "made",
    ]  # fmt: skip
    assert first.items() < contents(folder).items()
    for path in folder.glob("*.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert client_context(folder, "second") and server_context(folder, "gpu")


def test_contexts_take_nothing_but_tls_13_and_certificates_of_this_ring(folder: Path):
    for context in (server_context(folder, "stage-1", lambda: NOW),
                    client_context(folder, "router", lambda: NOW)):  # fmt: skip
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert len(context.get_ca_certs()) == 1


def test_a_certificate_that_ends_soon_is_renewed(folder: Path):
    before = contents(folder)
    assert not Keyring(folder, lambda: NOW + 334 * DAY).add(STAGE, "stage-1")
    late = NOW + 336 * DAY
    assert Keyring(folder, lambda: late).add(STAGE, "stage-1")
    after = contents(folder)
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"stage-1.pem", "stage-1.key"}
    assert server_context(folder, "stage-1", lambda: late + 300 * DAY)


def test_a_router_cannot_listen(folder: Path):
    with pytest.raises(ConfigError, match="belongs to a router; use the certificate of a stage"):
        server_context(folder, "router", lambda: NOW)


def test_a_router_that_listens_anyway_is_refused(tmp_path: Path):
    """Its certificate is not for servers, so TLS itself refuses it."""
    keyring = Keyring(tmp_path)
    keyring.add(ROUTER, "router")
    keyring.add(STAGE, "stage-1")
    pretending = server_context(tmp_path, "stage-1")
    pretending.load_cert_chain(tmp_path / "router.pem", tmp_path / "router.key")
    near, far = socket.socketpair()

    def pretend() -> None:
        with pytest.raises((ssl.SSLError, OSError)):
            pretending.wrap_socket(far, server_side=True)

    other = threading.Thread(target=pretend)
    other.start()
    with near, pytest.raises(ssl.SSLCertVerificationError, match="purpose"):
        client_context(tmp_path, "stage-1").wrap_socket(near)
    other.join()
    far.close()


@pytest.mark.parametrize("name", ["", "ca", "Stage", "a/b", "..", "-a", "a b", "x" * 64])
def test_what_is_no_name_is_refused(folder: Path, name: str):
    with pytest.raises(ConfigError, match="is not a valid name for a stage"):
        Keyring(folder, lambda: NOW).add(STAGE, name)


def test_a_name_belongs_to_one_member(folder: Path):
    with pytest.raises(ConfigError, match="a member that is not a"):
        Keyring(folder, lambda: NOW).add(ROUTER, "stage-1")


def test_members_are_added_only_where_the_authoritys_key_is(folder: Path):
    (folder / "ca.key").unlink()
    with pytest.raises(ConfigError, match="only one of"):
        Keyring(folder)


def test_a_damaged_authority_is_refused(folder: Path):
    (folder / "ca.key").write_text("nonsense")
    with pytest.raises(CorruptFileError, match="the ring's certificate or its key is damaged"):
        Keyring(folder)


def test_wrong_keys_are_refused_with_a_reason(folder: Path, tmp_path: Path):
    def refused(now: float = NOW) -> str:
        with pytest.raises(ConfigError) as caught:
            server_context(folder, "stage-1", lambda: now)
        return str(caught.value)

    assert "stage-1.pem expired on 2028-01-15" in refused(NOW + 366 * DAY)
    other = Keyring(tmp_path / "other", lambda: NOW)
    other.add(STAGE, "stage-1")
    (folder / "stage-1.key").write_bytes((other.folder / "stage-1.key").read_bytes())
    assert "stage-1.key is not the key of" in refused()
    (folder / "stage-1.pem").write_bytes((other.folder / "stage-1.pem").read_bytes())
    assert "is not signed by the ca.pem in its folder" in refused()
    (folder / "stage-1.pem").write_text("nonsense")
    assert "stage-1.pem is not a PEM certificate" in refused()
    (folder / "stage-1.key").unlink()
    assert "stage-1.key is missing; copy it" in refused()


@pytest.mark.parametrize(
    "uris",
    [
        [],
        ["blocktrain:king/a"],
        ["blocktrain:stage/"],
        ["blocktrain:stage/a b"],
        ["https://a/blocktrain:stage/a"],
        ["blocktrain:stage/a", "blocktrain:router/a"],
    ],
)
def test_a_certificate_without_exactly_one_role_is_refused(uris: list[str]):
    with pytest.raises(UntrustedError):
        member_of({"subjectAltName": tuple(("URI", uri) for uri in uris)})
    assert member_of({"subjectAltName": (("URI", "blocktrain:stage/a.b-1"),)}) == (STAGE, "a.b-1")
