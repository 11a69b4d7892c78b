"""States the total compute of the quality rows in README and docs/RESULTS.md.

    PYTHONPATH=src python bench/compute.py

Three units for a trained layer, one for a frozen one before it, heads counted; nothing is trained.
Every row is a preset and changes to it; compute is relative to the end-to-end row of its table.
"""

import argparse
from pathlib import Path

from blocktrain.config import load_config
from blocktrain.config.compute import total_flops

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
END_TO_END = ["objective.kind=end_to_end"]
ALONE = [*END_TO_END, "model.blocks=1", "model.depths=[]"]
# Model, preset, changes to it, and how many such models the row needs.
ROWS: list[tuple[str, str, list[str], int]] = [
    ("end-to-end, WikiText-2, small", "wikitext2-small", END_TO_END, 1),
    ("4 denoising blocks", "wikitext2-small", [], 1),
    ("cascade", "wikitext2-small-cascade", [], 1),
    ("end-to-end, repeated WikiText-2, 38M", "wikitext2-38m", END_TO_END, 1),
    ("4 denoising blocks", "wikitext2-38m", [], 1),
    ("end-to-end, Wikipedia, 38M", "wikipedia-38m", END_TO_END, 1),
    ("4 denoising blocks", "wikipedia-38m", [], 1),
    ("cascade, side by side", "wikipedia-38m-cascade", [], 1),
    ("end-to-end, 6 layers", "wikipedia-38m", [*ALONE, "model.layers=6"], 1),
    ("product of four of them", "wikipedia-38m", [*ALONE, "model.layers=6"], 4),
]


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    print("| model | steps per block | FLOP, all workers | x end-to-end |\n|---|---|---|---|")
    reference = 1
    for name, preset, changes, count in ROWS:
        config = load_config(CONFIGS / f"{preset}.toml", changes)
        flops = count * total_flops(config)
        if name.startswith("end-to-end,") and "layers" not in name:
            reference = flops
        print(f"| {name} | {config.train.steps:,} | {flops:.3g} | {flops / reference:.2f} |")


if __name__ == "__main__":
    main()
