"""python -m blocktrain: the same as the command blocktrain."""

from blocktrain.cli import run

if __name__ == "__main__":
    run()
