"""Seeds that never meet: every use of randomness mixes its own out of numbers that name it."""

import hashlib


def mixed_seed(*parts: int) -> int:
    """One 63-bit seed out of several numbers; different numbers give unrelated seeds."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1
