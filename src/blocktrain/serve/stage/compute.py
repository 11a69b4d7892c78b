"""One block as a stage runs it: cached positions in, state and log-probabilities out.

The two kinds of block differ in what travels between them, and in nothing else that a stage would
have to know.

Shapes: B rows, Q positions, N = B x Q, R positions read, D width, E target dimensions, V bytes.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol, Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from blocktrain.config import Config
from blocktrain.errors import CacheFullError, ProtocolError
from blocktrain.model.block import layer_class, run_targets
from blocktrain.model.cache import BlockCache, SlotCache
from blocktrain.model.causal import CausalBlock
from blocktrain.model.denoising import DenoisingBlock
from blocktrain.model.stack import Descent
from blocktrain.serve.stage.batch import (
    DEFAULT_LIMITS,
    Row,
    RowBatch,
    Share,
    SlotLimits,
    SlotTable,
    Work,
    like_length,
    with_ids,
)
from blocktrain.serve.stage.served_blocks import Blocks
from blocktrain.train.device import Compute
from blocktrain.vocabulary import BYTES, IDS


class Unit(Protocol):
    def advance(
        self,
        ids_BQ: Tensor,
        state_BQW: Tensor,
        memory: BlockCache,
        read_R: Tensor | None,
        *,
        head: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The next block's state, and the log-probabilities (R x V) of the positions that `read_R`
        names among the B x Q (None: of all); without `head` they are left out."""
        ...

    def read(self, ids_BQ: Tensor, memory: BlockCache) -> None:
        """Take in context that nothing is predicted from; needs no state."""
        ...


def new_unit(config: Config, index: int, block: nn.Module, device: torch.device) -> Unit:
    if config.kind.denoises:
        table = run_targets(config, device)
        typed = cast("DenoisingBlock", block)
        return DenoisingUnit(Descent.of(config, index, typed, table))
    return CausalUnit(cast("CausalBlock", block))


def shape(config: Config, block: int) -> tuple[int, int]:
    """A block's layers and private layers."""
    return config.depths[block], config.tail_layers(block)


class CausalUnit:
    """Features of every position flow from block to block."""

    def __init__(self, block: CausalBlock) -> None:
        self.block = block

    def advance(
        self,
        ids_BQ: Tensor,
        state_BQW: Tensor,
        memory: BlockCache,
        read_R: Tensor | None,
        *,
        head: bool,
    ) -> tuple[Tensor, Tensor | None]:
        inputs = state_BQW if self.block.embed is None else ids_BQ
        features = self.block.features(inputs, memory)
        if not head:
            return features, None
        private = _chosen(self.block.private(features, memory), read_R)
        return features, torch.log_softmax(self.block.predict(private), dim=-1)

    def read(self, ids_BQ: Tensor, memory: BlockCache) -> None:
        raise ProtocolError("a block of a cascade reads features, not bytes")


class DenoisingUnit:
    """A guess z flows from block to block; each reads the context by itself."""

    def __init__(self, descent: Descent) -> None:
        self.descent = descent

    def advance(
        self,
        ids_BQ: Tensor,
        state_BQW: Tensor,
        memory: BlockCache,
        read_R: Tensor | None,
        *,
        head: bool,
    ) -> tuple[Tensor, Tensor | None]:
        context = self.descent.block.read_context(ids_BQ, memory)
        log_probs, z = self.descent(context, state_BQW)
        return z, _chosen(log_probs, read_R) if head else None

    def read(self, ids_BQ: Tensor, memory: BlockCache) -> None:
        self.descent.block.read_context(ids_BQ, memory)


def _chosen(values_BQX: Tensor, which_R: Tensor | None) -> Tensor:
    flat = values_BQX.reshape(-1, values_BQX.size(-1))
    return flat if which_R is None else flat[which_R]


class StageCompute:
    def __init__(
        self,
        config: Config,
        blocks: range,
        modules: Sequence[nn.Module],
        compute: Compute,
        readout: str = "product",
        limits: SlotLimits = DEFAULT_LIMITS,
        clock: Callable[[], float] = time.monotonic,
        block_count: int | None = None,
    ) -> None:
        """`block_count` is smaller than the model's for an early exit."""
        self.config, self.blocks, self.compute, self.readout = config, blocks, compute, readout
        self.block_count = block_count or config.block_count
        self.denoises = config.kind.denoises
        self.state_width = config.state_width
        self._clock = clock
        self._units = [
            new_unit(config, index, module.eval(), compute.device)
            for index, module in zip(blocks, modules, strict=True)
        ]
        shapes = [shape(config, block) for block in blocks]
        window, layer = config.model.window, layer_class(config.model).cache_shape(config.model)
        slot_bytes = SlotCache.slot_bytes(window, layer, shapes, compute.dtype)
        most = min(limits.requests, limits.cache_bytes // slot_bytes)
        if not most:
            raise CacheFullError(f"one request alone needs {slot_bytes} bytes of cache")
        self._tenants = SlotTable(most, limits.idle_seconds)
        self._cache = SlotCache(window, layer, shapes, compute.device, compute.dtype)

    @classmethod
    def load(
        cls,
        source: Blocks,
        blocks: range,
        compute: Compute,
        readout: str = "product",
        limits: SlotLimits = DEFAULT_LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> Self:
        """Of these blocks; of the others nothing is read."""
        modules = [source.load(block, compute) for block in blocks]
        return cls(source.config, blocks, modules, compute, readout, limits, clock)

    @property
    def requests(self) -> tuple[int, ...]:
        return self._tenants.requests

    @property
    def most_requests(self) -> int:
        return self._tenants.most

    def held(self, request: int) -> int:
        return self._tenants.held(request)

    def carried(self, row: Row) -> int:
        """Positions of a row whose state travels on."""
        return row.read if self.denoises else len(row.ids)

    def release(self, request: int) -> None:
        self._tenants.release(request)

    @torch.inference_mode()
    def prefill(self, rows: Sequence[Row]) -> None:
        """Take in context that nothing is read from. Denoising blocks can, by themselves."""
        self._check(rows)
        tenants = self._tenants.admit(rows, self._clock())
        self._take_in(
            [
                Share(row, tenant, range(0), range(0))
                for row, tenant in zip(rows, tenants, strict=True)
            ]
        )

    @torch.inference_mode()
    def step(self, work: Work, *, heads: bool | None = None) -> Work:
        """Take the work through the blocks. `heads`: every block predicts; None: those that the
        readout needs."""
        self._check(work.rows)
        shares = self._shares(work.rows)
        state_in = self._state_of(work, shares)
        if self.denoises:
            self._take_in([_unread(share) for share in shares if share.row.read < share.length])
            shares = [_read(share) for share in shares]
        state_NW, readout_RV = np.empty_like(state_in), np.empty_like(work.readout_RV)
        ids: dict[int, np.ndarray] = {}
        for group in like_length(shares):
            carried = np.concatenate([np.asarray(share.carried) for share in group])
            read = np.concatenate([np.asarray(share.read) for share in group])
            batch = RowBatch(group, self.compute.device)
            state_NW[carried], readout_RV[read] = self._through(
                batch, state_in[carried], work.readout_RV[read], heads
            )
            ids |= batch.refined_ids()
        rows = tuple(_with_guess(row, ids.get(row.request)) for row in work.rows)
        return Work(rows, state_NW, readout_RV)

    def _through(
        self, batch: "RowBatch", state_NW: np.ndarray, readout_RV: np.ndarray, heads: bool | None
    ) -> tuple[np.ndarray, np.ndarray]:
        state = batch.spread(self._tensor(state_NW))
        readout = self._tensor(readout_RV)
        with self._writing(batch.shares) as views:
            for block, unit, view in zip(self.blocks, self._units, views, strict=True):
                last = block == self.block_count - 1
                head = heads if heads is not None else self.readout == "product" or last
                state, found = unit.advance(batch.ids_BQ, state, view, batch.read_R, head=head)
                if found is not None:
                    readout = readout + found if self.readout == "product" else found
                if batch.refines and found is not None and not last:
                    batch.refine(readout / (block + 1) if self.readout == "product" else found)
        return batch.gathered(state).float().cpu().numpy(), readout.cpu().numpy()

    def _take_in(self, shares: Sequence[Share]) -> None:
        for group in like_length(shares):
            batch = RowBatch(group, self.compute.device)
            with self._writing(group) as views:
                for unit, view in zip(self._units, views, strict=True):
                    unit.read(batch.ids_BQ, view)

    @contextmanager
    def _writing(self, shares: Sequence[Share]) -> Iterator[list[BlockCache]]:
        """The shares' memory. What they write over counts as held again once all is written."""
        for share in shares:
            share.tenant.held = share.row.start
        yield self._cache.view(
            [share.tenant.slot for share in shares],
            [share.row.start for share in shares],
            [share.length for share in shares],
        )
        for share in shares:
            share.tenant.held = share.row.start + share.length

    def _shares(self, rows: Sequence[Row]) -> list[Share]:
        shares = []
        carried = read = 0
        for row, tenant in zip(rows, self._tenants.admit(rows, self._clock()), strict=True):
            own = self.carried(row)
            shares.append(
                Share(row, tenant, range(carried, carried + own), range(read, read + row.read))
            )
            carried, read = carried + own, read + row.read
        return shares

    def _state_of(self, work: Work, shares: Sequence[Share]) -> np.ndarray:
        """The state handed in; the first block may start without one, from zeros."""
        carried, read = shares[-1].carried.stop, shares[-1].read.stop
        if work.readout_RV.shape != (read, BYTES):
            raise ProtocolError(f"a readout of shape {work.readout_RV.shape} for {read} positions")
        if self.blocks.start == 0 and not work.state.size:
            return np.zeros((carried, self.state_width), np.float32)
        if work.state.shape != (carried, self.state_width):
            raise ProtocolError(f"a state of shape {work.state.shape} for {carried} positions")
        return work.state

    def _check(self, rows: Sequence[Row]) -> None:
        window = self.config.model.window
        if not rows or len({row.request for row in rows}) < len(rows):
            raise ProtocolError("a step has one row of each of its requests, and not none")
        for row in rows:
            count = len(row.ids)
            if not 0 <= row.start < row.start + count <= window or not 0 <= row.read <= count:
                raise ProtocolError(
                    f"{count} positions from {row.start} on, {row.read} of them read, in a window"
                    f" of {window}"
                )
            if row.ids.max() >= IDS:
                raise ProtocolError(f"{row.ids.max()} is no id")

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.compute.device, non_blocking=True)


def _unread(share: Share) -> Share:
    """The context before what is read."""
    row = share.row
    return replace(share, row=replace(row, ids=row.ids[: len(row.ids) - row.read], read=0))


def _read(share: Share) -> Share:
    row, skipped = share.row, len(share.row.ids) - share.row.read
    return replace(share, row=replace(row, start=row.start + skipped, ids=row.ids[skipped:]))


def _with_guess(row: Row, guess: np.ndarray | None) -> Row:
    """The row with what was guessed at the positions read."""
    if guess is None:
        return row
    return with_ids(row, np.concatenate([row.ids[: len(row.ids) - len(guess)], guess]))
