"""Runs on this machine, from Python: train, import, export, and load as a torch module."""

import codecs
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blocktrain.api.display import Bar, bars, progress_bar, stop_on_signal
from blocktrain.config import Config, load_config
from blocktrain.config.presets import config_path
from blocktrain.data.corpus import Corpus, evaluation_windows
from blocktrain.data.run_text import run_tokenizer, scored_text
from blocktrain.environment import PROGRAM
from blocktrain.errors import RequestError
from blocktrain.interop.checkpoint import CONFIG, open_checkpoint
from blocktrain.interop.hugging_face import HuggingFaceExport, refuse_unexportable
from blocktrain.interop.importing import Import
from blocktrain.model.stack import Stack, as_stack, read_out
from blocktrain.numerics.sampling import Sampling
from blocktrain.serve.router import first_block
from blocktrain.serve.router.profile import NO_PROFILER, Profiler
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.device import resolve
from blocktrain.training.estimation import training_flops
from blocktrain.training.evaluate import Evaluation, evaluate, fit_product_weights
from blocktrain.training.memory_check import check_run
from blocktrain.training.run_session import open_session
from blocktrain.training.stored_models import load_stack

Settings = Mapping[str, Any]  # by dotted name, such as {"train.steps": 100}


def read_config(config: "Config | str | Path", settings: Settings | None = None) -> Config:
    """The settings of a new run: a preset's name, a TOML file or a Config, with some changed."""
    if not isinstance(config, Config):
        config = load_config(config_path(config))
    changed = {name.replace(".", "__"): value for name, value in (settings or {}).items()}
    return config.with_settings(**changed)


def train(
    config: "Config | str | Path",
    out: str | Path,
    settings: Settings | None = None,
    *,
    parallel: int = 1,
    force: bool = False,
    progress: bool = True,
) -> Path:
    """Train a run on this machine, and return its folder. The same call resumes an interrupted run.

    `config`: a preset's name, a TOML file, or a Config; `settings` changes some of its settings.
    `parallel`: number of blocks to train at the same time, each in its own process. `force`: train
    even if the estimate does not fit into free memory.

    >>> import blocktrain as bt
    >>> run = bt.train("tiny", out=folder / "tiny", settings={"train.steps": 3, "train.batch": 2})
    >>> bt.load(run).config.train.steps
    3
    """
    chosen = read_config(config, settings)
    blocks = range(chosen.block_count)
    if not force:
        check_run(chosen, Path(out), blocks, parallel)
    session = open_session(chosen, Path(out))
    with stop_on_signal() as stop, bars(hidden=not progress) as show:

        def report(now: Any) -> None:
            note = "" if now.ce is None else f"training loss {now.ce:.3f} nats/byte"
            show(f"block {now.block}", Bar(now.step, now.steps, note))

        if parallel > 1:
            done = session.train_side_by_side(blocks, parallel, report, stop, PROGRAM)
        else:
            done = session.train_in_turn(blocks, report, stop)
    if not done:
        raise KeyboardInterrupt(f"stopped; the same call resumes {out}")
    return Path(out)


def load(
    source: str | Path,
    *,
    device: str = "auto",
    precision: str = "auto",
    blocks: int | None = None,
    frozen: bool = False,
) -> "Model":
    """Load a model: the folder of a trained, fetched, imported or exported run, or a Hugging Face
    folder. `blocks`: use only this many, the first ones (early exit). `frozen`: store weights in
    the precision of computing instead of fp32, for a model that is not to be trained.

    A Hugging Face folder is converted in a temporary folder of the same size.
    """
    folder, compute = Path(source), resolve(device, precision)
    if (folder / CONFIG).is_file() and not (folder / "config.toml").exists():
        with tempfile.TemporaryDirectory(prefix="blocktrain-") as scratch:
            run = Import(open_checkpoint(str(folder)), blocks=1).write(Path(scratch) / "run")
            return Model(run, load_stack(run, compute, frozen=frozen).first(blocks))
    run = RunDir.open(folder)
    return Model(run, load_stack(run, compute, frozen=frozen).first(blocks))


def import_hf(
    source: str | Path, out: str | Path, *, blocks: int, window: int | None = None
) -> Path:
    """Import a model in Hugging Face's format as a run of this many blocks, and return its folder.

    `source`: a folder, or the name of a repository on the hub (OWNER/NAME). `window`: context
    length in tokens; default: the model's own, but at most 4096. The same call resumes an
    interrupted import.
    """
    planned = Import(open_checkpoint(str(source)), blocks, window)
    with progress_bar("copying", planned.size, of_bytes=True) as on_copied:
        planned.write(Path(out), on_copied)
    return Path(out)


def export_hf(
    run: str | Path, out: str | Path, *, dtype: str = "stored", shard_gb: float = 5.0
) -> Path:
    """Write a run's model as a new Hugging Face folder, for transformers, vLLM and others.

    The run needs `model.layer = llama` and a tokenizer. `dtype`: stored, f32, bf16 or f16.
    """
    opened = RunDir.open(Path(run))
    refuse_unexportable(opened.config)
    export = HuggingFaceExport(opened, int(shard_gb * 1e9), dtype, training_flops(opened))
    with progress_bar("copying", export.size, of_bytes=True) as on_copied:
        return export.write(Path(out), on_copied)


class Model(nn.Module):
    """A run's assembled model.

    It is an ordinary torch module: it has parameters, moves between devices with `to`, and its
    `forward` maps ids to log-probabilities of the next token. Its weights require no gradients
    until you call `requires_grad_()`. It starts in eval mode.
    """

    def __init__(self, run: RunDir, stack: Stack) -> None:
        super().__init__()
        self.run = run
        self.config = run.config
        self.tokenizer = run_tokenizer(run)
        self.blocks = nn.ModuleList(stack.blocks)
        self.eval()

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def stack(self) -> Stack:
        """The same blocks as a Stack, which has every block's own predictions."""
        return as_stack(self.config, list(self.blocks))

    def forward(self, ids_BT: Tensor, readout: str | None = None) -> Tensor:
        """Log-probabilities (B x T x V) of the token after each position.

        Ids are those of `encode`, at most `config.model.window`. `readout`: `product` of all blocks
        (default if tokens are bytes) or `final`, the last block's alone (default otherwise).
        """
        predictions = self.stack.predictions(ids_BT.to(self.device))
        log_probs = [torch.log_softmax(logits(slice(None)), dim=-1) for logits in predictions]
        return read_out(self._readout(readout), log_probs)

    def encode(self, text: str) -> Tensor:
        """The ids (1 x T) that the model reads for a text: its tokens, after the one that begins a
        text if there is one.

        >>> model.encode("abc").tolist()
        [[256, 97, 98, 99]]
        """
        vocabulary, tokens = self.config.vocabulary, self.tokenizer.encode(text)
        begins = vocabulary.starts_with_bos or not tokens
        return torch.tensor([[vocabulary.bos, *tokens] if begins else tokens])

    @torch.no_grad()
    def logits(self, text: str | Sequence[int] | Tensor, readout: str | None = None) -> Tensor:
        """Log-probabilities (T x V) of the token after each position of a text or of ids.

        >>> model.logits("abc").shape
        torch.Size([4, 256])
        """
        ids_BT = self.encode(text) if isinstance(text, str) else torch.as_tensor(text)[None]
        window = self.config.model.window
        if not 0 < ids_BT.size(1) <= window:
            raise RequestError(
                f"the text has {ids_BT.size(1)} tokens, but this model reads 1 to {window};"
                " shorten the text"
            )
        log_probs: Tensor = self(ids_BT, readout)[0]
        return log_probs

    def generate(
        self,
        prompt: str = "",
        tokens: int = 256,
        *,
        temperature: float = 0.8,
        seed: int = 0,
        readout: str | None = None,
        start: str = "mean",
    ) -> str:
        """The text that continues a prompt. Equal seeds give equal texts; temperature 0 always
        takes the most likely token.

        >>> len(list(model.stream_ids("The ", tokens=5)))
        5
        """
        options: dict[str, Any] = {"seed": seed, "readout": readout, "start": start}
        ids = self.stream_ids(prompt, tokens, temperature=temperature, **options)
        return self.tokenizer.decode(ids).decode("utf-8", errors="replace")

    def stream(self, prompt: str = "", tokens: int = 256, **options: Any) -> Iterator[str]:
        """Like `generate`, but yields pieces of text as they are generated."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in self.stream_ids(prompt, tokens, **options):
            yield decoder.decode(self.tokenizer.token_bytes(token))
        yield decoder.decode(b"", final=True)

    def stream_ids(
        self,
        prompt: str = "",
        tokens: int = 256,
        *,
        temperature: float = 0.8,
        seed: int = 0,
        readout: str | None = None,
        start: str = "mean",
        profiler: Profiler = NO_PROFILER,
    ) -> Iterator[int]:
        """Like `generate`, but yields tokens. `start`: what denoising blocks refine first, the
        `mean` of all targets or random `noise`."""
        ids, sampling = self.tokenizer.encode(prompt, marks=True), Sampling(temperature, seed=seed)
        return first_block.generate(
            self.stack, ids, tokens, sampling,
            readout=self._readout(readout), start=start, profiler=profiler,
        )  # fmt: skip

    def evaluate(
        self,
        data: str | Corpus | None = None,
        *,
        split: str = "valid",
        windows: int | None = None,
        draws: int = 0,
        seed: int = 0,
        fit_weights: bool = False,
        progress: bool = True,
    ) -> Evaluation:
        """Score the model on non-overlapping windows: every token is predicted once, from the
        tokens before it. `data`: a text, written as `data.source`; default: the run's own.

        The result has the score as `ce`, in nats per byte, and all scores as `rows()`, which
        pandas.DataFrame takes. `draws` and `fit_weights` add rows as `blocktrain eval` does.

        >>> 0 < model.evaluate(windows=4).ce < 10
        True
        """
        corpus = data if isinstance(data, Corpus) else scored_text(self.run, data).corpus
        window = self.config.model.window
        chosen = evaluation_windows(corpus.split(split, window), window, windows)
        weights = None
        if fit_weights and len(self.blocks) > 1:
            weights = fit_product_weights(self.stack, corpus.split("valid", window))
        size = corpus.bytes_of(chosen)
        with progress_bar("scoring windows", len(chosen), hidden=not progress) as on_scored:
            return evaluate(self.stack, chosen, draws, seed, weights, on_scored, size)

    def extra_repr(self) -> str:
        model = self.config.model
        return (
            f"{self.config.objective.kind}, {model.layers} layers of width {model.width} in"
            f" {len(self.blocks)} blocks, window {model.window}"
        )

    def _readout(self, readout: str | None) -> str:
        if self.config.kind.last_block_predicts:
            return "final"
        return readout or self.config.default_readout
