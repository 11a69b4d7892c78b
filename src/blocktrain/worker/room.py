"""Memory that one version of a block after another is received into.

Memory that is new has to be found and cleared by the system, page by page: for a version of many
megabytes that takes longer than to receive it. So it is kept; while nothing that counts is in it,
the system is told that it may take it for others. Knows nothing of versions.
"""

import mmap

from blocktrain.storage.memory import advise, own_memory


class Room:
    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def of(self, size: int) -> memoryview:
        """So many bytes; whatever was received before is no longer to be relied on."""
        if self._memory is None or len(self._memory) != max(size, 1):
            self._memory = own_memory(max(size, 1))
        return memoryview(self._memory)[:size]

    def rest(self) -> None:
        """What is in it does not count any more."""
        if self._memory:
            advise(self._memory, "MADV_FREE")
