"""The number of threads that torch computes with, and how they wait for each other.

GNU's OpenMP, which torch uses on Linux, reads from the environment how threads wait. It does so
once, when torch is imported, so the command line sets it before that, and the processes it starts
inherit it. `import blocktrain` sets nothing: a library leaves its host's environment alone.
"""

import os

from blocktrain.environment import SPIN_COUNT, THREADS, WAIT_POLICY

# How often a waiting thread checks for work before it sleeps. With OpenMP's own default, waiting
# threads occupy cores that other programs need, and all slow down; with 0 (OMP_WAIT_POLICY=PASSIVE)
# every barrier costs a system call. See docs/results/memory-and-speed.md.
SPINS = "8000"


def sleep_at_barriers() -> None:
    """Make waiting threads sleep soon, unless the user has decided how they wait."""
    if not SPIN_COUNT.is_set and not WAIT_POLICY.is_set:
        SPIN_COUNT.set(SPINS)


def use(count: int) -> None:
    """Compute with this many threads, here and in the processes that this one starts."""
    THREADS.set(str(count))
    import torch  # which would prefer MKL_NUM_THREADS, or fewer threads if there are fewer cores

    torch.set_num_threads(count)


def machine_threads() -> int:
    """The threads that all processes of a command may use together: as set, or one per core."""
    count = THREADS.get()
    return int(count) if count.isdecimal() and int(count) else os.cpu_count() or 1
