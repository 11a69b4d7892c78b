import hashlib
import ipaddress
import ssl
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID

from blocktrain.errors import ConfigError, CorruptFileError
from blocktrain.protocol.tls import Authority

NOW = 1_800_000_000.5
THEN = datetime(2027, 1, 15, 8, 0, tzinfo=UTC)
AUTHORITY = Authority.create("run00001", NOW)


def parsed(pem: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem.encode())


def issued(*hosts: str, now: float = NOW) -> x509.Certificate:
    return parsed(AUTHORITY.issue_server(hosts, now).cert_pem)


def test_the_fingerprint_is_the_hash_of_the_certificate():
    der = ssl.PEM_cert_to_DER_cert(AUTHORITY.certificate_pem)
    assert AUTHORITY.fingerprint == hashlib.sha256(der).hexdigest()


def test_the_authority_signs_servers_but_no_other_authority():
    certificate = parsed(AUTHORITY.certificate_pem)
    limits = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert limits.critical and limits.value.ca and limits.value.path_length == 0
    usage = certificate.extensions.get_extension_for_class(x509.KeyUsage)
    assert usage.critical and usage.value.key_cert_sign and not usage.value.digital_signature
    certificate.verify_directly_issued_by(certificate)


def test_the_authority_is_good_for_ten_years_from_an_hour_ago():
    certificate = parsed(AUTHORITY.certificate_pem)
    assert certificate.not_valid_before_utc == THEN - timedelta(hours=1)
    assert certificate.not_valid_after_utc == THEN + timedelta(days=3652)


def test_a_server_certificate_is_for_servers_and_signs_nothing():
    certificate = issued("localhost")
    extensions = certificate.extensions
    assert not extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    purposes = extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(purposes) == [ExtendedKeyUsageOID.SERVER_AUTH]
    certificate.verify_directly_issued_by(parsed(AUTHORITY.certificate_pem))


def test_a_server_certificate_is_good_for_a_year_from_an_hour_ago():
    certificate = issued("localhost")
    assert certificate.not_valid_before_utc == THEN - timedelta(hours=1)
    assert certificate.not_valid_after_utc == THEN + timedelta(days=365)


def test_a_server_certificate_does_not_outlast_the_authority():
    late = NOW + timedelta(days=3600).total_seconds()
    assert issued("localhost", now=late).not_valid_after_utc == THEN + timedelta(days=3652)


def test_hosts_are_names_and_addresses():
    certificate = issued("a.example", "10.0.0.7", "::1", "[fd00::2]", "a.example")
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["a.example"]
    assert names.get_values_for_type(x509.IPAddress) == [
        ipaddress.ip_address(address) for address in ("10.0.0.7", "::1", "fd00::2")
    ]


@pytest.mark.parametrize("hosts", [[], [""], ["höst"], ["a b"], ["https://a"], ["a" * 254]])
def test_what_is_no_host_is_refused(hosts: list[str]):
    with pytest.raises(ConfigError):
        AUTHORITY.issue_server(hosts, NOW)


def test_every_server_gets_a_key_of_its_own():
    first, second = (AUTHORITY.issue_server(["localhost"], NOW) for _ in range(2))
    assert first.key_pem != second.key_pem
    assert parsed(first.cert_pem).serial_number != parsed(second.cert_pem).serial_number
    key = serialization.load_pem_private_key(first.key_pem.encode(), password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name == "secp256r1"


def test_a_stored_authority_comes_back_as_it_was():
    loaded = Authority.load(AUTHORITY.certificate_pem, AUTHORITY.key_pem)
    assert loaded.fingerprint == AUTHORITY.fingerprint
    assert loaded.certificate_pem == AUTHORITY.certificate_pem
    assert loaded.key_pem == AUTHORITY.key_pem


def test_the_longest_name_of_a_run_fits():
    assert Authority.create("r" * 64, NOW).fingerprint


def test_a_run_may_have_any_name():
    """Even that of its servers' certificates, which then must not look self-signed."""
    named = Authority.create("coordinator", NOW)
    certificate = parsed(named.issue_server(["localhost"], NOW).cert_pem)
    assert certificate.subject != certificate.issuer


def test_keys_stay_out_of_logs():
    assert "PRIVATE" not in repr(AUTHORITY)
    assert "PRIVATE" not in repr(AUTHORITY.issue_server(["localhost"], NOW))


def test_a_damaged_authority_is_refused():
    certificate, key = AUTHORITY.certificate_pem, AUTHORITY.key_pem
    other_kind = ed25519.Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    for cert_pem, key_pem in [
        ("", key),
        (certificate, ""),
        (certificate[:200], key),
        (certificate, key[:100]),
        (certificate, other_kind.decode()),
        (certificate, Authority.create("run00001", NOW).key_pem),
    ]:
        with pytest.raises(CorruptFileError):
            Authority.load(cert_pem, key_pem)
