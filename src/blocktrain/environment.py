"""All environment variables that blocktrain reads or sets, how torch's threads are set by them, and
the command that runs blocktrain in another process.

Imports no torch. docs/REFERENCE.md lists the variables; a test fails if the code reads any other.
"""

import os
import sys
from dataclasses import dataclass

PROGRAM = (sys.executable, "-m", "blocktrain")  # runs blocktrain in another process


@dataclass(frozen=True)
class Variable:
    name: str
    doc: str

    def get(self) -> str:
        """The variable's value, or an empty string if it is not set."""
        return os.environ.get(self.name, "")

    def set(self, value: str) -> None:
        """Set the variable for this process and for the processes that it starts."""
        os.environ[self.name] = value

    @property
    def is_set(self) -> bool:
        return self.name in os.environ


CACHE = Variable(
    "BLOCKTRAIN_CACHE",
    "folder for downloaded text, tokenised corpora and the folders of workers;"
    " default: blocktrain in XDG_CACHE_HOME, or in ~/.cache",
)
XDG_CACHE_HOME = Variable("XDG_CACHE_HOME", "the user's folder for caches")
API_KEY = Variable(
    "BLOCKTRAIN_API_KEY",
    "API keys that `blocktrain serve` accepts, separated by spaces; unlike a command line, the"
    " variable is not visible to other users of the machine",
)
LOG_LEVEL = Variable(
    "BLOCKTRAIN_LOG_LEVEL", "debug, info, warning or error; --log-level takes precedence"
)
LOG_FORMAT = Variable("BLOCKTRAIN_LOG_FORMAT", "text or json; --log-format takes precedence")
FAULTS = Variable(
    "BLOCKTRAIN_FAULTS",
    "for tests only: points at which the process kills itself, such as claimed@2=kill",
)
COMPLETE = Variable("BLOCKTRAIN_COMPLETE", "set by the scripts of `blocktrain completion`")
THREADS = Variable(
    "OMP_NUM_THREADS",
    "number of torch's compute threads; --threads takes precedence and sets it for the command's"
    " child processes. Default: one per processor core",
)
SPIN_COUNT = Variable(
    "GOMP_SPINCOUNT",
    "how often a waiting thread of GNU's OpenMP checks for work before it sleeps; blocktrain sets"
    " 8000 unless this variable or OMP_WAIT_POLICY is set",
)
WAIT_POLICY = Variable(
    "OMP_WAIT_POLICY", "ACTIVE or PASSIVE; if it is set, blocktrain leaves GOMP_SPINCOUNT alone"
)
C_COMPILER = Variable("CC", "the C compiler that train.compile uses; default: gcc or clang")

OWN = (
    CACHE, API_KEY, LOG_LEVEL, LOG_FORMAT, FAULTS, COMPLETE,
    XDG_CACHE_HOME, THREADS, SPIN_COUNT, WAIT_POLICY, C_COMPILER,
)  # fmt: skip

# Read by libraries, not by blocktrain itself.
OF_LIBRARIES = (
    Variable(
        "HTTP_PROXY, HTTPS_PROXY, NO_PROXY",
        "proxies for downloads and for a worker's requests to its coordinator (httpx)",
    ),
    Variable(
        "SSL_CERT_FILE, SSL_CERT_DIR",
        "certificate authorities to trust if an invite pins no certificate (OpenSSL)",
    ),
    Variable(
        "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN",
        "credentials for chunks in S3-compatible storage (obstore, extra blocktrain[s3])",
    ),
    Variable(
        "AWS_REGION, AWS_ENDPOINT_URL",
        "region and address of that storage, unless the --blobs URL has them (obstore)",
    ),
    Variable(
        "HF_TOKEN, HF_HOME",
        "access token and cache for data.source = hf:NAME (huggingface_hub, extra blocktrain[hub])",
    ),
    Variable("CUDA_VISIBLE_DEVICES", "which GPUs a process can use, and their order (CUDA)"),
    Variable("MKL_NUM_THREADS", "takes precedence over OMP_NUM_THREADS (torch)"),
    Variable("NO_COLOR, FORCE_COLOR, COLUMNS", "colours and width of tables and bars (rich)"),
)

# How often a waiting thread checks for work before it sleeps. By default, waiting threads of
# OpenMP occupy cores that other programs need, and all slow down. With 0 (OMP_WAIT_POLICY=PASSIVE)
# every barrier costs a system call. See docs/results/memory-and-speed.md.
SPINS = "8000"
BELOW_NORMAL = 0x4000  # BELOW_NORMAL_PRIORITY_CLASS of Windows


def sleep_at_barriers() -> None:
    """Make waiting threads sleep early, unless the user has set how they wait.

    GNU's OpenMP, which torch uses on Linux, reads GOMP_SPINCOUNT once, when torch is imported. So
    the command line calls this first, and its child processes inherit the variable. `import
    blocktrain` does not: a library leaves its host's environment alone.
    """
    if not SPIN_COUNT.is_set and not WAIT_POLICY.is_set:
        SPIN_COUNT.set(SPINS)


def machine_threads() -> int:
    """How many threads a command's processes may use together: OMP_NUM_THREADS, or one per core."""
    count = THREADS.get()
    return int(count) if count.isdecimal() and int(count) else cores()


def cores() -> int:
    """The processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def lower_priority(nice: int) -> None:
    """Let other programs go first: raise this process's niceness to `nice`, from 0 to 19. On
    Windows, any number but 0 means below normal."""
    if sys.platform != "win32":
        own = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, 0, max(own, nice))
    elif nice:
        import ctypes

        kernel = ctypes.windll.kernel32
        kernel.SetPriorityClass(kernel.GetCurrentProcess(), BELOW_NORMAL)
