"""One request in the engine: what of its answer was computed, sent and read."""

import asyncio
from dataclasses import dataclass, field, replace

import numpy as np

from blocktrain.errors import BlocktrainError
from blocktrain.serve.ring.activations import Predictions, Row
from blocktrain.serve.router.decode import Decoding, Proposal
from blocktrain.serve.router.output import OutputToken
from blocktrain.serve.router.pipeline import Route
from blocktrain.serve.router.profile import NOT_PROFILED, Traversal
from blocktrain.serve.router.shared_prefixes import SharedPrefix

NO_IDS = np.zeros(0, np.uint32)
MAX_UNREAD = 32  # unread pieces after which a request pauses
MAX_CHUNKS_IN_RING = 16  # of one prompt; enough for every stage, and for the way between them


@dataclass(eq=False)
class ActiveRequest:
    """A request in progress: its current step, and what it waits for."""

    decoding: Decoding
    pieces: "asyncio.Queue[list[OutputToken] | BlocktrainError]" = field(
        default_factory=asyncio.Queue
    )
    key: int = 0  # names its context in every cache; a new context gets a new key
    ids: np.ndarray = field(default_factory=lambda: NO_IDS)  # read before the first prediction
    source: int = 0  # the key of the context that its own began as a copy of
    route: Route | None = None
    proposal: Proposal | None = None  # what is still to be sent before the next result
    chunks: int = 0  # of a prompt, in the ring
    row: Row | None = None  # as it was sent
    predictions: Predictions | None = None  # a result that is not taken in yet
    in_ring: bool = False
    sent_at: float = 0.0
    deadline: float | None = None  # for the step in the ring, or for a route
    replays: int = 0
    lost: bool = False  # a cache with its context is gone
    traversal: Traversal = NOT_PROFILED
    failed: bool = False
    cancelled: bool = False

    @property
    def complete(self) -> bool:
        """Whether the answer has ended and all of its pieces were read."""
        return (self.decoding.finished or self.failed) and self.pieces.empty()

    @property
    def ready(self) -> bool:
        paused = self.pieces.qsize() >= MAX_UNREAD or self.chunks >= MAX_CHUNKS_IN_RING
        over = self.failed or self.cancelled or self.decoding.finished
        return not (self.in_ring or paused or over)

    @property
    def waits_for_stages(self) -> bool:
        return self.in_ring or self.chunks > 0

    def propose(self) -> Proposal:
        """What is to be sent next: the rest of the current proposal, or a new one."""
        if self.proposal is None:
            self.proposal = self.decoding.replay() if self.lost else self.decoding.propose()
            self.lost = False
        assert self.proposal is not None  # a finished request is not ready
        return self.proposal

    @property
    def sent_positions(self) -> int:
        """How many of `ids` the first block has computed."""
        return min(len(self.ids), self.proposal.start) if self.proposal else len(self.ids)

    def begin(self, key: int, prefix: SharedPrefix) -> None:
        """Begin a new context, as a copy of a prefix if there is one."""
        proposal = self.propose()
        self.key, self.ids, self.source = key, proposal.ids[: proposal.context], prefix.key
        if prefix.key:
            self.proposal = replace(proposal.after(prefix.length), source=prefix.key)
        self.decoding.reuse(prefix.length)

    def send(self, row: Row, now: float, seconds: float) -> None:
        self.row, self.in_ring, self.sent_at, self.deadline = row, True, now, now + seconds

    def send_chunk(self, now: float, seconds: float) -> None:
        self.chunks, self.deadline = self.chunks + 1, now + seconds

    def chunk_arrived(self, now: float, seconds: float) -> None:
        self.chunks = max(0, self.chunks - 1)
        self.deadline = now + seconds if self.waits_for_stages else None

    def expects(self, predictions: Predictions) -> bool:
        """Whether these may be the result of the step in the ring."""
        return self.in_ring and self.row is not None and len(predictions.tokens_R) == self.row.read

    def take_result(self, predictions: Predictions | None) -> None:
        self._leave_ring()
        self.predictions = predictions

    def start_over(self) -> None:
        """Replay the context with the next step. A result that has arrived still counts."""
        self._leave_ring()
        self.proposal, self.lost = None, True

    def fail(self, error: BlocktrainError) -> None:
        self._leave_ring()
        self.failed = True
        self.pieces.put_nowait(error)

    def _leave_ring(self) -> None:
        self.in_ring, self.chunks, self.deadline = False, 0, None
