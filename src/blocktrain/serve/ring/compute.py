"""Blocks as a stage computes them: rows of many requests in, state or predictions out.

The kinds of block differ in what travels between them; a stage needs to know nothing else.

Shapes: B rows, Q positions, N = B x Q, R positions read, W width of the state, V tokens.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from blocktrain.config import Config
from blocktrain.data.corpus import cache_dir
from blocktrain.errors import CacheFullError, ProtocolError
from blocktrain.files import write_bytes
from blocktrain.model.block import CausalBlock, run_targets
from blocktrain.model.cache import BlockCache, SlotCache
from blocktrain.model.denoising import DenoisingBlock
from blocktrain.model.layer import layer_class
from blocktrain.model.stack import Descent
from blocktrain.serve.ring.activations import Activations, Row, joined, split_rows
from blocktrain.serve.ring.batch import (
    DEFAULT_LIMITS,
    RowBatch,
    RowSpan,
    SlotLimits,
    SlotTable,
    grouped_by_length,
    on_device,
    predictions,
)
from blocktrain.serve.ring.laps import UNTIMED, Laps
from blocktrain.serve.ring.prefixes import CopiedContext, KeptContexts
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.device import Compute
from blocktrain.training.stored_models import load_stored_block

FINGERPRINTS = "fingerprints"  # folder of the cache
FINGERPRINT_LENGTH = 16  # characters
PROGRESS_SECONDS = 2.0

log = logging.getLogger(__name__)

Lap = Callable[[str], None]  # ends a lap of a block


@dataclass(frozen=True)
class CachedCausalBlock:
    """Computes a batch with its cache. Features of every position flow from block to block."""

    block: CausalBlock

    def advance(
        self, batch: RowBatch, state_BQW: Tensor, cache: BlockCache, lap: Lap, *, head: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The next block's state; with `head` also the log-probabilities (R x V) at the positions
        read."""
        x = self.block.entered(state_BQW if self.block.embed is None else batch.ids_BQ)
        lap("embedding")
        features = self.block.run(self.block.layers, x, cache.layers)
        lap("layers")
        if not head:
            return features, None
        private = batch.at_read(self.block.private(features, cache))
        lap("tail")
        log_probs = torch.log_softmax(self.block.predict(private), dim=-1)
        lap("head")
        return features, log_probs

    def read(self, ids_BQ: Tensor, cache: BlockCache) -> None:
        raise ProtocolError(
            "a block of a cascade cannot prefill from ids, because it reads features"
        )


@dataclass(frozen=True)
class CachedDenoisingBlock:
    """A guess z flows from block to block; each block reads the context itself."""

    descent: Descent

    def advance(
        self, batch: RowBatch, state_BQW: Tensor, cache: BlockCache, lap: Lap, *, head: bool
    ) -> tuple[Tensor, Tensor | None]:
        context = self.descent.block.read_context(batch.ids_BQ, cache)
        lap("context")
        log_probs, z = self.descent(context, state_BQW)
        lap("denoising")
        return z, batch.at_read(log_probs) if head else None

    def read(self, ids_BQ: Tensor, cache: BlockCache) -> None:
        """Read context without predictions; needs no state."""
        self.descent.block.read_context(ids_BQ, cache)


def cached_blocks(
    config: Config, blocks: range, modules: Sequence[nn.Module], device: torch.device
) -> Sequence[CachedCausalBlock | CachedDenoisingBlock]:
    if not config.kind.denoises:
        return [CachedCausalBlock(cast("CausalBlock", module)) for module in modules]
    table = run_targets(config, device)
    return [
        CachedDenoisingBlock(Descent.of(config, index, cast("DenoisingBlock", module), table))
        for index, module in zip(blocks, modules, strict=True)
    ]


class StageCompute:
    """Consecutive blocks with their cache. Not thread-safe."""

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
        """`block_count` is below the model's for an early exit."""
        self.config, self.blocks, self.compute, self.readout = config, blocks, compute, readout
        self.block_count = block_count or config.block_count
        self.is_last = blocks.stop == self.block_count
        self.adds_up = readout == "product" and self.block_count > 1
        self.denoises = config.kind.denoises
        self._clock = clock
        for module in modules:
            module.eval()
        self._blocks = cached_blocks(config, blocks, modules, compute.device)
        shapes = [(config.depths[index], config.tail_layers(index)) for index in blocks]
        window, layer = config.model.window, layer_class(config.model).cache_shape(config.model)
        slot_bytes = SlotCache.slot_bytes(window, layer, shapes, compute.dtype)
        slots = min(limits.requests, limits.cache_bytes // slot_bytes)
        if not slots:
            raise CacheFullError(f"one request needs {slot_bytes} bytes of cache; raise --cache-gb")
        self._slots = SlotTable(slots, limits.idle_seconds)
        self._kept = KeptContexts(limits.prefix_bytes)
        self._cache = SlotCache(window, layer, shapes, compute.device, compute.dtype)

    @classmethod
    def load(
        cls,
        source: "BlockSource",
        blocks: range,
        compute: Compute,
        readout: str = "product",
        limits: SlotLimits = DEFAULT_LIMITS,
    ) -> Self:
        """Load only these blocks."""
        modules = [source.load(block, compute) for block in blocks]
        return cls(source.config, blocks, modules, compute, readout, limits)

    @property
    def requests(self) -> tuple[int, ...]:
        return self._slots.requests

    @property
    def slots(self) -> int:
        """How many requests the cache has room for."""
        return self._slots.slots

    def cached(self, request: int) -> int:
        """Number of a request's positions in the cache."""
        return self._slots.cached(request)

    def carried(self, row: Row) -> int:
        """Number of a row's positions whose state is sent on."""
        return row.read if self.denoises else len(row.ids)

    def release(self, *requests: int) -> None:
        """Free the slots of these requests, if they have any, and what is kept of them."""
        for request in requests:
            self._slots.release(request)
            self._kept.drop(request)

    @property
    def kept_bytes(self) -> int:
        """Memory for contexts of ended requests."""
        return self._kept.bytes

    def copyable(self, request: int) -> int:
        """Number of a request's positions that other contexts may copy."""
        return max(self.cached(request), self._kept.length(request))

    @torch.inference_mode()
    def keep(self, request: int, count: int) -> None:
        """Free the slot of a request, but keep its first `count` positions for others."""
        owner = self._slots.owner(request)
        if owner and count <= owner.cached and self._kept.most_bytes:
            layers = [part.clone() for part in self._cache.context(owner.slot, count)]
            self._kept.put(request, CopiedContext(owner.ids[:count], layers))
        self._slots.release(request)

    @torch.inference_mode()
    def prefill(self, rows: Sequence[Row]) -> None:
        """Read context without predictions. Only denoising blocks can do so."""
        self._read_context(self._admitted(rows))

    @torch.inference_mode()
    def step(
        self, activations: Activations, *, draft: bool = False, laps: Laps = UNTIMED
    ) -> Activations:
        """Compute a step in all blocks here. With `draft`, predict even before the last block."""
        rows = activations.rows
        spans = self._admitted(rows)
        carried, read = [self.carried(row) for row in rows], sum(row.read for row in rows)
        added = self.config.vocabulary.size if self.adds_up else 0
        state = self._shaped(activations.state, (sum(carried), self.config.state_width))
        readout = self._shaped(activations.readout_RV, (read, added))
        parts = {
            part.rows[0].request: part
            for part in split_rows(Activations(rows, state, readout), carried)
        }
        if self.denoises:
            self._read_context([span.context_only() for span in spans if span.row.context])
            spans = [span.read_only() for span in spans]
        top = max(row.choice.top for row in rows)
        for group in grouped_by_length(spans):
            requests = [span.row.request for span in group]
            inputs = joined([parts[request] for request in requests])
            laps.lap("batching")
            result = self._advance(RowBatch(group, self.compute.device), inputs, draft, top, laps)
            result_parts = split_rows(result, [self.carried(row) for row in result.rows])
            parts |= zip(requests, result_parts, strict=True)
        together = joined([parts[row.request] for row in rows])
        laps.lap("batching")
        return together

    def _advance(
        self, batch: RowBatch, inputs: Activations, draft: bool, top: int, laps: Laps
    ) -> Activations:
        state = batch.spread(on_device(inputs.state, self.compute.device))
        readout = on_device(inputs.readout_RV, self.compute.device)
        with self._writing(batch.spans) as caches:
            laps.lap("batching")
            for index, block, cache in zip(self.blocks, self._blocks, caches, strict=True):
                last, lap = index == self.block_count - 1, partial(laps.lap, block=index)
                head = self.adds_up or last or draft or batch.refines
                state, log_probs = block.advance(batch, state, cache, lap, head=head)
                if log_probs is None:
                    continue
                readout = readout + log_probs if self.adds_up else log_probs
                if batch.refines and not last:
                    batch.refine(readout / (index + 1) if self.adds_up else log_probs)
        predicted = None
        if draft or self.is_last:
            # With a product: the normalised mean of all blocks so far.
            mean = readout / self.blocks.stop
            final = torch.log_softmax(mean, dim=-1) if self.adds_up else readout
            predicted = predictions(final, inputs.rows, top, batch.texts)
            laps.lap("sampling")
        result = Activations(
            batch.refined(inputs.rows),
            batch.gathered(state).float().cpu().numpy(),
            readout.cpu().numpy() if self.adds_up else inputs.readout_RV,
            predicted,
        )
        laps.lap("copying out")
        return result

    def _read_context(self, spans: Sequence[RowSpan]) -> None:
        for group in grouped_by_length(spans):
            batch = RowBatch(group, self.compute.device)
            with self._writing(group) as caches:
                for block, cache in zip(self._blocks, caches, strict=True):
                    block.read(batch.ids_BQ, cache)

    @contextmanager
    def _writing(self, spans: Sequence[RowSpan]) -> Iterator[list[BlockCache]]:
        """Views of the rows' caches. If writing fails, only the positions before the rows stay
        valid."""
        for span in spans:
            span.owner.cached = span.row.start
        yield self._cache.view(
            [span.owner.slot for span in spans],
            [span.row.start for span in spans],
            [span.length for span in spans],
        )
        for span in spans:
            span.owner.cached = span.row.start + span.length

    def _admitted(self, rows: Sequence[Row]) -> list[RowSpan]:
        self._check(rows)
        for row in rows:
            if row.source and row.start and not self.cached(row.request):
                self._copy_context(row)
        owners = self._slots.admit(rows, self._clock())
        return [RowSpan(row, owner) for row, owner in zip(rows, owners, strict=True)]

    def _copy_context(self, row: Row) -> None:
        """Begin a context as a copy of another one, if that is still there."""
        count, other = row.start, self._slots.owner(row.source)
        if other and other.cached >= count:
            context = CopiedContext(other.ids, self._cache.context(other.slot, count))
        elif self._kept.length(row.source) >= count:
            context = self._kept.use(row.source)
        else:
            return  # the row will lack its context
        copied = Row(row.request, 0, context.ids[:count], 0)
        (owner,) = self._slots.admit([copied], self._clock())
        self._cache.fill(owner.slot, count, context.layers)
        owner.cached = count

    def _shaped(self, numbers: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
        """The numbers of a step, after a check of their shape. The first block may start without
        numbers, from zeros."""
        if 0 in shape or (self.blocks.start == 0 and not numbers.size):
            return np.zeros(shape, np.float32)
        if numbers.shape != shape:
            raise ProtocolError(f"a step's numbers have shape {numbers.shape}, expected {shape}")
        return numbers

    def _check(self, rows: Sequence[Row]) -> None:
        window, ids = self.config.model.window, self.config.vocabulary.ids
        if not rows or len({row.request for row in rows}) < len(rows):
            raise ProtocolError("a step needs at least one row, and at most one per request")
        for row in rows:
            count = len(row.ids)
            if not 0 <= row.start < row.start + count <= window or not 0 <= row.read <= count:
                raise ProtocolError(
                    f"a row of {count} positions from {row.start} that reads {row.read} does not"
                    f" fit a window of {window}"
                )
            if row.ids.max() >= ids:
                raise ProtocolError(f"{row.ids.max()} is not an id of the vocabulary")


@dataclass(frozen=True)
class BlockSource:
    """The blocks of a run, in the compute precision or, with `weights` "int8", with 8-bit
    matrices."""

    run: RunDir
    weights: str = "full"

    @property
    def config(self) -> Config:
        return self.run.config

    def load(self, block: int, compute: Compute) -> nn.Module:
        """A block on the device, ready for inference."""
        progress = LoadingProgress(block)
        module = load_stored_block(
            self.run, block, compute, compute.dtype, self.weights, progress.add
        )
        progress.end()
        module.use_row_products()
        return module

    def fingerprint(self, block: int) -> str:
        """A hash of a block's weights, which does not depend on the precision that they are loaded
        in. It is computed once for every file, and cached."""
        _, stored, prefix = self.run.stored_weights(block)
        cached = cache_dir() / FINGERPRINTS / f"{stored.sha256}{prefix and f'-{prefix}'}"
        with suppress(OSError):
            if len(known := cached.read_text()) == FINGERPRINT_LENGTH:
                return known
        fingerprint = weights_fingerprint(self.run.read_block(block))
        with suppress(OSError):  # the cache saves time only
            cached.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(cached, fingerprint.encode())
        return fingerprint


class LoadingProgress:
    """Logs how much of a block was read: at the end, and every few seconds before."""

    def __init__(self, block: int) -> None:
        self._block, self._read = block, 0
        self._started = self._logged = time.monotonic()

    def add(self, count: int) -> None:
        self._read += count
        if (now := time.monotonic()) - self._logged > PROGRESS_SECONDS:
            self._logged = now
            log.info("block %d: %.2f GB read", self._block, self._read / 1e9)

    def end(self) -> None:
        seconds = time.monotonic() - self._started
        log.info("block %d: %.2f GB loaded in %.1f s", self._block, self._read / 1e9, seconds)


def weights_fingerprint(weights: Iterable[tuple[str, np.ndarray]]) -> str:
    """A hash of one block's tensors in the order of their names, whatever their file."""
    digest = hashlib.sha256()
    for name, tensor in weights:
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        digest.update(tensor.data if tensor.flags.c_contiguous else tensor.tobytes())
    return digest.hexdigest()[:FINGERPRINT_LENGTH]
