"""Trains the blocks of a cascade in turns on one device, as if every block had a worker.

Not run by itself; bench/quality.py uses it. In every round each block trains a few steps on what
the other blocks had published when the round began. Then all blocks publish. So predecessors are up
to `stale` steps old, as in a run where every block has a worker of its own. A block can get a share
of the others' steps, as in an uneven swarm; its learning rate still reaches the end of its
schedule. If the settings have a lead, each block begins when the one before has that lead.
Deterministic, so that experiments can be repeated.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from blocktrain.config import Config
from blocktrain.data.corpus import Corpus
from blocktrain.errors import ConfigError
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.checkpoints import Progress
from blocktrain.training.device import Compute
from blocktrain.training.trainer import BlockTrainer


class Board:
    """Versions the blocks have published, copied so that training goes on underneath."""

    def __init__(self) -> None:
        self._versions: dict[int, int] = {}
        self._weights: dict[int, dict[str, Tensor]] = {}

    def version(self, block: int) -> int | None:
        return self._versions.get(block)

    def weights(self, block: int) -> Mapping[str, Tensor]:
        return self._weights[block]

    def publish(self, trainer: BlockTrainer) -> None:
        named = trainer.module.named_parameters()
        self._weights[trainer.block] = {name: p.detach().clone() for name, p in named}
        self._versions[trainer.block] = trainer.step


def train_in_lockstep(
    config: Config,
    corpus: Corpus,
    compute: Compute,
    run: RunDir | None = None,
    *,
    stale: int,
    shares: Sequence[float] = (),
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> list[BlockTrainer]:
    """Train every block of a run side by side in virtual time; returns their trainers.

    With a run directory the result is kept there; what an interrupted lockstep left is dropped,
    because its blocks would no longer be in step.
    """
    shares = shares or [1.0] * config.block_count
    if len(shares) != config.block_count or not all(0.0 < share <= 1.0 for share in shares):
        raise ConfigError(f"shares must be {config.block_count} numbers above 0 and up to 1")
    stores = [run.block(block) if run else None for block in range(config.block_count)]
    for store in stores:
        if store:
            store.clear()
    board = Board()
    trainers = [
        BlockTrainer(
            _slowed(config, share, stale),
            block,
            corpus,
            compute,
            stores[block],
            board,
        )
        for block, share in enumerate(shares)
    ]
    for trainer in trainers:
        if not config.inherits:  # otherwise it inherits when it begins
            trainer.restore()
        board.publish(trainer)
    last_step = config.first_step(config.block_count - 1) + config.train.steps
    try:
        for passed in range(stale, last_step + stale, stale):
            begun = [trainer for trainer in trainers if passed > config.first_step(trainer.block)]
            for trainer in begun:
                if trainer.predecessors:
                    trainer.predecessors.close()
                own = (passed - config.first_step(trainer.block)) * shares[trainer.block]
                trainer.train(on_progress, until=max(1, round(own)))
            for trainer in begun:
                board.publish(trainer)
    finally:
        for trainer in trainers:
            if trainer.predecessors:
                trainer.predecessors.close()
    return trainers


def _slowed(config: Config, share: float, stale: int) -> Config:
    """A block's own settings: fewer steps, and looks at the others as often in virtual time."""
    return config.with_settings(
        train__steps=max(1, round(config.train.steps * share)),
        train__warmup=round(config.train.warmup * share),
        objective__refresh_every=math.ceil(stale * share),  # a round's most steps
    )
