"""The HTTP port's certificate is checked before it listens."""

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
from blocktrain.serve.http.http_server import checked_certificate, is_readable_in_transit


def refused(certificate: Path | None, key: Path | None, now: float = NOW) -> str:
    with pytest.raises(ConfigError) as caught:
        checked_certificate(certificate, key, lambda: now)
    return str(caught.value)


def test_a_good_pair_is_accepted_and_so_is_no_pair(tmp_path: Path):
    pair = written(tmp_path)
    assert checked_certificate(*pair.files, lambda: NOW) == pair.files
    assert checked_certificate(None, None) is None


def test_a_bad_pair_is_refused_with_the_reason(tmp_path: Path):
    pair, other = written(tmp_path / "one"), written(tmp_path / "other")
    assert "belong together" in refused(pair.certificate, None)
    assert "belong together" in refused(None, pair.key)
    assert "nowhere.pem is not a file" in refused(tmp_path / "nowhere.pem", pair.key)
    assert "is not a file" in refused(pair.certificate, tmp_path)
    assert "one/site.key is not a PEM certificate" in refused(pair.key, pair.key)
    assert "one/site.pem is not a PEM private key" in refused(pair.certificate, pair.certificate)
    assert "other/site.key is not the key of" in refused(pair.certificate, other.key)
    assert "site.pem expired on 2028-01-15" in refused(*pair.files, now=NOW + 366 * DAY)
    assert "is valid from 2027-01-15" in refused(*pair.files, now=NOW - DAY)


def test_a_key_with_a_passphrase_is_refused(tmp_path: Path):
    pair = written(tmp_path)
    key = load_pem_private_key(pair.key.read_bytes(), password=None)
    locked = key.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"a passphrase")
    )
    pair.key.write_bytes(locked)
    assert "has a passphrase" in refused(*pair.files)


@pytest.mark.parametrize(
    ("host", "clear"),
    [("127.0.0.1", False), ("127.1.2.3", False), ("::1", False), ("0.0.0.0", True),
     ("::", True), ("192.0.2.7", True)],
)  # fmt: skip
def test_traffic_is_readable_only_by_other_machines_and_without_tls(
    tmp_path: Path, host: str, clear: bool
):
    assert is_readable_in_transit(host, None) is clear
    assert not is_readable_in_transit(
        host, checked_certificate(*written(tmp_path).files, lambda: NOW)
    )
