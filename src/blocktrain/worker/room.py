"""Memory that one version of a block after another is received into.

Memory that is new has to be found and cleared by the system, page by page: for a version of many
megabytes that takes longer than to receive it. So it is kept; while nothing that counts is in it,
the system is told that it may take it for others. Knows nothing of versions.
"""

import mmap

_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)
_FREE = getattr(mmap, "MADV_FREE", None)


class Room:
    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def of(self, size: int) -> memoryview:
        """So many bytes; whatever was received before is no longer to be relied on."""
        if self._memory is None or len(self._memory) != max(size, 1):
            self._memory = mmap.mmap(-1, max(size, 1))
            self._advise(_HUGE)
        return memoryview(self._memory)[:size]

    def rest(self) -> None:
        """What is in it does not count any more."""
        self._advise(_FREE)

    def _advise(self, advice: int | None) -> None:
        """Where the system takes any; it may refuse, and nothing depends on it."""
        if self._memory is None or advice is None:
            return
        try:
            self._memory.madvise(advice)
        except OSError:
            return
