"""Bytes as text in the alphabet A-Z a-z 0-9 - _, without padding (RFC 4648, section 5).

One text for one value: what the standard library forgives (foreign characters, padding, stray
bits in the last character) is refused here, so that a changed character is never read past.
"""

import base64


def encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def decode(text: str) -> bytes:
    """The bytes, or ValueError."""
    padded = text.encode("ascii") + b"=" * (-len(text) % 4)
    data = base64.b64decode(padded, altchars=b"-_", validate=True)
    if encode(data) != text:
        raise ValueError("not the one way to write these bytes")
    return data
