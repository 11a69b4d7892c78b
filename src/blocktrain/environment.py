"""Every environment variable that blocktrain reads or sets, each with a sentence about it.

docs/REFERENCE.md lists them; a test refuses any other name in the code.
"""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    name: str
    doc: str

    def get(self) -> str:
        """Its value, or an empty string if it is not set."""
        return os.environ.get(self.name, "")

    def set(self, value: str) -> None:
        """Set it for this process and for the processes that this one starts."""
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
    "API keys that `blocktrain serve` accepts, separated by spaces; other users of the machine"
    " cannot see them there, as they can see a command line",
)
LOG_LEVEL = Variable(
    "BLOCKTRAIN_LOG_LEVEL", "debug, info, warning or error; --log-level takes precedence"
)
LOG_FORMAT = Variable("BLOCKTRAIN_LOG_FORMAT", "text or json; --log-format takes precedence")
FAULTS = Variable(
    "BLOCKTRAIN_FAULTS",
    "for tests only: points at which the process kills itself, such as claimed@2=kill",
)
THREADS = Variable(
    "OMP_NUM_THREADS",
    "number of threads that torch computes with; --threads takes precedence and sets it for the"
    " processes that the command starts. Default: one per processor core",
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
    CACHE, API_KEY, LOG_LEVEL, LOG_FORMAT, FAULTS,
    XDG_CACHE_HOME, THREADS, SPIN_COUNT, WAIT_POLICY, C_COMPILER,
)  # fmt: skip

# Not read by blocktrain itself, but by libraries that it uses.
OF_LIBRARIES = (
    Variable(
        "HTTP_PROXY, HTTPS_PROXY, NO_PROXY",
        "proxies for downloads and for a worker's requests to its coordinator (httpx)",
    ),
    Variable(
        "SSL_CERT_FILE, SSL_CERT_DIR",
        "certificate authorities to trust, where an invite pins no certificate (OpenSSL)",
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
    Variable(
        "CUDA_VISIBLE_DEVICES", "the GPUs that a process may see and how it numbers them (CUDA)"
    ),
    Variable("MKL_NUM_THREADS", "counts instead of OMP_NUM_THREADS if it is set (torch)"),
    Variable("NO_COLOR, FORCE_COLOR, COLUMNS", "colours and width of tables and bars (rich)"),
)
