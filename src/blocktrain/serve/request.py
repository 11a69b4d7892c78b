"""What a client asks for and what it gets, as values. Knows nothing of HTTP, stages or tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from blocktrain.core.choice import Sampling

__all__ = ["DRAFTS", "MODES", "Account", "Piece", "Request", "Sampling"]

MODES = ("ar", "sweep", "speculative")
DRAFTS = ("head", "ngram")
GREEDY = Sampling()


@dataclass(frozen=True)
class Request:
    prompt: bytes
    most_bytes: int
    mode: str = "speculative"
    passes: int = 1  # traversals of a sweep; 0: as many as it takes to converge
    drafts: str = ""  # whose drafts: of DRAFTS, or what the mode does by itself
    sampling: Sampling = GREEDY
    stop: tuple[bytes, ...] = ()
    top_log_probs: int = 0


@dataclass(frozen=True)
class Piece:
    """Bytes that are final, in order, each with the log-probability it was picked with."""

    data: bytes
    log_probs: tuple[float, ...] = ()
    top: tuple[dict[int, float], ...] = ()  # per byte, the likeliest bytes, where asked for


@dataclass
class Account:
    """What an answer cost. `reason` is set when it is complete: "stop" or "length"."""

    prompt_bytes: int = 0
    output_bytes: int = 0
    traversals: int = 0
    drafted: int = 0
    accepted: int = 0
    replays: int = 0
    stage_seconds: dict[str, float] = field(default_factory=dict)
    reason: str = ""

    def took(self, seconds: Mapping[str, float]) -> None:
        for stage, more in seconds.items():
            self.stage_seconds[stage] = self.stage_seconds.get(stage, 0.0) + more

    @property
    def bytes_per_traversal(self) -> float:
        return self.output_bytes / self.traversals if self.traversals else 0.0
