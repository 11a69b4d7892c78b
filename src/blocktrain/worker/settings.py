"""What the owner of a machine allows the worker to use."""

import platform
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class WorkerSettings:
    folder: Path  # for what the worker keeps on disk; one worker at a time
    device: str = "auto"
    blocks: tuple[int, ...] | None = None  # None: any
    memory_bytes: int | None = None  # None: no limit
    max_bandwidth: float | None = None  # bytes per second, both directions together
    until: float | None = None  # seconds since 1970 after which it leaves
    idle_only: bool = False
    data: str | None = None  # where its owner has the run's text, as in data.source
    name: str = field(default_factory=platform.node)

    def is_late(self, now: float) -> bool:
        """Whether the time the owner gave is over."""
        return self.until is not None and now >= self.until
