"""How many threads torch computes with, and how they wait for each other.

OpenMP reads from the environment how threads wait, once, when torch is imported: so the command
line sets it before that, and processes it starts inherit it. `import blocktrain` sets nothing: a
library leaves its host's environment alone. A bench that trains in its own process measures torch
as it comes.
"""

import os

# How often a waiting thread looks for work before it sleeps, by GNU's OpenMP, which torch brings
# along on Linux. Its own number holds a core that another program keeps this one's other threads
# from; at 0, OMP_WAIT_POLICY=PASSIVE, every barrier is a system call. See docs/RESULTS.md.
SPINS = "3000"
WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
COUNT = "OMP_NUM_THREADS"


def sleep_at_barriers() -> None:
    """Let waiting threads give up their core soon, unless the user has decided how they wait."""
    if not any(name in os.environ for name in WAITING):
        os.environ["GOMP_SPINCOUNT"] = SPINS


def use(count: int) -> None:
    """Compute with this many threads, here and in processes that are told no other number."""
    os.environ[COUNT] = str(count)
    import torch  # which takes the number of another variable, or of the cores, if it is less

    torch.set_num_threads(count)


def machine_threads() -> int:
    """What all processes of this command may use together: what was set, or all processors."""
    count = os.environ.get(COUNT, "")
    return int(count) if count.isdecimal() and int(count) else os.cpu_count() or 1
