"""The router's own block: it drafts without any network, and starts every request's step.

Drafts are picked one after another from the first block's own distribution, with the noise of their
text positions; those of several requests are computed together.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Self

import numpy as np
import torch

from blocktrain.model.stack import starting_point
from blocktrain.numerics.sampling import log_softmax, mixed_seed, picks
from blocktrain.serve.router.decode import Proposal
from blocktrain.serve.stage.batch import (
    DEFAULT_LIMITS,
    NO_STATE,
    Activations,
    Refinement,
    Row,
    SlotLimits,
    initial,
    joined,
    split_rows,
)
from blocktrain.serve.stage.compute import BlockSource, StageCompute
from blocktrain.train.device import Compute
from blocktrain.vocabulary import MASK

NOISE_STREAM = 1  # keeps this randomness apart from every other use of a request's seed


class FirstBlock:
    """`drafts_sweeps`: a sweep starts from the first block's text, byte after byte, even if its
    request does not ask for that; otherwise from guesses made all at once out of masks. Cascades
    always draft, as they are not trained on masks. `noise_start`: z starts as noise, not as zeros.
    """

    def __init__(
        self,
        first: StageCompute,
        *,
        drafts_sweeps: bool | None = None,
        noise_start: bool = False,
    ) -> None:
        self.first = first
        self.drafts_sweeps = not first.denoises if drafts_sweeps is None else drafts_sweeps
        self._noise_start = noise_start and first.denoises

    @classmethod
    def load(
        cls,
        source: BlockSource,
        compute: Compute,
        readout: str = "product",
        limits: SlotLimits = DEFAULT_LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> Self:
        first = StageCompute.load(source, range(1), compute, readout, limits, clock)
        return cls(first)

    def release(self, request: int) -> None:
        self.first.release(request)

    def prefills(self, proposals: Mapping[int, Proposal]) -> list[Row]:
        """Context that every stage can read by itself, in parallel and before the step arrives. In
        a cascade there is none: features of the context travel with the step."""
        if not self.first.denoises:
            return []
        return [
            Row(request, proposal.start, proposal.ids[: proposal.context], 0)
            for request, proposal in proposals.items()
            if proposal.context
        ]

    def step(self, proposals: Mapping[int, Proposal]) -> Activations:
        """Every request's proposal, with its drafts, through the first block; the context that
        `prefills` gives is left out."""
        if prefills := self.prefills(proposals):
            self.first.prefill(prefills)
            proposals = {request: _read_only(each) for request, each in proposals.items()}
        proposals = self._with_guesses(proposals)
        rows = [self._row(request, proposal) for request, proposal in proposals.items()]
        state = self._noise(proposals.values()) if self._noise_start else NO_STATE
        drafter = Drafter(proposals)
        while rows:
            drafter.add(self._advance(rows, state))
            rows, state = drafter.next_rows(), NO_STATE
        result = drafter.result()
        if self.first.readout == "final" and self.first.block_count > 1:
            # Drafts needed the first block's head, but this readout is of the last block alone.
            return replace(result, readout_RV=np.zeros_like(result.readout_RV))
        return result

    def answers(self, activations: Activations) -> list[tuple[Row, np.ndarray]]:
        """Each row with its distributions, after all blocks."""
        parts = self.split(activations)
        return [(part.rows[0], self.distribution(part.readout_RV)) for part in parts]

    def split(self, activations: Activations) -> list[Activations]:
        return split_rows(activations, [self.first.carried(row) for row in activations.rows])

    def distribution(self, readout_RV: np.ndarray) -> np.ndarray:
        """Log-probabilities from the readout of all blocks."""
        if self.first.readout == "product":
            return log_softmax(readout_RV / self.first.block_count)
        return readout_RV

    def _advance(self, rows: Sequence[Row], state: np.ndarray = NO_STATE) -> list[Activations]:
        return self.split(self.first.step(initial(rows, state), heads=True))

    def _row(self, request: int, proposal: Proposal) -> Row:
        refines = proposal.refine and self.first.denoises
        refinement = Refinement(proposal.sampling, proposal.position) if refines else None
        return Row(request, proposal.start, proposal.ids, proposal.read, refinement)

    def _noise(self, proposals: Iterable[Proposal]) -> np.ndarray:
        """Noise for the newest position of each proposal, fixed by its seed and text position."""
        config, device = self.first.config, self.first.compute.device
        starts = []
        for proposal in proposals:
            position = proposal.position + proposal.read - 1
            seed = mixed_seed(proposal.sampling.seed, position, NOISE_STREAM)
            zeros = starting_point(config, "mean", (proposal.read - 1,), 0, device)
            starts += [zeros, starting_point(config, "noise", (1,), seed, device)]
        return torch.cat(starts).cpu().numpy()

    def _with_guesses(self, proposals: Mapping[int, Proposal]) -> Mapping[int, Proposal]:
        """Replace masks by the first block's guesses."""
        masked = {request: each for request, each in proposals.items() if each.ids[-1] == MASK}
        if not masked:
            return proposals
        if self.drafts_sweeps:
            return {**proposals, **{request: _to_draft(each) for request, each in masked.items()}}
        rows = [Row(request, each.start, each.ids, each.read) for request, each in masked.items()]
        guesses = {part.rows[0].request: part.readout_RV for part in self._advance(rows)}
        guessed = {request: _guessed(each, guesses[request]) for request, each in masked.items()}
        return {**proposals, **guessed}


class Drafter:
    """Proposals on their way through the first block, draft by draft."""

    def __init__(self, proposals: Mapping[int, Proposal]) -> None:
        self._proposals = proposals
        self._parts: dict[int, list[Activations]] = {request: [] for request in proposals}

    def add(self, parts: Sequence[Activations]) -> None:
        for part in parts:
            self._parts[part.rows[0].request].append(part)

    def next_rows(self) -> list[Row]:
        """The next draft of every request that may still have one."""
        unfinished = [
            (proposal, self._parts[request])
            for request, proposal in self._proposals.items()
            if len(self._parts[request]) <= proposal.drafts
        ]
        if not unfinished:
            return []
        drafts = picks(
            np.stack([parts[-1].readout_RV[-1] for _, parts in unfinished]),
            [each.sampling for each, _ in unfinished],
            [each.position + each.read + len(parts) - 2 for each, parts in unfinished],
        )
        return [
            _draft_after(parts[-1].rows[0], byte)
            for (_, parts), byte in zip(unfinished, drafts, strict=True)
        ]

    def result(self) -> Activations:
        """One row for every request, with its drafts and their state."""
        result = joined([part for parts in self._parts.values() for part in parts])
        rows = (_joined_row([part.rows[0] for part in parts]) for parts in self._parts.values())
        return replace(result, rows=tuple(rows))


def _read_only(proposal: Proposal) -> Proposal:
    skipped = proposal.context
    return replace(proposal, start=proposal.start + skipped, ids=proposal.ids[skipped:])


def _draft_after(row: Row, byte: int) -> Row:
    return Row(row.request, row.start + len(row.ids), np.array([byte], np.uint16), 1)


def _joined_row(rows: Sequence[Row]) -> Row:
    """A row and the drafts after it, as one."""
    return replace(
        rows[0],
        ids=np.concatenate([row.ids for row in rows]),
        read=sum(row.read for row in rows),
    )


def _to_draft(proposal: Proposal) -> Proposal:
    count = proposal.read - 1
    ids = proposal.ids[: len(proposal.ids) - count]
    return replace(proposal, ids=ids, read=1, drafts=count)


def _guessed(proposal: Proposal, log_probs_RV: np.ndarray) -> Proposal:
    """The proposal with picks from these distributions in place of its masks."""
    count = proposal.read
    positions = range(proposal.position, proposal.position + count)
    guesses = picks(log_probs_RV, [proposal.sampling] * count, positions)
    ids = proposal.ids[: proposal.context + 1]
    return replace(proposal, ids=np.concatenate([ids, guesses[:-1].astype(np.uint16)]))
