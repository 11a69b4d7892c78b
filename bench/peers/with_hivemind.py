"""hivemind's side: two peers that average a block by all-reduce, with its defaults."""

import sys

import numpy as np
from learned import LOOKED_AT, WORKERS, check, learned, mean_of
from side import Peer, all_peers, answer_rounds, follow


class Worker:
    def __init__(self, number: int, numbers: int, others: list[str]) -> None:
        import hivemind
        import torch

        torch.set_num_threads(1)
        self.number, self.rounds = number, 0
        self.expected = np.zeros(0, np.float32)
        self.dht = hivemind.DHT(
            initial_peers=others, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True
        )
        self.averager = hivemind.averaging.DecentralizedAverager(
            [torch.zeros(numbers)],
            self.dht,
            prefix="block",
            target_group_size=2,
            min_group_size=2,
            start=True,
        )

    def addresses(self) -> str:
        return " ".join(map(str, self.dht.get_visible_maddrs()))

    def train(self) -> None:
        """Both begin with the same, and go on from the same mean."""
        with self.averager.get_tensors() as tensors:
            block = tensors[0].numpy()
            before = block[:LOOKED_AT].copy()
            block += learned(self.number, self.rounds, block.size)
        self.expected = mean_of([before + learned(w, self.rounds, LOOKED_AT) for w in WORKERS])
        self.rounds += 1

    def average(self) -> None:
        assert self.averager.step(timeout=60) is not None, "no group was found"

    def check(self) -> None:
        with self.averager.get_tensors() as tensors:
            check(tensors[0].numpy(), self.expected)


def work(number: str, numbers: str, others: list[str]) -> None:
    worker = Worker(int(number), int(numbers), others)
    print(worker.addresses(), flush=True)
    follow(train=worker.train, average=worker.average, check=worker.check)


def main(numbers: str) -> None:
    command = [sys.executable, __file__, numbers]
    peers = [Peer([*command, "0"])]
    try:
        address = peers[0].heard()
        peers.append(Peer([*command, "1", *address.split()]))
        peers[1].heard()
        answer_rounds(lambda step: all_peers(peers, step))
    finally:
        for each in peers:
            each.end()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(sys.argv[1])
    else:
        work(sys.argv[2], sys.argv[1], sys.argv[3:])
