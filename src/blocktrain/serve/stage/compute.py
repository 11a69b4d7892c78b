"""Blocks as a stage computes them: rows of many requests in, state and log-probabilities out; and
where it loads them from, with fingerprints to check that all stages have one model.

The kinds of block differ in what travels between them; a stage needs to know nothing else.

Shapes: B rows, Q positions, N = B x Q, R positions read, D width, E target dimensions, V bytes.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from blocktrain.config import Config, stored_values
from blocktrain.errors import CacheFullError, ProtocolError
from blocktrain.model.block import layer_class, run_targets
from blocktrain.model.cache import BlockCache, SlotCache
from blocktrain.model.causal import CausalBlock
from blocktrain.model.denoising import DenoisingBlock
from blocktrain.model.stack import Descent
from blocktrain.serve.stage.batch import (
    DEFAULT_LIMITS,
    Activations,
    Row,
    RowBatch,
    RowSpan,
    SlotLimits,
    SlotTable,
    grouped_by_length,
)
from blocktrain.storage.run_dir import RunDir
from blocktrain.train.device import Compute
from blocktrain.train.stored_models import load_stored_block
from blocktrain.vocabulary import BYTES, IDS


class CachedBlock(Protocol):
    """One block with the cache as a batch sees it."""

    def advance(
        self,
        ids_BQ: Tensor,
        state_BQW: Tensor,
        cache: BlockCache,
        read_R: Tensor | None,
        *,
        head: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The next block's state; with `head` also log-probabilities (R x V) at the positions
        `read_R` of the B x Q (None: at all)."""
        ...

    def read(self, ids_BQ: Tensor, cache: BlockCache) -> None:
        """Read context that nothing is predicted from; needs no state."""
        ...


def cached_block(config: Config, index: int, block: nn.Module, device: torch.device) -> CachedBlock:
    if config.kind.denoises:
        table = run_targets(config, device)
        typed = cast("DenoisingBlock", block)
        return CachedDenoisingBlock(Descent.of(config, index, typed, table))
    return CachedCausalBlock(cast("CausalBlock", block))


def block_shape(config: Config, index: int) -> tuple[int, int]:
    """How many layers a block has, and how many in its private tail."""
    return config.depths[index], config.tail_layers(index)


class CachedCausalBlock:
    """Features of every position flow from block to block."""

    def __init__(self, block: CausalBlock) -> None:
        self.block = block

    def advance(
        self,
        ids_BQ: Tensor,
        state_BQW: Tensor,
        cache: BlockCache,
        read_R: Tensor | None,
        *,
        head: bool,
    ) -> tuple[Tensor, Tensor | None]:
        inputs = state_BQW if self.block.embed is None else ids_BQ
        features = self.block.features(inputs, cache)
        if not head:
            return features, None
        private = _chosen(self.block.private(features, cache), read_R)
        return features, torch.log_softmax(self.block.predict(private), dim=-1)

    def read(self, ids_BQ: Tensor, cache: BlockCache) -> None:
        raise ProtocolError(
            "a block of a cascade reads features, not bytes: it cannot prefill alone"
        )


class CachedDenoisingBlock:
    """A guess z flows from block to block; each reads the context by itself."""

    def __init__(self, descent: Descent) -> None:
        self.descent = descent

    def advance(
        self,
        ids_BQ: Tensor,
        state_BQW: Tensor,
        cache: BlockCache,
        read_R: Tensor | None,
        *,
        head: bool,
    ) -> tuple[Tensor, Tensor | None]:
        context = self.descent.block.read_context(ids_BQ, cache)
        log_probs, z = self.descent(context, state_BQW)
        return z, _chosen(log_probs, read_R) if head else None

    def read(self, ids_BQ: Tensor, cache: BlockCache) -> None:
        self.descent.block.read_context(ids_BQ, cache)


def _chosen(values_BQX: Tensor, which_R: Tensor | None) -> Tensor:
    flat = values_BQX.reshape(-1, values_BQX.size(-1))
    return flat if which_R is None else flat[which_R]


class StageCompute:
    """Consecutive blocks with their cache. Called from one thread at a time."""

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
        self._blocks = [
            cached_block(config, index, module.eval(), compute.device)
            for index, module in zip(blocks, modules, strict=True)
        ]
        shapes = [block_shape(config, index) for index in blocks]
        window, layer = config.model.window, layer_class(config.model).cache_shape(config.model)
        slot_bytes = SlotCache.slot_bytes(window, layer, shapes, compute.dtype)
        slots = min(limits.requests, limits.cache_bytes // slot_bytes)
        if not slots:
            raise CacheFullError(f"one request alone needs {slot_bytes} bytes of cache")
        self._slots = SlotTable(slots, limits.idle_seconds)
        self._cache = SlotCache(window, layer, shapes, compute.device, compute.dtype)

    @classmethod
    def load(
        cls,
        source: "BlockSource",
        blocks: range,
        compute: Compute,
        readout: str = "product",
        limits: SlotLimits = DEFAULT_LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> Self:
        """Load these blocks, and nothing of the others."""
        modules = [source.load(block, compute) for block in blocks]
        return cls(source.config, blocks, modules, compute, readout, limits, clock)

    @property
    def requests(self) -> tuple[int, ...]:
        return self._slots.requests

    @property
    def max_requests(self) -> int:
        return self._slots.slots

    def cached(self, request: int) -> int:
        """How many of a request's positions are in the cache."""
        return self._slots.cached(request)

    def carried(self, row: Row) -> int:
        """How many of a row's positions have state that travels on."""
        return row.read if self.denoises else len(row.ids)

    def release(self, request: int) -> None:
        self._slots.release(request)

    @torch.inference_mode()
    def prefill(self, rows: Sequence[Row]) -> None:
        """Read context that nothing is predicted from. Denoising blocks need no state for it."""
        self._check(rows)
        owners = self._slots.admit(rows, self._clock())
        spans = [
            RowSpan(row, own, range(0), range(0)) for row, own in zip(rows, owners, strict=True)
        ]
        self._read_context(spans)

    @torch.inference_mode()
    def step(self, activations: Activations, *, heads: bool | None = None) -> Activations:
        """Through all blocks here. `heads`: every block predicts; None: those the readout needs."""
        self._check(activations.rows)
        spans = self._spans(activations.rows)
        state_in, readout_in = self._state_of(activations, spans), activations.readout_RV
        if self.denoises:
            self._read_context([span.context_only() for span in spans if span.row.context])
            spans = [span.read_only() for span in spans]
        state_NW, readout_RV = np.empty_like(state_in), np.empty_like(readout_in)
        ids: dict[int, np.ndarray] = {}
        for group in grouped_by_length(spans):
            carried = np.concatenate([np.asarray(span.carried) for span in group])
            read = np.concatenate([np.asarray(span.read) for span in group])
            batch = RowBatch(group, self.compute.device)
            state_NW[carried], readout_RV[read] = self._advance(
                batch, state_in[carried], readout_in[read], heads
            )
            ids |= batch.refined_ids()
        rows = tuple(_with_guess(row, ids.get(row.request)) for row in activations.rows)
        return Activations(rows, state_NW, readout_RV)

    def _advance(
        self, batch: RowBatch, state_NW: np.ndarray, readout_RV: np.ndarray, heads: bool | None
    ) -> tuple[np.ndarray, np.ndarray]:
        state = batch.spread(self._tensor(state_NW))
        readout = self._tensor(readout_RV)
        product = self.readout == "product"
        with self._writing(batch.spans) as caches:
            for index, block, cache in zip(self.blocks, self._blocks, caches, strict=True):
                last = index == self.block_count - 1
                head = heads if heads is not None else product or last
                state, log_probs = block.advance(
                    batch.ids_BQ, state, cache, batch.read_R, head=head
                )
                if log_probs is not None:
                    readout = readout + log_probs if product else log_probs
                if batch.refines and log_probs is not None and not last:
                    batch.refine(readout / (index + 1) if product else log_probs)
        return batch.gathered(state).float().cpu().numpy(), readout.cpu().numpy()

    def _read_context(self, spans: Sequence[RowSpan]) -> None:
        for group in grouped_by_length(spans):
            batch = RowBatch(group, self.compute.device)
            with self._writing(group) as caches:
                for block, cache in zip(self._blocks, caches, strict=True):
                    block.read(batch.ids_BQ, cache)

    @contextmanager
    def _writing(self, spans: Sequence[RowSpan]) -> Iterator[list[BlockCache]]:
        """The rows' caches. If writing fails, only the positions before the rows stay valid."""
        for span in spans:
            span.owner.cached = span.row.start
        yield self._cache.view(
            [span.owner.slot for span in spans],
            [span.row.start for span in spans],
            [span.length for span in spans],
        )
        for span in spans:
            span.owner.cached = span.row.start + span.length

    def _spans(self, rows: Sequence[Row]) -> list[RowSpan]:
        spans = []
        carried = read = 0
        for row, owner in zip(rows, self._slots.admit(rows, self._clock()), strict=True):
            own = self.carried(row)
            spans.append(
                RowSpan(row, owner, range(carried, carried + own), range(read, read + row.read))
            )
            carried, read = carried + own, read + row.read
        return spans

    def _state_of(self, activations: Activations, spans: Sequence[RowSpan]) -> np.ndarray:
        """The state handed in; the first block may start without one, from zeros."""
        state, readout_RV = activations.state, activations.readout_RV
        carried, read = spans[-1].carried.stop, spans[-1].read.stop
        if readout_RV.shape != (read, BYTES):
            raise ProtocolError(f"a readout of shape {readout_RV.shape} for {read} positions")
        if self.blocks.start == 0 and not state.size:
            return np.zeros((carried, self.state_width), np.float32)
        if state.shape != (carried, self.state_width):
            raise ProtocolError(f"a state of shape {state.shape} for {carried} positions")
        return state

    def _check(self, rows: Sequence[Row]) -> None:
        window = self.config.model.window
        if not rows or len({row.request for row in rows}) < len(rows):
            raise ProtocolError("a step needs one row or more, each of another request")
        for row in rows:
            count = len(row.ids)
            if not 0 <= row.start < row.start + count <= window or not 0 <= row.read <= count:
                raise ProtocolError(
                    f"a row of {count} positions from {row.start} on, {row.read} of them read, does"
                    f" not fit a window of {window}"
                )
            if row.ids.max() >= IDS:
                raise ProtocolError(f"{row.ids.max()} is not an id of the vocabulary")

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.compute.device, non_blocking=True)


def _with_guess(row: Row, guess: np.ndarray | None) -> Row:
    """The row with the guesses at the positions read."""
    if guess is None:
        return row
    return replace(row, ids=np.concatenate([row.ids[: len(row.ids) - len(guess)], guess]))


# Where blocks come from, and whether two processes have the same ones


def settings_fingerprint(config: Config) -> str:
    """Of the settings that define the model, not of how it was trained.

    Settings that a later release adds do not count while they have their defaults, so stages of
    both releases work together.
    """
    values = stored_values(config)
    defining = [values["model"], values["objective"], values["train"]["seed"]]
    return hashlib.sha256(json.dumps(defining, sort_keys=True).encode()).hexdigest()[:16]


def weights_fingerprint(weights: Iterable[tuple[str, np.ndarray]]) -> str:
    """Of one block's tensors in the order of their names, whatever file they come from."""
    digest = hashlib.sha256()
    for name, tensor in weights:
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        digest.update(tensor.data if tensor.flags.c_contiguous else tensor.tobytes())
    return digest.hexdigest()[:16]


def stage_mismatch(hello: Mapping[str, Any], settings: str, weights: Sequence[str]) -> str | None:
    """What is wrong with a stage's HELLO, for a router with these fingerprints; its content is
    unchecked input."""
    listed = hello.get("blocks")
    blocks = listed if isinstance(listed, list) else []
    first = blocks[0] if blocks else None
    if type(first) is not int or first < 1 or blocks != list(range(first, first + len(blocks))):
        return "the stage does not name consecutive blocks after block 0"
    own = list(weights[first : first + len(blocks)])
    if hello.get("settings") != settings or hello.get("weights") != own:
        return "the stage has another version of the model"
    return None if isinstance(hello.get("address"), str) else "the stage does not name its address"


class BlockSource(Protocol):
    @property
    def config(self) -> Config: ...

    def load(self, block: int, compute: Compute) -> nn.Module:
        """A block on the device, for inference."""
        ...

    def fingerprint(self, block: int) -> str:
        """The same for the same weights, in whatever number type they are held."""
        ...


@dataclass(frozen=True)
class RunBlockSource:
    """A run's blocks, held in the compute type or, with `weights` "int8", with 8-bit matrices."""

    run: RunDir
    weights: str = "full"

    @property
    def config(self) -> Config:
        return self.run.config

    def load(self, block: int, compute: Compute) -> nn.Module:
        return load_stored_block(self.run, block, compute, compute.dtype, self.weights)

    def fingerprint(self, block: int) -> str:
        return weights_fingerprint(self.run.read_block(block))
