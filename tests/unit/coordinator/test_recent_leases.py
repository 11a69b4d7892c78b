"""Leases handed out a moment ago."""

from blocktrain.coordinator.recent_leases import HeldLease, RecentLeases
from blocktrain.protocol.messages import Blob
from blocktrain.storage.ledger import Version

BASE = Version(0, 1, Blob(name="ab" * 32, size=9), None, None, 10, 0.0)
HELD = HeldLease("worker01", "key", BASE)


def test_a_lease_is_known_to_its_worker_alone():
    recent = RecentLeases()
    recent.remember("lease001", HELD)
    assert recent.of("worker01", "lease001") == HELD
    assert recent.of("worker02", "lease001") is None
    assert recent.of("worker01", "lease002") is None
    recent.forget("lease001")
    assert recent.of("worker01", "lease001") is None
    recent.forget("lease001")


def test_the_oldest_are_forgotten_first():
    recent = RecentLeases(most=2)
    for number in range(3):
        recent.remember(f"lease{number}", HELD)
    found = [recent.of("worker01", f"lease{number}") for number in range(3)]
    assert found == [None, HELD, HELD]
