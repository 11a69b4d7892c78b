"""Blocks that compute on the router's machine: the model's own first block, and a draft model.

The first block starts every step, and drafts without the network. Drafts are sampled one after
another from its own distribution, with noise fixed by their text positions; those of several
requests are computed together. `generate` runs the same decoder with all blocks in this process.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from blocktrain.data.tokenizer import TOKENIZER_FILE, Tokenizer
from blocktrain.errors import ConfigError
from blocktrain.model.stack import Stack, starting_point
from blocktrain.numerics.sampling import Sampling, mixed_seed
from blocktrain.serve.ring.activations import (
    EMPTY,
    GREEDY,
    Activations,
    Choice,
    Row,
    joined,
    split_rows,
)
from blocktrain.serve.ring.batch import SlotLimits
from blocktrain.serve.ring.compute import StageCompute
from blocktrain.serve.ring.laps import UNTIMED, Laps
from blocktrain.serve.router.decode import (
    AnswerCost,
    GenerationRequest,
    Proposal,
    TraversalCost,
    new_decoding,
)
from blocktrain.serve.router.profile import NO_PROFILER, Profiler
from blocktrain.training.device import Compute

NOISE_STREAM = 1  # separates this noise from other uses of a request's seed
ONE_REQUEST = SlotLimits(requests=1, cache_bytes=1 << 62)
NOTHING_READ = (0, np.zeros(0, np.uint32))


class FirstBlock:
    """Computes the first block in every step. `noise_start`: a denoising model's z starts as noise
    instead of zeros."""

    def __init__(self, first: StageCompute, *, noise_start: bool = False) -> None:
        self.first = first
        self._noise_start = noise_start and first.denoises

    def prefills(self, proposals: Mapping[int, Proposal]) -> list[Row]:
        """Context that every stage can read by itself, in parallel, before the step arrives. Empty
        for a cascade, where the context's features travel with the step."""
        if not self.first.denoises:
            return []
        return [
            Row(
                request,
                proposal.start,
                proposal.ids[: proposal.context],
                0,
                source=proposal.source,
            )
            for request, proposal in proposals.items()
            if proposal.context
        ]

    def step(self, proposals: Mapping[int, Proposal], laps: Laps = UNTIMED) -> list[Activations]:
        """Compute every proposal and its drafts in the first block. Leaves out the context that
        `prefills` returns."""
        if prefills := self.prefills(proposals):
            self.first.prefill(prefills)
            laps.lap("prefill")
            proposals = {request: _read_only(each) for request, each in proposals.items()}
        proposals = self._with_guesses(proposals, laps)
        if not (self.first.is_last or self.first.config.has_head(0)):
            proposals = {request: replace(each, drafts=0) for request, each in proposals.items()}
        rows = self._rows(proposals)
        state = self._noise(proposals.values()) if self._noise_start else EMPTY
        parts: dict[int, list[Activations]] = {request: [] for request in proposals}
        while rows:
            unfinished = [
                row.request
                for row in rows
                if len(parts[row.request]) < proposals[row.request].drafts
            ]
            for part in self._advance(
                rows, state, draft=bool(unfinished and not self.first.is_last), laps=laps
            ):
                parts[part.rows[0].request].append(part)
            rows, state = [_draft(parts[request][-1]) for request in unfinished], EMPTY
        return [self._joined_drafts(own) for own in parts.values()]

    def read(self, chunks: Mapping[int, Proposal], laps: Laps = UNTIMED) -> list[Activations]:
        """Read chunks of contexts. Returns what the stages need to read them too; nothing if they
        read them by themselves (`prefills`)."""
        if prefills := self.prefills(chunks):
            self.first.prefill(prefills)
            return []
        drafts = self.first.config.has_head(0) and any(each.drafts for each in chunks.values())
        draft = drafts and not self.first.is_last
        parts = self._advance(self._rows(chunks), draft=draft, laps=laps)
        return [replace(part, predictions=None) for part in parts]

    def split(self, activations: Activations) -> list[Activations]:
        """Split a step into one per row."""
        return split_rows(activations, [self.first.carried(row) for row in activations.rows])

    def _advance(
        self, rows: Sequence[Row], state: np.ndarray = EMPTY, *, draft: bool, laps: Laps
    ) -> list[Activations]:
        return self.split(self.first.step(Activations(rows, state), draft=draft, laps=laps))

    def _rows(self, proposals: Mapping[int, Proposal]) -> list[Row]:
        top = max(each.top for each in proposals.values())  # equal in all rows, to concatenate them
        return [
            Row(
                request,
                each.start,
                each.ids,
                each.read,
                Choice(
                    each.sampling,
                    each.position,
                    top,
                    each.refine and self.first.denoises,
                    each.answer_from,
                ),
                each.source,
            )
            for request, each in proposals.items()
        ]

    def _joined_drafts(self, parts: Sequence[Activations]) -> Activations:
        """One row from a row and its drafts, with predictions if this is the only block."""
        whole, rows = joined(parts), [part.rows[0] for part in parts]
        ids = np.concatenate([row.ids for row in rows])
        row = replace(rows[0], ids=ids, read=sum(row.read for row in rows))
        predicted = whole.predictions if self.first.is_last else None
        return replace(whole, rows=(row,), predictions=predicted)

    def _noise(self, proposals: Iterable[Proposal]) -> np.ndarray:
        """Noise for the newest position of each proposal, fixed by seed and text position."""
        config, device = self.first.config, self.first.compute.device
        starts = []
        for proposal in proposals:
            position = proposal.position + proposal.read - 1
            seed = mixed_seed(proposal.sampling.seed, position, NOISE_STREAM)
            zeros = starting_point(config, "mean", (proposal.read - 1,), 0, device)
            starts += [zeros, starting_point(config, "noise", (1,), seed, device)]
        return torch.cat(starts).cpu().numpy()

    def _with_guesses(
        self, proposals: Mapping[int, Proposal], laps: Laps
    ) -> Mapping[int, Proposal]:
        """Replace masks by guesses, all at once. Blocks of a cascade are not trained on masks, so
        there the first block drafts token by token."""
        mask = self.first.config.vocabulary.mask
        masked = {request: each for request, each in proposals.items() if each.ids[-1] == mask}
        if not masked:
            return proposals
        if not self.first.denoises:
            return {**proposals, **{request: _to_draft(each) for request, each in masked.items()}}
        rows = self._rows({r: replace(each, refine=False) for r, each in masked.items()})
        guesses = {
            part.rows[0].request: part for part in self._advance(rows, draft=True, laps=laps)
        }
        guessed = {request: _guessed(each, guesses[request]) for request, each in masked.items()}
        return {**proposals, **guessed}


def _draft(part: Activations) -> Row:
    """The next position of a row: the token that the first block predicts after it."""
    (row,), predicted = part.rows, part.predictions
    assert predicted is not None
    choice = replace(row.choice, position=row.choice.position + row.read)
    return Row(row.request, row.start + len(row.ids), predicted.tokens_R[-1:], 1, choice)


def _read_only(proposal: Proposal) -> Proposal:
    return proposal.after(proposal.context) if proposal.context else proposal


def _to_draft(proposal: Proposal) -> Proposal:
    ids = proposal.ids[: proposal.context + 1]
    return replace(proposal, ids=ids, read=1, drafts=proposal.read - 1)


def _guessed(proposal: Proposal, part: Activations) -> Proposal:
    """The proposal with its masks replaced by the first block's predictions."""
    assert part.predictions is not None
    guesses = part.predictions.tokens_R[:-1]
    return replace(proposal, ids=np.concatenate([proposal.ids[: proposal.context + 1], guesses]))


def generate(
    stack: Stack,
    prompt: Sequence[int],
    count: int,
    sampling: Sampling = GREEDY,
    *,
    readout: str | None = None,
    start: str = "mean",
    profiler: Profiler = NO_PROFILER,
) -> Iterator[int]:
    """Yield `count` tokens that continue the prompt, one traversal each.

    `stack` may consist of only a model's first blocks. `readout`: `product` or `final`; default:
    `Config.default_readout`. `start` is where a denoising model's z
    starts: "mean" is zeros, "noise" is noise fixed by the seed.
    """
    compute = Compute(stack.device, stack.blocks[0].compute_dtype)  # type: ignore[arg-type]
    depth = len(stack.blocks)
    first, *others = (
        StageCompute(
            stack.config, blocks, stack.blocks[blocks.start : blocks.stop], compute,
            readout or stack.config.default_readout, ONE_REQUEST, block_count=depth,
        )
        for blocks in (range(1), range(1, depth))
        if blocks
    )  # fmt: skip
    front = FirstBlock(first, noise_start=start == "noise")
    request = GenerationRequest(prompt, count, mode="ar", sampling=sampling)
    decoding = new_decoding(request, stack.config, AnswerCost(), TraversalCost())
    while proposal := decoding.propose():
        traversal = profiler.begin()
        proposals, laps = {0: proposal}, traversal.laps
        (activations,), prefills = front.step(proposals, laps), front.prefills(proposals)
        for stage in others:
            if prefills:
                stage.prefill(prefills)
                laps.lap("prefill")
            activations = stage.step(activations, laps=laps)
        assert activations.predictions is not None
        tokens = decoding.take(activations.rows[0], activations.predictions)
        laps.lap("decoding")
        profiler.finish(traversal)
        yield from (token.id for token in tokens)


class DraftModel:
    """A whole draft model in one process. It samples every text position with the same noise as the
    model, so both pick the same token wherever their distributions agree."""

    def __init__(self, blocks: StageCompute) -> None:
        self._model = FirstBlock(blocks)
        self._config = blocks.config
        self._read: dict[int, tuple[int, np.ndarray]] = {}  # where each text is read from, as ids

    def drafted(self, proposals: Mapping[int, Proposal]) -> dict[int, Proposal]:
        """The proposals; where one requests drafts of this model, it contains them as guesses."""
        own = {request: self._proposal(request, each) for request, each in proposals.items()
               if each.text is not None and each.drafts}  # fmt: skip
        result = dict(proposals)
        if own:
            for part in self._model.step(own):
                (row,), predicted = part.rows, part.predictions
                assert predicted is not None
                result[row.request] = _with_drafts(proposals[row.request], predicted.tokens_R)
        return result

    def read(self, chunks: Mapping[int, Proposal]) -> None:
        """Read as many positions of the texts as these chunks have."""
        drafted = {key: each for key, each in chunks.items() if each.text is not None}
        cuts = {key: self._proposal(key, each).cut(len(each.ids)) for key, each in drafted.items()}
        if own := {key: chunk for key, (chunk, rest) in cuts.items() if rest}:
            self._model.read(own)

    def release(self, request: int, *, keep: bool = False) -> None:
        """Free a request's slot. With `keep`, requests that begin alike may still copy it."""
        first, (_, ids) = self._model.first, self._read.get(request, NOTHING_READ)
        if keep and request in self._read:
            first.keep(request, min(len(ids), first.cached(request)))
        else:
            first.release(request)
        self._read = {each: read for each, read in self._read.items() if first.copyable(each)}

    def _proposal(self, request: int, proposal: Proposal) -> Proposal:
        """The proposal that makes the draft model write its first draft; `drafts` more may
        follow."""
        text, window = proposal.text, self._config.model.window
        assert text is not None
        count = min(proposal.drafts, window // 2)
        origin = request if request in self._read else proposal.source or request
        start, before = self._read.get(origin, NOTHING_READ)
        if len(text) - start + count > window:  # the newer half, or less
            start = len(text) - (window - count) // 2
        ids = self._ids(text[start:])
        same = min(len(ids) - 1, len(before), self._model.first.copyable(origin))
        differing = np.flatnonzero(ids[:same] != before[:same])
        cached = int(differing[0]) if differing.size else same
        self._read[request] = start, ids
        # The draft model reads the text from elsewhere, so the answer begins at another position.
        shift = len(ids) - (proposal.start + proposal.context + 1)
        return Proposal(
            cached, ids[cached:], 1, len(text), proposal.sampling, count - 1,
            answer_from=max(0, proposal.answer_from + shift),
            source=origin if cached and origin != request else 0,
        )  # fmt: skip

    def _ids(self, text: Sequence[int]) -> np.ndarray:
        """The ids of a text, after the BOS token if texts begin with one."""
        vocabulary = self._config.vocabulary
        begins = not text or (vocabulary.starts_with_bos and text[0] != vocabulary.bos)
        ids = np.array([*([vocabulary.bos] if begins else ()), *text], np.uint32)
        return np.minimum(ids, vocabulary.ids - 1)  # the larger model's may be padded further


def _with_drafts(proposal: Proposal, drafts: np.ndarray) -> Proposal:
    ids = np.concatenate([proposal.ids, drafts.astype(proposal.ids.dtype)])
    return replace(proposal, ids=ids, read=proposal.read + len(drafts), drafts=0)


def check_same_tokens(model: Tokenizer, draft: Tokenizer, name: str) -> None:
    """Raise ConfigError if a draft model's tokens are not the model's."""
    if _tokens(model) != _tokens(draft):
        raise ConfigError(
            f"--draft {name} has another tokenizer ({_described(draft)}) than the model"
            f" ({_described(model)}); use a draft model with the same tokenizer"
        )


def _tokens(tokenizer: Tokenizer) -> tuple[Any, Any]:
    """What defines a tokenizer's tokens: its model and added tokens; nothing for bytes. Files
    beside it may differ, such as a chat template."""
    described = json.loads(tokenizer.files.get(TOKENIZER_FILE, b"{}"))
    return described.get("model"), described.get("added_tokens")


def _described(tokenizer: Tokenizer) -> str:
    vocabulary = tokenizer.vocabulary
    return f"{vocabulary.size} tokens, {vocabulary.sha256[:12]}" if vocabulary.sha256 else "bytes"
