"""The HTTP port's certificate: what is wrong with it is told before anybody connects."""

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from tests.support.certificate import DAY, NOW, written

from blocktrain.errors import ConfigError
from blocktrain.serve.http.http_server import https_context, in_the_clear


def refused(certificate: Path | None, key: Path | None, now: float = NOW) -> str:
    with pytest.raises(ConfigError) as caught:
        https_context(certificate, key, lambda: now)
    return str(caught.value)


def test_a_certificate_and_its_key_make_a_context_and_neither_makes_none(tmp_path: Path):
    pair = written(tmp_path)
    assert https_context(pair.certificate, pair.key, lambda: NOW)
    assert https_context(None, None) is None


def test_what_is_wrong_is_told_in_words(tmp_path: Path):
    pair, other = written(tmp_path / "one"), written(tmp_path / "other")
    assert "go together" in refused(pair.certificate, None)
    assert "go together" in refused(None, pair.key)
    assert "nowhere.pem is missing" in refused(tmp_path / "nowhere.pem", pair.key)
    assert "is missing, or no file" in refused(pair.certificate, tmp_path)
    assert "one/site.key is no certificate" in refused(pair.key, pair.key)
    assert "one/site.pem is no private key" in refused(pair.certificate, pair.certificate)
    assert "other/site.key is not the key of" in refused(pair.certificate, other.key)
    assert "site.pem expired on 2028-01-15" in refused(*pair.files, now=NOW + 366 * DAY)
    assert "is not valid before 2027-01-15" in refused(*pair.files, now=NOW - DAY)


def test_a_locked_key_is_refused_instead_of_asked_for(tmp_path: Path):
    pair = written(tmp_path)
    key = load_pem_private_key(pair.key.read_bytes(), password=None)
    locked = key.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"a passphrase")
    )
    pair.key.write_bytes(locked)
    assert "locked by a passphrase" in refused(*pair.files)


@pytest.mark.parametrize(
    ("host", "clear"),
    [("127.0.0.1", False), ("127.1.2.3", False), ("::1", False), ("0.0.0.0", True),
     ("::", True), ("192.0.2.7", True)],
)  # fmt: skip
def test_only_other_machines_and_only_without_tls_read_along(
    tmp_path: Path, host: str, clear: bool
):
    assert in_the_clear(host, None) is clear
    assert not in_the_clear(host, https_context(*written(tmp_path).files, lambda: NOW))
