"""The kinds of objective a run can have, as flags that every package can ask for.

Imports nothing, torch least of all. What a kind computes is in model/stack.py (its blocks and how
they are joined), train/objective.py (its loss) and serve/stage/compute.py (its steps in a ring).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Kind:
    name: str
    whole_model: bool = False  # one block holds all layers: the end-to-end reference
    reads_predecessors: bool = False  # block k reads features of the frozen blocks 0 to k - 1
    has_tails: bool = False  # every block but the last predicts through private layers
    denoises: bool = False  # a guess z travels between blocks, at falling levels of noise sigma
    streams: int = 1  # streams a block computes per position: context, and a noisy target
    starts: tuple[str, ...] = ("none",)  # what z can start from when the model is scored
    # The readings that `blocktrain demo` shows: the name in its table -> start and readout.
    demo_readings: Mapping[str, str] = field(default_factory=dict)


DENOISE = Kind(
    "denoise",
    denoises=True,
    streams=2,
    starts=("mean", "noise"),
    demo_readings={"product": "mean start, product", "as in the paper": "noise start, final"},
)
CASCADE = Kind(
    "cascade",
    reads_predecessors=True,
    has_tails=True,
    demo_readings={"product": "none start, product", "final": "none start, final"},
)
END_TO_END = Kind("end_to_end", whole_model=True)

KINDS = {kind.name: kind for kind in (DENOISE, CASCADE, END_TO_END)}
