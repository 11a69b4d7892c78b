"""The plain PyTorch loop: the same model without this project, as a baseline.

Not run by itself; bench/speed.py and bench/memory.py import it.

Shapes: B batch, T positions, D width, H heads, K = D / H.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, rms_norm, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

from blocktrain.config import BYTE_VOCABULARY, Config, ModelConfig
from blocktrain.data.corpus import Corpus, TrainingWindows
from blocktrain.numerics.sampling import mixed_seed
from blocktrain.training.device import Compute
from blocktrain.training.trainer import DATA_STREAM


def check_like(config: Config) -> None:
    """The plain loop is written for one shape of layer; refuse to compare it with another."""
    unlike = {
        "model.activation": config.model.activation != "swiglu",
        "model.dropout": config.model.dropout > 0,
        "train.accumulate": config.train.accumulate > 1,
        "train.clip": config.train.clip == 0,
    }
    if names := [name for name, differs in unlike.items() if differs]:
        raise SystemExit(f"the plain loop has no equal of this config's {', '.join(names)}")


class PlainLayer(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        width = model.width
        hidden = max(8, round(int(width * model.mlp_ratio) * 2 / 3 / 8) * 8)
        self.heads = model.heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.taps = nn.Parameter(torch.zeros(model.taps, width))

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        x = x_BTD + self._attend(self._filter(_norm(x_BTD)), cos_TK, sin_TK)
        gate, value = self.up(_norm(x)).chunk(2, dim=-1)
        return x + self.down(silu(gate) * value)

    def _attend(self, h_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        batch, length, width = h_BTD.shape
        qkv = self.qkv(h_BTD).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        q, k = _rope(_norm(q), cos_TK, sin_TK), _rope(_norm(k), cos_TK, sin_TK)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))

    def _filter(self, h_BTD: Tensor) -> Tensor:
        count, length = self.taps.size(0), h_BTD.size(1)
        padded = pad(h_BTD, (0, 0, count, 0))
        mixed = h_BTD
        for back, tap in enumerate(self.taps.to(h_BTD.dtype), start=1):
            mixed = mixed + tap * padded[:, count - back : count - back + length]
        return mixed


class PlainModel(nn.Module):
    """A causal LM whose residual stream is kept in the compute type, as the project's is."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype, recompute: bool) -> None:
        super().__init__()
        self.dtype, self.recompute = dtype, recompute
        self.embed = nn.Embedding(BYTE_VOCABULARY.ids, model.width)
        self.layers = nn.ModuleList(PlainLayer(model) for _ in range(model.layers))
        self.head = nn.Linear(model.width, BYTE_VOCABULARY.size, bias=False)
        head_width = model.width // model.heads
        frequencies = 10_000.0 ** -(torch.arange(0, head_width, 2) / head_width)
        angles = torch.arange(model.window)[:, None] * frequencies
        self.register_buffer("cos", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype), persistent=False)

    def forward(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x = self.embed(ids_BT).to(self.dtype)
        for layer in self.layers:
            if self.recompute:
                x = checkpoint(layer, x, self.cos, self.sin, use_reentrant=False)
            else:
                x = layer(x, self.cos, self.sin)
        logits = self.head(_norm(x)).float()
        return cross_entropy(logits.flatten(0, 1), targets_BT.flatten())


def _norm(x: Tensor) -> Tensor:
    return rms_norm(x, (x.size(-1),))


def _rope(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    first, second = x_BHTK.chunk(2, dim=-1)
    return torch.cat([first * cos_TK - second * sin_TK, second * cos_TK + first * sin_TK], dim=-1)


class PlainLoop:
    def __init__(self, config: Config, corpus: Corpus, compute: Compute) -> None:
        settings = config.train
        if compute.dtype == torch.bfloat16:  # the project's trainer does the same
            torch.set_float32_matmul_precision("high")
        torch.manual_seed(settings.seed)
        self.settings, self.compute = settings, compute
        self.model = PlainModel(config.model, compute.dtype, settings.checkpoint_layers)
        self.model.to(compute.device)
        self.forward: Callable[..., Tensor] = (
            compute.compiled(self.model) if settings.compile else self.model
        )
        self.windows = TrainingWindows(
            corpus.split("train"),
            config.model.window,
            settings.batch,
            mixed_seed(settings.seed, 0, DATA_STREAM),
        )
        matrices = [p for name, p in self.model.named_parameters() if "taps" not in name]
        filters = [p for name, p in self.model.named_parameters() if "taps" in name]
        groups: list[dict[str, Any]] = [
            {"params": matrices},
            {"params": filters, "weight_decay": 0.0},
        ]
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            groups,
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.steps_done = 0
        self.loss = torch.zeros(())

    def step(self) -> None:
        ids, targets = self._batch()
        half = self.compute.dtype != torch.float32
        with torch.autocast(self.compute.device.type, self.compute.dtype, enabled=half):
            loss = self.forward(ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate(self.steps_done)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = loss.detach()
        self.steps_done += 1

    def _batch(self) -> tuple[Tensor, Tensor]:
        host = torch.from_numpy(self.windows[self.steps_done])
        if self.compute.device.type == "cuda":
            host = host.pin_memory()
        targets = host.to(self.compute.device, non_blocking=True).long()
        return pad(targets[:, :-1], (1, 0), value=BYTE_VOCABULARY.bos), targets

    def last_loss(self) -> float:
        return float(self.loss)
