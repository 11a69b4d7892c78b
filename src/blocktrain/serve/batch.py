"""Rows that are computed together: padded to the longest on the way in, gathered on the way out.

Rows of like length make a batch: its longest has at most four times the positions of its shortest,
so that a single byte is never padded to a prompt. Knows no blocks.

Shapes: B rows, Q positions of the longest, N positions of all, R of them read, V bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from blocktrain.core.choice import picks
from blocktrain.serve.tenants import Tenant
from blocktrain.serve.work import Row

LIKE_LENGTH = 4


@dataclass(frozen=True)
class Share:
    """One row's part of a step: which of the work's carried and read positions are its own."""

    row: Row
    tenant: Tenant
    carried: range
    read: range

    @property
    def length(self) -> int:
        return len(self.row.ids)


def like_length(shares: Sequence[Share]) -> list[list[Share]]:
    """Batches of rows that padding does not stretch much, each in the order of its slots."""
    groups: list[list[Share]] = []
    for share in sorted(shares, key=lambda share: share.length):
        if not groups or share.length > LIKE_LENGTH * groups[-1][0].length:
            groups.append([])
        groups[-1].append(share)
    return [sorted(group, key=lambda share: share.tenant.slot) for group in groups]


class Batch:
    """`given_N` says which of the B x Q positions are no padding, `read_R` which are read; None
    stands for all of them."""

    def __init__(self, shares: Sequence[Share], device: torch.device) -> None:
        self.shares = shares
        self._device = device
        self._ids_BQ = _padded([share.row.ids for share in shares])
        self.ids_BQ = self._tensor(self._ids_BQ)
        self.given_N: Tensor | None = None
        self.read_R: Tensor | None = None
        if any(share.row.read < self._ids_BQ.shape[1] for share in shares):
            lengths_B1 = np.array([[share.length] for share in shares])
            reads_B1 = np.array([[share.row.read] for share in shares])
            offsets_Q = np.arange(self._ids_BQ.shape[1])
            given_BQ = offsets_Q < lengths_B1
            self.given_N = self._places(given_BQ)
            self.read_R = self._places(given_BQ & (offsets_Q >= lengths_B1 - reads_B1))

    def spread(self, values_NW: Tensor) -> Tensor:
        """Flat values, as rows; padding is zero."""
        if self.given_N is not None:
            flat = values_NW.new_zeros(self.ids_BQ.numel(), values_NW.size(1))
            values_NW = flat.index_copy_(0, self.given_N, values_NW)
        return values_NW.view(*self.ids_BQ.shape, -1)

    def gathered(self, values_BQW: Tensor) -> Tensor:
        """Rows, as flat values without the padding."""
        flat = values_BQW.reshape(-1, values_BQW.size(-1))
        return flat if self.given_N is None else flat[self.given_N]

    @property
    def refines(self) -> bool:
        return any(share.row.refinement for share in self.shares)

    def refine(self, log_probs_RV: Tensor) -> None:
        """What was guessed becomes the context of rows that want it so.

        The first position read keeps its id: it is known. All positions of such a row are read.
        """
        guesses_RV = log_probs_RV.cpu().numpy()
        start = 0
        for ids_Q, share in zip(self._ids_BQ, self.shares, strict=True):
            count = share.row.read
            if refinement := share.row.refinement:
                own_RV = guesses_RV[start : start + count]
                places = range(refinement.position, refinement.position + count)
                ids_Q[1:count] = picks(own_RV, [refinement.sampling] * count, places)[:-1]
            start += count
        self.ids_BQ = self._tensor(self._ids_BQ)

    def refined_ids(self) -> dict[int, np.ndarray]:
        """The ids of rows whose context was guessed, by request."""
        return {
            share.row.request: ids_Q[: share.length].astype(np.uint16)
            for ids_Q, share in zip(self._ids_BQ, self.shares, strict=True)
            if share.row.refinement
        }

    def _places(self, chosen_BQ: np.ndarray) -> Tensor | None:
        return None if chosen_BQ.all() else self._tensor(np.flatnonzero(chosen_BQ))

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)


def _padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    padded = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for padded_Q, ids in zip(padded, rows, strict=True):
        padded_Q[: len(ids)] = ids
    return padded
