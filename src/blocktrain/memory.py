"""How much memory this process may still use: free memory of the machine, and limits of containers.

Reads what the operating system says. Knows nothing of models and devices.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/")
UNLIMITED = 1 << 60  # the first version of cgroups writes a number near 2**63


@dataclass(frozen=True)
class FreeMemory:
    bytes: int
    source: str  # what sets the limit, for messages


def free_memory(root: Path = ROOT) -> FreeMemory | None:
    """The memory that is free, within the limits of this process's cgroups; None if the system does
    not say. On macOS, which counts free memory differently, all memory of the machine."""
    if sys.platform == "win32":
        return FreeMemory(_free_on_windows(), "this machine")
    limits = [*_machine(root), *_cgroups(root)]
    return min(limits, key=lambda each: each.bytes, default=None)


def _machine(root: Path) -> Iterator[FreeMemory]:
    fields = dict(line.split(":", 1) for line in _lines(root / "proc/meminfo") if ":" in line)
    if available := fields.get("MemAvailable"):
        yield FreeMemory(int(available.split()[0]) * 1024, "this machine")
    elif root == ROOT and "SC_PHYS_PAGES" in os.sysconf_names:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        yield FreeMemory(total, "this machine")


def _cgroups(root: Path) -> Iterator[FreeMemory]:
    """What is left of the limits of this process's cgroups and of those around them."""
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        for group in (inside, *inside.parents):
            yield from _left(mount / group, *names)


def _left(group: Path, limit_file: str, usage_file: str, cache_field: str) -> Iterator[FreeMemory]:
    """What is left of a cgroup's limit; nothing if it has none. Cached files do not count as used,
    since they give way."""
    limit, usage = (_number(group / name) for name in (limit_file, usage_file))
    if limit is None or usage is None or limit >= UNLIMITED:
        return
    statistics = dict(line.split(" ", 1) for line in _lines(group / "memory.stat") if " " in line)
    used = usage - int(statistics.get(cache_field, 0))
    yield FreeMemory(max(0, limit - used), "this container (cgroup)")


def _number(path: Path) -> int | None:
    """The number in a file; None if there is none, such as in "max"."""
    text = "".join(_lines(path))
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


class _WindowsMemory(ctypes.Structure):
    """MEMORYSTATUSEX of the Windows API."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("total", "available", "page", "page_available")),
        *((name, ctypes.c_uint64) for name in ("virtual", "virtual_available", "extended")),
    )


def _free_on_windows() -> int:
    status = _WindowsMemory(length=ctypes.sizeof(_WindowsMemory))
    windll = getattr(ctypes, "windll")  # noqa: B009  # exists on Windows only
    windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
    return int(status.available)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be allocated: by Python or numpy, by torch on the
    CPU, or on a GPU."""
    text = str(error)
    of_torch = "DefaultCPUAllocator" in text or "out of memory" in text
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and of_torch)
