"""The first weights of a block that inherits from the block before it.

Its layers and tail start as that block's tail, its head as that block's head. All other weights
stay as they were initialised. Further layers have no effect at first, because the maps that write
to the residual stream are initialised to zero.
"""

from blocktrain.config import Config
from blocktrain.storage.tensor_file import Tensors


def inherited_name(config: Config, block: int, name: str) -> str | None:
    """The weight of the block before that becomes weight `name` of this block; None: it keeps its
    initial value."""
    kind, _, rest = name.partition(".")
    if kind in ("head", "norm"):
        return name
    if kind not in ("layers", "tail"):
        return None
    number, _, leaf = rest.partition(".")
    layer = int(number) + (config.depths[block] if kind == "tail" else 0)
    return f"tail.{layer}.{leaf}" if layer < config.tail_layers(block - 1) else None


def inherited(config: Config, block: int, initial: Tensors, before: Tensors) -> Tensors:
    """The weights that a block starts from. `before`: those of the block before it."""
    sources = {name: inherited_name(config, block, name) for name in initial}
    return {
        name: initial[name] if source is None else before[source]
        for name, source in sources.items()
    }
