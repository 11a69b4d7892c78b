"""Whom a worker believes: the coordinators of the run it was invited to, and no one else.

The run has its own certificate authority; the invite holds its fingerprint. A worker fetches the
authority's certificate (`GET /v1/ca`) before it trusts anyone, and checks it here. The machine's
own list of authorities plays no part.
"""

import hashlib
import ssl

from blocktrain.errors import ProtocolError, UntrustedError


def pinned_context(ca_pem: str, fingerprint: str) -> ssl.SSLContext:
    """Settings for TLS connections to the run's coordinators; `ca_pem` may come from anyone."""
    certificate = _der(ca_pem)
    if hashlib.sha256(certificate).hexdigest() != fingerprint:
        raise UntrustedError(
            "the run's certificate is not the one the invite names; ask for a new invite"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Any coordinator of the run may answer at any address: behind a tunnel, a forwarded port or
    # an address it got after its certificate was made. That the name is not checked is safe
    # because this authority signs nothing but coordinators of this run: whoever holds a
    # certificate of it is one of those the worker was invited to.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    # The checked bytes, not the text they came in: nothing in it that was not checked is trusted.
    context.load_verify_locations(cadata=certificate)
    return context


def _der(pem: str) -> bytes:
    try:
        if pem.count("-----BEGIN") != 1:
            raise ValueError("not one certificate")
        return ssl.PEM_cert_to_DER_cert(pem)
    except ValueError:
        raise ProtocolError("the coordinator sent something that is no certificate") from None
