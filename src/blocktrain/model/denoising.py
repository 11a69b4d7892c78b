"""A denoising block: it predicts the next token from the context and from z, a noisy guess of it.

Two streams run through the block's layers (model/layer.py). The clean stream reads the context
only, so one pass over the context serves any number of guesses. The noisy stream reads z and
attends to the clean stream. Sigma, the noise level of z, modulates the noisy stream.

Shapes: B batch, T positions, D width, E target dimensions, V tokens.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from blocktrain.config import Config
from blocktrain.config.sizes import SIGMA_FEATURES, needs_chunks
from blocktrain.model.block import Block, LogitsAt, typed, with_caches
from blocktrain.model.cache import BlockCache
from blocktrain.model.layer import Context, Layer, Rotation, rms_norm
from blocktrain.model.linear import Linear, linear_cross_entropy
from blocktrain.numerics.noise import Preconditioning

Modulation = tuple[Tensor, ...]

# Multiplies the output, so that under AdamW a zero-initialised head learns as fast as the layers.
# It is half of CAUSAL_GAIN, since preconditioning multiplies the logits by about 2 as well.
DENOISING_GAIN = 4.0
# Scales z down at the input. AdamW's steps do not shrink with the gradient, so at full scale the
# weights that read z drift until the noise in z drowns the context.
TARGET_GAIN = 1.0 / 32


class NoiseLevel(NamedTuple):
    """EDM coefficients of each sequence, shaped to broadcast over B x T x E tensors."""

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
        c_skip, c_out, c_in, sigma = (x[:, None, None] for x in (c_skip, c_out, c_in, sigma))
        return cls(c_skip, c_out, c_in, c_noise, weight, sigma)

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
    """Run the last layer: the noisy stream and, of the clean stream, only its keys and values,
    since nothing reads its output."""
    return layer.noisy(noisy_BTD, layer.offer(clean_BTD, by), by, modulation)


class DenoisingBlock(Block):
    """A block that improves a guess z of the next token, given the context and a noise level.

    With a small vocabulary, its input z and its output F are in token coordinates: one number per
    row of the target table. Both forms can express the same F, but AdamW scales every coordinate
    separately: a rare token is learned far better if it has a coordinate of its own, which no
    rotation mixes with frequent tokens. With a large vocabulary, z and F stay in the space of the
    table.
    """

    def __init__(self, config: Config, index: int) -> None:
        super().__init__(config, index)
        width, tokens = config.model.width, config.vocabulary.size
        self.in_token_coordinates = not needs_chunks(tokens)
        coordinates = tokens if self.in_token_coordinates else config.objective.target_dim
        rank = config.objective.sigma_rank
        # Starts at zero: the block is a plain language model at first, and learns to use z.
        self.target_in = Linear(coordinates, width, zero=True)
        self.sigma_in = Linear(SIGMA_FEATURES, rank)
        self.modulate = nn.ModuleList(
            Linear(rank, layer.modulations * width, zero=True) for layer in typed(self.layers)
        )
        self.target_out = Linear(width, coordinates, zero=True)
        self.log_scale = (
            nn.Parameter(torch.tensor(10.0).log())
            if config.objective.logit_scale == "learned"
            else None
        )

    def undecayed(self) -> Iterator[nn.Parameter]:
        yield from self.sigma_in.parameters()
        if self.log_scale is not None:
            yield self.log_scale

    def forward(
        self,
        ids_BT: Tensor,
        z_BTE: Tensor,
        level: NoiseLevel,
        table_VE: Tensor,
        scored: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Logits of the next token at every position. With `scored` (targets and their weights,
        B x T), two numbers instead: the weighted sum of the positions' cross entropies, and their
        mean. They are computed without storing all logits."""
        answer_BTE = self.answer(ids_BT, z_BTE, level, table_VE)
        if scored is None:
            return self.logits(answer_BTE, level, table_VE)
        targets_N, shares_N = (part.flatten() for part in scored)
        x_NE = (self._scale(level) * answer_BTE).flatten(0, 1)
        total, losses_N = linear_cross_entropy(x_NE, table_VE, targets_N, 1.0, shares_N)
        return torch.stack([total, losses_N.mean()])

    def answer(self, ids_BT: Tensor, z_BTE: Tensor, level: NoiseLevel, table_VE: Tensor) -> Tensor:
        """The block's guess of the target's embedding (B x T x E); both streams run in one pass."""
        by = self.rotation(ids_BT.size(1))
        clean = self.embedded(ids_BT)
        noisy = self._start(clean, z_BTE, level, table_VE)
        *before, last = zip(typed(self.layers), self.modulations(level), strict=True)
        for layer, modulation in before:
            clean, noisy = self.apply_layer(_two_stream_step, layer, clean, noisy, by, modulation)
        noisy = self.apply_layer(_last_step, last[0], clean, noisy, by, last[1])
        return self._answer(noisy, z_BTE, level, table_VE)

    def logits(self, answer_BTE: Tensor, level: NoiseLevel, table_VE: Tensor) -> Tensor:
        logits: Tensor = self._scale(level) * (answer_BTE @ table_VE.T)
        return logits

    def logits_of(self, answer_BTE: Tensor, level: NoiseLevel, table_VE: Tensor) -> LogitsAt:
        return lambda at: self.logits(answer_BTE[:, at], level, table_VE)

    def read_context(self, ids_BT: Tensor, cache: BlockCache | None = None) -> "BlockContext":
        """Run the clean stream only. Any number of calls of `denoise` can share the result."""
        caches = cache.layers if cache else None
        by = self.rotation(ids_BT.size(1), caches)
        embedded = x = self.embedded(ids_BT)
        contexts: list[Context] = []
        *before, (last, last_cache) = with_caches(self.layers, caches)
        for layer, layer_cache in before:
            x, context = layer.clean(x, by, layer_cache)
            contexts.append(context)
        contexts.append(last.offer(x, by, last_cache))
        return BlockContext(embedded, contexts, by)

    def denoise(
        self,
        context: "BlockContext",
        z_BTE: Tensor,
        level: NoiseLevel,
        table_VE: Tensor,
        modulations: list[Modulation],
    ) -> Tensor:
        """The same as `answer`, but runs the noisy stream only, over the result of `read_context`.
        `modulations` depend only on the level, so many steps share them."""
        x = self._start(context.clean_BTD, z_BTE, level, table_VE)
        layers = zip(typed(self.layers), modulations, context.layers, strict=True)
        for layer, modulation, layer_context in layers:
            x = layer.noisy(x, layer_context, context.by, modulation)
        return self._answer(x, z_BTE, level, table_VE)

    def _start(
        self, clean_BTD: Tensor, z_BTE: Tensor, level: NoiseLevel, table_VE: Tensor
    ) -> Tensor:
        scaled = TARGET_GAIN * level.c_in_B11 * z_BTE
        if self.in_token_coordinates:
            scaled = scaled @ table_VE.T
        noisy: Tensor = self.target_in(scaled.to(self.compute_dtype))
        return clean_BTD + noisy

    def modulations(self, level: NoiseLevel) -> list[Modulation]:
        """For each layer, B x 1 x D tensors that depend only on sigma."""
        frequencies = torch.arange(1, SIGMA_FEATURES // 2 + 1, device=level.c_noise_B.device)
        angles = level.c_noise_B[:, None] * frequencies * torch.pi
        features = torch.cat([angles.cos(), angles.sin()], dim=-1)
        hidden = nn.functional.silu(self.sigma_in(features))
        return [
            modulate(hidden)[:, None, :].to(self.compute_dtype).chunk(layer.modulations, dim=-1)
            for layer, modulate in zip(typed(self.layers), self.modulate, strict=True)
        ]

    def _answer(self, n_BTD: Tensor, z_BTE: Tensor, level: NoiseLevel, table_VE: Tensor) -> Tensor:
        f = DENOISING_GAIN * self.target_out(rms_norm(n_BTD)).float()
        f_BTE = f @ table_VE if self.in_token_coordinates else f
        answer: Tensor = level.c_skip_B11 * z_BTE + level.c_out_B11 * f_BTE
        return answer

    def _scale(self, level: NoiseLevel) -> Tensor:
        """The factor of the logits. With EDM's weight as the factor, the skip path contributes
        exactly the Gaussian evidence z.e / sigma^2."""
        return level.weight_B[:, None, None] if self.log_scale is None else self.log_scale.exp()


class BlockContext(NamedTuple):
    """What the clean stream computed: embeddings and, per layer, keys and values."""

    clean_BTD: Tensor
    layers: list[Context]
    by: Rotation
