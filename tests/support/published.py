"""Versions of blocks put out by hand, for tests of whoever takes them over."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn


class Shelf:
    """Holds copies of what was put on it, and notes who came to look and what was taken."""

    def __init__(self, on_look: Callable[[int], None] = lambda block: None) -> None:
        self.on_look = on_look
        self.taken: list[tuple[int, int]] = []  # block, version
        self._versions: dict[int, int] = {}
        self._weights: dict[int, dict[str, Tensor]] = {}

    def put(self, block: int, version: int, module: nn.Module) -> None:
        self._versions[block] = version
        self._weights[block] = {n: p.detach().clone() for n, p in module.named_parameters()}

    def version(self, block: int) -> int | None:
        self.on_look(block)
        return self._versions.get(block)

    def weights(self, block: int) -> Mapping[str, Tensor]:
        self.taken.append((block, self._versions[block]))
        return self._weights[block]
