"""The router's own block: it drafts without any network, and makes work of many requests' steps.

Drafts are picked from the first block's own distribution with the noise of their places, one after
another for each request and together for all. Knows what a step asks, not why.
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
    Refinement,
    Row,
    SlotLimits,
    Work,
    apart,
    joined,
    started,
)
from blocktrain.serve.stage.compute import StageCompute
from blocktrain.serve.stage.served_blocks import Blocks
from blocktrain.train.device import Compute
from blocktrain.vocabulary import MASK

NOISE_STREAM = 1  # keeps this randomness apart from every other use of a request's seed


class FirstBlock:
    """`drafts_sweeps`: every whole output starts as the first block's own text, byte after byte;
    else it does where its request wants it so, and otherwise as guesses made all at once from
    nothing. Drafts are better text for more time here. A cascade drafts: it has not learned to
    guess from nothing."""

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
        source: Blocks,
        compute: Compute,
        readout: str = "product",
        limits: SlotLimits = DEFAULT_LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> Self:
        first = StageCompute.load(source, range(1), compute, readout, limits, clock)
        return cls(first)

    def release(self, request: int) -> None:
        self.first.release(request)

    def prefills(self, steps: Mapping[int, Proposal]) -> list[Row]:
        """Context that nothing is read from and that every stage can take in by itself, all at
        once and before there is any work. In a cascade it travels with the work instead."""
        if not self.first.denoises:
            return []
        return [
            Row(request, step.start, step.ids[: len(step.ids) - step.read], 0)
            for request, step in steps.items()
            if step.read < len(step.ids)
        ]

    def work(self, steps: Mapping[int, Proposal]) -> Work:
        """Every request's step, with drafts, through the first block; without what `prefills`
        gives, which the other stages are to have."""
        if prefills := self.prefills(steps):
            self.first.prefill(prefills)
            steps = {request: _read_alone(step) for request, step in steps.items()}
        steps = self._guessed(steps)
        rows = [self._row(request, step) for request, step in steps.items()]
        drafting = Drafter(steps)
        state = self._noise(steps.values()) if self._noise_start else NO_STATE
        while rows:
            drafting.took(self._parts(rows, state))
            rows, state = drafting.next_rows(), NO_STATE
        work = drafting.work()
        if self.first.readout == "final" and self.first.block_count > 1:
            work = replace(work, readout_RV=np.zeros_like(work.readout_RV))
        return work

    def answers(self, work: Work) -> list[tuple[Row, np.ndarray]]:
        """Each row's distributions, once all blocks have seen the work."""
        carried = [self.first.carried(row) for row in work.rows]
        return [(part.rows[0], self.distribution(part.readout_RV)) for part in apart(work, carried)]

    def distribution(self, readout_RV: np.ndarray) -> np.ndarray:
        """Log-probabilities out of what all blocks have written."""
        if self.first.readout == "product":
            return log_softmax(readout_RV / self.first.block_count)
        return readout_RV

    def _noise(self, steps: Iterable[Proposal]) -> np.ndarray:
        """The noise that the newest position of each step starts from, fixed by seed and place."""
        config, device = self.first.config, self.first.compute.device
        starts = []
        for step in steps:
            seed = mixed_seed(step.sampling.seed, step.position + step.read - 1, NOISE_STREAM)
            zeros = starting_point(config, "mean", (step.read - 1,), 0, device)
            noise = starting_point(config, "noise", (1,), seed, device)
            starts.append(torch.cat([zeros, noise]))
        return torch.cat(starts).cpu().numpy()

    def _parts(self, rows: Sequence[Row], state: np.ndarray = NO_STATE) -> list[Work]:
        """Rows through the first block, each by itself again."""
        work = self.first.step(started(rows, state), heads=True)
        return apart(work, [self.first.carried(row) for row in rows])

    def _row(self, request: int, step: Proposal) -> Row:
        refines = step.refine and self.first.denoises
        refinement = Refinement(step.sampling, step.position) if refines else None
        return Row(request, step.start, step.ids, step.read, refinement)

    def _guessed(self, steps: Mapping[int, Proposal]) -> Mapping[int, Proposal]:
        """Steps that start from nothing now start from the first block's guesses."""
        unknown = {request: step for request, step in steps.items() if step.ids[-1] == MASK}
        if not unknown:
            return steps
        if self.drafts_sweeps:
            return {**steps, **{request: _to_draft(step) for request, step in unknown.items()}}
        rows = [Row(request, step.start, step.ids, step.read) for request, step in unknown.items()]
        found = {part.rows[0].request: part.readout_RV for part in self._parts(rows)}
        guessed = {request: _with_guess(step, found[request]) for request, step in unknown.items()}
        return {**steps, **guessed}


class Drafter:
    """Steps on their way through the first block, draft by draft."""

    def __init__(self, steps: Mapping[int, Proposal]) -> None:
        self._steps = steps
        self._parts: dict[int, list[Work]] = {request: [] for request in steps}

    def took(self, parts: Sequence[Work]) -> None:
        for part in parts:
            self._parts[part.rows[0].request].append(part)

    def next_rows(self) -> list[Row]:
        """The next draft of every request that may still have one."""
        going = [
            (step, self._parts[request])
            for request, step in self._steps.items()
            if len(self._parts[request]) <= step.drafts
        ]
        if not going:
            return []
        found = picks(
            np.stack([parts[-1].readout_RV[-1] for _, parts in going]),
            [step.sampling for step, _ in going],
            [step.position + step.read + len(parts) - 2 for step, parts in going],
        )
        return [
            _following(parts[-1].rows[0], byte)
            for (_, parts), byte in zip(going, found, strict=True)
        ]

    def work(self) -> Work:
        """One row per request, its drafts and their state included."""
        work = joined([part for parts in self._parts.values() for part in parts])
        rows = (_joined_row([part.rows[0] for part in parts]) for parts in self._parts.values())
        return replace(work, rows=tuple(rows))


def _read_alone(step: Proposal) -> Proposal:
    skipped = len(step.ids) - step.read
    return replace(step, start=step.start + skipped, ids=step.ids[skipped:])


def _following(row: Row, byte: int) -> Row:
    return Row(row.request, row.start + len(row.ids), np.array([byte], np.uint16), 1)


def _joined_row(rows: Sequence[Row]) -> Row:
    """A row and the drafts that follow it, as one."""
    return replace(
        rows[0],
        ids=np.concatenate([row.ids for row in rows]),
        read=sum(row.read for row in rows),
    )


def _to_draft(step: Proposal) -> Proposal:
    count = step.read - 1
    return replace(step, ids=step.ids[: len(step.ids) - count], read=1, drafts=count)


def _with_guess(step: Proposal, log_probs_RV: np.ndarray) -> Proposal:
    """The step, with what was found at the positions read as their context."""
    count = step.read
    places = range(step.position, step.position + count)
    found = picks(log_probs_RV, [step.sampling] * count, places)
    known = step.ids[: len(step.ids) - count + 1]
    return replace(step, ids=np.concatenate([known, found[:-1].astype(np.uint16)]))
