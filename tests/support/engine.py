"""The smallest real engine: a whole stack on this machine, one byte per traversal, no cache."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.support.serving import pick, text_of
from torch import Tensor

from blocktrain.errors import BlocktrainError
from blocktrain.model.stack import Stack, read_out
from blocktrain.serve.router.decode import AnswerCost, GenerationRequest
from blocktrain.serve.router.output import OutputToken


@dataclass
class SmallEngine:
    """`fails_at` makes `failure` happen after so many bytes."""

    stack: Stack
    seconds_per_byte: float = 0.0
    failure: BlocktrainError | None = None
    fails_at: int = 0
    asked: list[GenerationRequest] = field(default_factory=list)
    under_way: int = 0
    finished: int = 0

    def status(self) -> dict[str, Any]:
        return {"alive": self.failure is None, "stages": [], "requests": self.under_way}

    async def generate(
        self, request: GenerationRequest, account: AnswerCost
    ) -> AsyncGenerator[list[OutputToken], None]:
        self.asked.append(request)
        with self._counted():
            account.prompt_tokens = len(request.prompt)
            output, told = b"", 0
            held_back = max(map(len, request.stop), default=1) - 1
            pieces: list[list[OutputToken]] = []
            while not account.reason:
                if self.failure and len(output) == self.fails_at:
                    raise self.failure
                await asyncio.sleep(self.seconds_per_byte)
                pieces.append(await asyncio.to_thread(self._next, request, output))
                output += text_of(pieces[-1])
                account.traversals += 1
                ends = [at for at in map(output.find, request.stop) if at >= 0]
                if ends or len(output) == request.max_tokens:
                    account.reason = "stop" if ends else "length"
                    output, held_back = output[: min(ends, default=len(output))], 0
                account.output_tokens = len(output)
                while told < len(output) - held_back:
                    yield pieces[told]
                    told += 1
            account.stage_seconds["here"] = 0.5
            self.finished += 1

    @contextmanager
    def _counted(self):
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1

    def _next(self, request: GenerationRequest, output: bytes) -> list[OutputToken]:
        text, sampling = bytes(request.prompt) + output, request.sampling
        log_probs = next_log_probs(self.stack, text)
        byte = pick(log_probs.numpy(), sampling, len(text))
        top = log_probs.topk(request.top_log_probs) if request.top_log_probs else None
        likeliest = dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)) if top else {}
        return [OutputToken(byte, bytes([byte]), float(log_probs[byte]), likeliest)]


def next_log_probs(stack: Stack, text: bytes) -> Tensor:
    """Of the byte after a text of which the newest window is read."""
    config = stack.config
    ids = torch.tensor([[config.vocabulary.bos, *text[-(config.model.window - 1) :]]])
    return read_out("product", [block[0, -1] for block in stack.log_probs(ids)])
