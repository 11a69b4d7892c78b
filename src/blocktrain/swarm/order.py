"""The order in which a run's blocks train: which are open, and how many batches they hand out.

Pure decisions: no clock, no files. There are three orders: all blocks at once; each at least a
`lead` behind the one before it; in turns of `turn_steps`, of which a relay has one per block and
phase.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self, TypeVar

from blocktrain.config import Config
from blocktrain.config.schedule import Stretch, turn
from blocktrain.swarm.state import BlockView

Block = TypeVar("Block", bound=BlockView[Any])


class Order(NamedTuple):
    lead: float = 0.0
    turn_steps: int = 0  # 0: no turns
    inherits: bool = False
    extended_at: tuple[int, ...] = ()  # former ends of an extended run

    @classmethod
    def of(cls, config: Config) -> Self:
        return cls(config.lead, config.turn_steps, config.inherits, config.train.extended_at)

    @property
    def waits(self) -> bool:
        """Whether blocks wait for other blocks."""
        return self.lead > 0.0 or self.turn_steps > 0

    def open_blocks(self, blocks: Sequence[Block], loaded_block: int | None = None) -> list[Block]:
        """The blocks that may be leased. `loaded_block`: the worker's own, for which only merged
        batches count as progress. Otherwise two equally fast workers would swap blocks whenever the
        first one's update arrives a little later."""
        return [
            block for block in self._in_order(blocks, loaded_block) if not self._must_inherit(block)
        ]

    def heirs(self, blocks: Sequence[Block]) -> list[Block]:
        """The blocks that would be open if they had inherited from the block before them."""
        return [block for block in self._in_order(blocks, None) if self._must_inherit(block)]

    def available(self, block: BlockView[Any]) -> int:
        """How many batches of an open block may be leased now."""
        if not self.turn_steps:
            return block.to_hand_out
        later_turns = block.total_batches - self._turn(block).end
        return max(0, block.to_hand_out - later_turns)

    def steps_left(self, blocks: Sequence[BlockView[Any]]) -> int:
        """The batches that must be trained before workers have to wait."""
        considered = self.open_blocks(blocks) if self.turn_steps else blocks
        return sum(map(self.available, considered))

    def _turn(self, block: BlockView[Any]) -> Stretch:
        ends = (*self.extended_at, block.total_batches)
        return turn(ends, self.turn_steps, block.merged_batches)

    def _must_inherit(self, block: BlockView[Any]) -> bool:
        return self.inherits and block.index > 0 and block.version == 0

    def _in_order(self, blocks: Sequence[Block], loaded_block: int | None) -> list[Block]:
        if self.turn_steps:
            unfinished = [block for block in blocks if block.merged_batches < block.total_batches]
            turns = {block.index: self._turn(block) for block in unfinished}
            return sorted(unfinished, key=lambda block: (turns[block.index], block.index))[:1]
        if not self.lead:
            return list(blocks)
        by_index = {block.index: block for block in blocks}
        return [
            block
            for block in blocks
            if self._has_lead(by_index.get(block.index - 1), block, loaded_block)
        ]

    def _has_lead(
        self, before: BlockView[Any] | None, block: BlockView[Any], loaded_block: int | None
    ) -> bool:
        if before is None or before.merged_batches == before.total_batches:
            return True
        done = block.merged_batches if block.index == loaded_block else block.under_way
        behind = before.merged_batches / before.total_batches - done / block.total_batches
        return behind >= self.lead
