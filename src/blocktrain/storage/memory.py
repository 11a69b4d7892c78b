"""Memory that is asked for once and used again and again, straight from the system.

It begins where a page does, and is in large pages where the system has them. Knows nothing of what
it is for.
"""

import mmap

_OWN = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}  # else it would be a file's, for others too
    if hasattr(mmap, "MAP_PRIVATE")
    else {}
)


def own_memory(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, **_OWN)
    advise(memory, "MADV_HUGEPAGE")
    return memory


def advise(memory: mmap.mmap, advice: str) -> None:
    """Where the system knows of this; it may refuse as well, and nothing depends on it."""
    try:
        memory.madvise(getattr(mmap, advice))
    except (AttributeError, OSError):
        return
