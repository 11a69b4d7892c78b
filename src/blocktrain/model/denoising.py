"""A denoising block: it also reads a noisy target z at a noise level sigma.

Two streams over one causal mask: clean context, which any later noise draw can reuse, and the
noisy target, which the clean stream never sees. Knows nothing of losses.

Shapes: B batch, T positions, D width, E target dimensions, V tokens.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from blocktrain.config import Config
from blocktrain.model.block import Block, typed
from blocktrain.model.cache import BlockCache, LayerCache
from blocktrain.model.layer import Context, Layer, Linear, Rotation, rms_norm
from blocktrain.numerics.noise import Preconditioning

Modulation = tuple[Tensor, ...]

SIGMA_FEATURES = 32
# A zero-initialised head behind a gain learns at the pace of the layers under AdamW. Denoising
# logits carry a factor of about 2 from the preconditioning already.
DENOISING_GAIN = 4.0
# AdamW's steps do not shrink with the gradient: at full scale the weights that read z drift, and
# drown the context in the noise of z.
TARGET_GAIN = 1.0 / 32


class NoiseLevel(NamedTuple):
    """EDM coefficients of each sequence, shaped to multiply B x T x E tensors."""

    c_skip_B11: Tensor
    c_out_B11: Tensor
    c_in_B11: Tensor
    c_noise_B: Tensor
    weight_B: Tensor
    sigma_B11: Tensor

    @classmethod
    def of(cls, levels_BC: Tensor) -> "NoiseLevel":
        """From a tensor whose rows are `Preconditioning` tuples."""
        c_skip, c_out, c_in, c_noise, weight, sigma = levels_BC.unbind(1)
        return cls(
            c_skip[:, None, None],
            c_out[:, None, None],
            c_in[:, None, None],
            c_noise,
            weight,
            sigma[:, None, None],
        )

    @classmethod
    def constant(cls, level: Preconditioning, batch: int, device: torch.device) -> "NoiseLevel":
        """The same level for every sequence."""
        return cls.of(torch.tensor([level] * batch, device=device))


def _two_stream_step(
    layer: Layer, clean_BTD: Tensor, noisy_BTD: Tensor, by: Rotation, modulation: Modulation
) -> tuple[Tensor, Tensor]:
    clean, context = layer.clean(clean_BTD, by)
    return clean, layer.noisy(noisy_BTD, context, by, modulation)


def _last_step(
    layer: Layer, clean_BTD: Tensor, noisy_BTD: Tensor, by: Rotation, modulation: Modulation
) -> Tensor:
    """In the last layer only the clean stream's keys and values are needed."""
    return layer.noisy(noisy_BTD, layer.offer(clean_BTD, by), by, modulation)


class DenoisingBlock(Block):
    """A block that moves a guess z of the next token, given the context and a noise level.

    It reads z and writes its answer F in token coordinates: one number per row of the target table.
    That spans the same F, but AdamW scales each coordinate by itself, and learns the row of a rare
    token far better if no rotation mixes it with frequent ones.
    """

    def __init__(self, config: Config, index: int) -> None:
        super().__init__(config, index)
        width, tokens = config.model.width, config.vocabulary.size
        rank = config.objective.sigma_rank
        # Zero at first: the block starts as a plain language model, and learns what to take from z.
        self.target_in = Linear(tokens, width, zero=True)
        self.sigma_in = Linear(SIGMA_FEATURES, rank)
        self.modulate = nn.ModuleList(
            Linear(rank, layer.modulations * width, zero=True) for layer in typed(self.layers)
        )
        self.target_out = Linear(width, tokens, zero=True)
        self.log_scale = (
            nn.Parameter(torch.tensor(10.0).log())
            if config.objective.logit_scale == "learned"
            else None
        )

    def undecayed(self) -> Iterator[nn.Parameter]:
        yield from self.sigma_in.parameters()
        if self.log_scale is not None:
            yield self.log_scale

    def forward(self, ids_BT: Tensor, z_BTE: Tensor, level: NoiseLevel, table_VE: Tensor) -> Tensor:
        """Logits of the next token at every position, both streams in one pass."""
        by = self.rotation(slice(0, ids_BT.size(1)))
        clean = self.embedded(ids_BT)
        noisy = self._start(clean, z_BTE, level, table_VE)
        *before, last = zip(typed(self.layers), self.modulations(level), strict=True)
        for layer, modulation in before:
            clean, noisy = self.apply_layer(_two_stream_step, layer, clean, noisy, by, modulation)
        noisy = self.apply_layer(_last_step, last[0], clean, noisy, by, last[1])
        return self._logits(noisy, z_BTE, level, table_VE)

    def read_context(self, ids_BT: Tensor, cache: BlockCache | None = None) -> "BlockContext":
        """The clean stream alone: all that later noise draws need of the context."""
        count = ids_BT.size(1)
        by = self.rotation(cache.layers[0].positions(count) if cache else slice(0, count))
        embedded = x = self.embedded(ids_BT)
        contexts: list[Context] = []
        memories: Sequence[LayerCache | None]
        memories = cache.layers if cache else [None] * len(self.layers)
        *before, last = zip(typed(self.layers), memories, strict=True)
        for layer, memory in before:
            x, context = layer.clean(x, by, memory)
            contexts.append(context)
        contexts.append(last[0].offer(x, by, last[1]))
        return BlockContext(embedded, contexts, by)

    def denoise(
        self,
        context: "BlockContext",
        z_BTE: Tensor,
        level: NoiseLevel,
        table_VE: Tensor,
        modulations: list[Modulation] | None = None,
    ) -> Tensor:
        """The noisy stream alone, over a context that was read before; `modulations` of the level,
        if many steps share them."""
        x = self._start(context.clean_BTD, z_BTE, level, table_VE)
        if modulations is None:
            modulations = self.modulations(level)
        for layer, modulation, memory in zip(
            typed(self.layers), modulations, context.layers, strict=True
        ):
            x = layer.noisy(x, memory, context.by, modulation)
        return self._logits(x, z_BTE, level, table_VE)

    def _start(
        self, clean_BTD: Tensor, z_BTE: Tensor, level: NoiseLevel, table_VE: Tensor
    ) -> Tensor:
        seen_BTV = (TARGET_GAIN * level.c_in_B11 * z_BTE) @ table_VE.T
        noisy: Tensor = self.target_in(seen_BTV.to(self.compute_dtype))
        return clean_BTD + noisy

    def modulations(self, level: NoiseLevel) -> list[Modulation]:
        """Per layer: B x 1 x D tensors that depend on sigma alone."""
        frequencies = torch.arange(1, SIGMA_FEATURES // 2 + 1, device=level.c_noise_B.device)
        angles = level.c_noise_B[:, None] * frequencies * torch.pi
        features = torch.cat([angles.cos(), angles.sin()], dim=-1)
        hidden = nn.functional.silu(self.sigma_in(features))
        return [
            modulate(hidden)[:, None, :].to(self.compute_dtype).chunk(layer.modulations, dim=-1)
            for layer, modulate in zip(typed(self.layers), self.modulate, strict=True)
        ]

    def _logits(self, n_BTD: Tensor, z_BTE: Tensor, level: NoiseLevel, table_VE: Tensor) -> Tensor:
        f_BTE = DENOISING_GAIN * self.target_out(rms_norm(n_BTD)).float() @ table_VE
        x_BTE = level.c_skip_B11 * z_BTE + level.c_out_B11 * f_BTE
        # Scaled by the weight, the skip path is exactly the Gaussian evidence z.e / sigma^2.
        scale = level.weight_B[:, None, None] if self.log_scale is None else self.log_scale.exp()
        logits: Tensor = scale * (x_BTE @ table_VE.T)
        return logits


class BlockContext(NamedTuple):
    """A read context: embeddings and, per layer, keys and values."""

    clean_BTD: Tensor
    layers: list[Context]
    by: Rotation
