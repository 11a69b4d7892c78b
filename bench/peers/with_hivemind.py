"""hivemind's side: two peers that average a block by all-reduce, with its defaults."""

import sys

from side import Peer, all_peers, answer_rounds, say


def peer(number: int, numbers: int, others: list[str]) -> None:
    import hivemind
    import torch

    torch.set_num_threads(1)
    dht = hivemind.DHT(initial_peers=others, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    averager = hivemind.averaging.DecentralizedAverager(
        [torch.zeros(numbers)],
        dht,
        prefix="block",
        target_group_size=2,
        min_group_size=2,
        start=True,
    )
    print(" ".join(map(str, dht.get_visible_maddrs())), flush=True)
    for line in sys.stdin:
        if line.strip() == "average":
            assert averager.step(timeout=60) is not None, "no group was found"
        with averager.get_tensors() as tensors:
            if line.strip() == "train":
                tensors[0].fill_(float(number))
            elif line.strip() == "check":
                assert tensors[0][-1].item() == 0.5, "that is not the mean"
        say("done")


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
        peer(int(sys.argv[2]), int(sys.argv[1]), sys.argv[3:])
