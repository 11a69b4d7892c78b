"""Seconds for people: a unit that fits."""

import math


def duration(seconds: float) -> str:
    if math.isinf(seconds):
        return "never"
    if seconds < 1:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
