"""The bound on what one source may unpack to, so that a small archive cannot fill the disk."""

from dataclasses import dataclass

from blocktrain.errors import DataError


@dataclass
class Budget:
    spec: str
    left: int

    def spend(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise DataError(f"{self.spec}: unpacks to more than data.unpack_limit_mb allows")
