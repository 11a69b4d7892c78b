"""The model as clients see it: its name, its tokens as text, and conversations as prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from blocktrain.config import Config, Vocabulary
from blocktrain.data.chat_template import SPEAKER_OF, ChatTemplate
from blocktrain.data.tokenizer import ByteTokenizer, Tokenizer
from blocktrain.errors import RequestError

END_OF_TURN = b"\nUser:"


@dataclass(frozen=True)
class ServedModel:
    name: str
    config: Config
    tokenizer: Tokenizer = field(default_factory=ByteTokenizer)
    template: ChatTemplate | None = None
    draft: str = ""  # name of the draft model, if any
    alias: str = ""  # of an imported model: the name of its run's folder

    @property
    def vocabulary(self) -> Vocabulary:
        return self.config.vocabulary

    def encode(self, text: str) -> list[int]:
        """Tokenize a text. The spelling of a special token, such as <|im_end|>, becomes that
        token."""
        return self.tokenizer.encode(text, marks=True)

    def token_name(self, token: int) -> str:
        """A token's name in log-probabilities: its text, or bytes:\\xNN if that is not UTF-8."""
        data = self.tokenizer.token_bytes(token)
        try:
            return data.decode() or self.tokenizer.special_name(token)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def conversation(
        self, turns: Sequence[tuple[str, str]], options: Mapping[str, Any]
    ) -> tuple[list[int], tuple[bytes, ...]]:
        """The prompt for the next turn, and the stop strings besides end tokens. Without a chat
        template, each turn is a line that starts with its speaker."""
        for role, _ in turns:
            if role not in SPEAKER_OF:
                roles = ", ".join(SPEAKER_OF)
                raise RequestError(f"a message's role must be one of {roles}", "messages")
        if options and not self.template:
            raise RequestError(
                f"{self.name} has no chat template, so chat_template_kwargs has no effect; leave it"
                " out", "chat_template_kwargs",
            )  # fmt: skip
        if self.template:
            return self.encode(self.template.render(turns, options)), ()
        lines = [f"{SPEAKER_OF[role]}: {content}\n" for role, content in turns]
        return self.tokenizer.encode("".join([*lines, "Assistant: "])), (END_OF_TURN,)

    def drafts(self, mode: str | None, wanted: str | None) -> str:
        """Who writes the drafts of an answer; empty for the mode's default."""
        has_head = self.config.has_head(0)
        if wanted == "model" and not self.draft:
            raise RequestError(
                "drafts: this server has no draft model; start it with --draft RUN", "drafts"
            )
        if wanted == "head" and not has_head:
            raise RequestError(
                "drafts: the first block of this model has no head; use ngram", "drafts"
            )
        if not wanted and self.draft and (mode in (None, "speculative") or not has_head):
            return "model"
        return wanted or ""

    @property
    def tokenizer_info(self) -> dict[str, Any]:
        """The special tokens by name; bytes have none."""
        vocabulary, name = self.vocabulary, self.tokenizer.special_name
        return {
            "tokenizer_class": type(self.tokenizer).__name__,
            "bos_token": None if vocabulary.is_bytes else name(vocabulary.bos),
            "eos_token": name(vocabulary.eos[0]) if vocabulary.eos else None,
            "chat_template": self.template and self.template.source,
        }

    def card(self, created: int) -> dict[str, Any]:
        """The model's entry in /v1/models."""
        return {
            "id": self.name,
            "object": "model",
            "created": created,
            "owned_by": "blocktrain",
            "context_window": self.config.model.window,
            "vocabulary_size": self.vocabulary.size,
            "tokenizer": self.vocabulary.digest,
            "chat_template": self.template is not None,
            "draft_model": self.draft or None,
            "drafts": [
                *(["head"] if self.config.has_head(0) else []),
                "ngram",
                *(["model"] if self.draft else []),
            ],
            # A sweep without drafts; a cascade's always has some.
            "starts_from_nothing": self.config.kind.denoises,
        }
