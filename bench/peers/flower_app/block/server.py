"""Federated averaging by Flower's own strategy; a round begins when a file says so, and says by
another that it is over."""

import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()
MANY = 1_000_000
POLL_SECONDS = 0.005


class OnDemand(FedAvg):
    def __init__(self, folder: Path) -> None:
        super().__init__(
            fraction_evaluate=0.0, min_train_nodes=2, min_evaluate_nodes=0, min_available_nodes=2
        )
        self.folder = folder

    def configure_train(self, server_round: int, *rest: Any) -> Any:
        self._say("waiting", server_round)
        while not (self.folder / f"go-{server_round}").exists():
            time.sleep(POLL_SECONDS)
        return super().configure_train(server_round, *rest)

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        arrays, metrics = super().aggregate_train(server_round, replies)
        self._say("done", server_round)
        (block,) = arrays.to_numpy_ndarrays()
        assert block[-1] == 0.5 * server_round, "that is not the mean"
        return arrays, metrics

    def _say(self, word: str, server_round: int) -> None:
        (self.folder / f"{word}-{server_round}").touch()


@app.main()
def main(grid: Grid, context: Context) -> None:
    block = np.zeros(int(context.run_config["numbers"]), np.float32)
    strategy = OnDemand(Path(str(context.run_config["folder"])))
    strategy.start(grid, ArrayRecord([block]), num_rounds=MANY, timeout=MANY)
