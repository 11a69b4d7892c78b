"""How often a worker that holds a lease says so."""

LONGEST_INTERVAL = 10.0
SHORTEST_INTERVAL = 0.2
SHARE_OF_LEASE = 0.25


def report_interval(seconds_left: float) -> float:
    """Seconds between two signs of life, so that a lost lease is noticed within a part of it."""
    return max(SHORTEST_INTERVAL, min(LONGEST_INTERVAL, SHARE_OF_LEASE * seconds_left))
