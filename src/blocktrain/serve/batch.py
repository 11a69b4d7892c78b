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


@dataclass
class Batch:
    shares: Sequence[Share]
    ids_BQ: Tensor
    given_N: Tensor | None  # which of the B x Q are no padding; None: all
    read_R: Tensor | None  # which of the B x Q are read; None: all

    @classmethod
    def of(cls, shares: Sequence[Share], device: torch.device) -> "Batch":
        lengths = [share.length for share in shares]
        ids_BQ = np.zeros((len(shares), max(lengths)), np.int64)
        for ids_Q, share in zip(ids_BQ, shares, strict=True):
            ids_Q[: share.length] = share.row.ids
        ids = torch.from_numpy(ids_BQ).to(device, non_blocking=True)
        if all(share.row.read == ids_BQ.shape[1] for share in shares):
            return cls(shares, ids, None, None)
        offsets_Q, ends_B1 = np.arange(max(lengths)), np.array(lengths)[:, None]
        reads_B1 = np.array([[share.row.read] for share in shares])
        given_BQ = offsets_Q < ends_B1
        read_BQ = given_BQ & (offsets_Q >= ends_B1 - reads_B1)
        return cls(shares, ids, _places(given_BQ, device), _places(read_BQ, device))

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
        guesses = log_probs_RV.cpu().numpy()
        ids_BQ = self.ids_BQ.cpu().numpy().copy()
        start = 0
        for ids_Q, share in zip(ids_BQ, self.shares, strict=True):
            count = share.row.read
            if refinement := share.row.refinement:
                positions = range(refinement.position, refinement.position + count)
                found = picks(
                    guesses[start : start + count], [refinement.sampling] * count, positions
                )
                ids_Q[1:count] = found[:-1]
            start += count
        self.ids_BQ = torch.from_numpy(ids_BQ).to(self.ids_BQ.device, non_blocking=True)

    def refined_ids(self) -> dict[int, np.ndarray]:
        """The ids of rows whose context was guessed, by request."""
        if not self.refines:
            return {}
        ids_BQ = self.ids_BQ.cpu().numpy().astype(np.uint16)
        return {
            share.row.request: ids_Q[: share.length]
            for ids_Q, share in zip(ids_BQ, self.shares, strict=True)
            if share.row.refinement
        }


def _places(chosen_BQ: np.ndarray, device: torch.device) -> Tensor | None:
    if chosen_BQ.all():
        return None
    return torch.from_numpy(np.flatnonzero(chosen_BQ)).to(device, non_blocking=True)
