"""Bytes for people: three digits and a unit that fits."""

UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def size(count: float) -> str:
    for unit in UNITS:
        if count < 999.5 or unit == UNITS[-1]:
            break
        count /= 1000
    if unit == "bytes" or count >= 99.95:
        return f"{count:,.0f} {unit}"
    return f"{count:.1f} {unit}"
