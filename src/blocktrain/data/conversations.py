"""Reads conversations from JSON lines, as text of which only the answers are trained on.

A line has {"messages": [{"role", "content"}, ...]} or {"prompt", "completion"}. The tokenizer's
chat template renders it; what an answer adds to the text is trained on. Without a template,
messages are the lines that `blocktrain serve` makes of them, and a completion follows its prompt
directly.
"""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from blocktrain.data.chat_template import SPEAKER_OF, ChatTemplate
from blocktrain.data.documents import Piece, read_lines
from blocktrain.data.sources import Source, TextFile, file_source
from blocktrain.data.tokenizer import Tokenizer
from blocktrain.errors import DataError, RequestError

KIND = "chat"
ASSISTANT = "assistant"


class TextPart(NamedTuple):
    text: str
    counts: bool  # whether it is trained on


class Conversation(NamedTuple):
    messages: list[tuple[str, str]]  # roles and texts
    is_completion: bool  # a prompt and its completion
    where: str  # file and line, for errors


def is_chat(spec: str) -> bool:
    return spec.partition(":")[0] == KIND


def chat_source(spec: str, tokenizer: Tokenizer) -> Source:
    """The conversations in the files that match chat:GLOB."""
    found = file_source(f"jsonl:{spec.partition(':')[2]}")
    files = {
        split: [_with_conversations(file, tokenizer) for file in files]
        for split, files in found.files.items()
    }
    return Source(f"{spec}\n{found.fingerprint}", files)


def _with_conversations(file: TextFile, tokenizer: Tokenizer) -> TextFile:
    return replace(file, pieces=partial(read_conversations, Path(file.name), tokenizer))


def read_conversations(path: Path, tokenizer: Tokenizer) -> Iterator[Piece]:
    template = ChatTemplate.of_tokenizer(tokenizer.files)
    if template is None:
        yield from _pieces(path, None, tokenizer)
        return
    with closing(template):
        yield from _pieces(path, template, tokenizer)


def _pieces(path: Path, template: ChatTemplate | None, tokenizer: Tokenizer) -> Iterator[Piece]:
    has_end = tokenizer.end is not None
    for number, line, position in read_lines(path):
        conversation = _parsed(line, f"{path}, line {number}")
        if template:
            parts = _rendered(template, conversation)
        else:
            parts = _as_text(conversation, has_end=has_end)
        for index, part in enumerate(parts):
            # A template itself writes what ends an answer.
            ends = template is None and index == len(parts) - 1
            yield Piece(part.text.encode(errors="replace"), index == 0, ends, position, part.counts)


def _parsed(line: bytes, where: str) -> Conversation:
    try:
        row = json.loads(line)
    except ValueError:
        raise DataError(f"{where}: not valid JSON; correct the line or leave it out") from None
    if isinstance(row, dict) and {"prompt", "completion"} <= row.keys():
        pair = [("user", row["prompt"]), (ASSISTANT, row["completion"])]
        return Conversation(_checked(pair, where), True, where)
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
        raise DataError(f"{where}: needs the field messages, or prompt and completion")
    pairs = [
        (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        for message in row["messages"]
    ]
    messages = _checked(pairs, where)
    if not any(role == ASSISTANT for role, _ in messages):
        raise DataError(f"{where}: no message has the role {ASSISTANT}, so nothing can be learned")
    return Conversation(messages, False, where)


def _checked(pairs: list[tuple[Any, Any]], where: str) -> list[tuple[str, str]]:
    for role, text in pairs:
        if role not in SPEAKER_OF or not isinstance(text, str):
            raise DataError(
                f"{where}: every message needs a text as its content and one of the roles"
                f" {', '.join(SPEAKER_OF)}"
            )
    return pairs


def _rendered(template: ChatTemplate, conversation: Conversation) -> list[TextPart]:
    """The text before each answer, and what the answer adds to it."""
    parts, done, messages = [], "", conversation.messages
    for index, (role, _) in enumerate(messages):
        if role == ASSISTANT:
            before = _render(template, conversation, messages[:index], prompts=True)
            after = _render(template, conversation, messages[: index + 1], prompts=False)
            if not (before.startswith(done) and after.startswith(before)):
                raise DataError(
                    f"{conversation.where}: the chat template writes earlier messages differently"
                    " once others follow; split the conversation so that each has one answer"
                )
            parts += [TextPart(before[len(done) :], False), TextPart(after[len(before) :], True)]
            done = after
    return parts


def _render(
    template: ChatTemplate,
    conversation: Conversation,
    messages: list[tuple[str, str]],
    *,
    prompts: bool,
) -> str:
    try:
        return template.render(messages, {"add_generation_prompt": prompts})
    except RequestError as error:
        raise DataError(f"{conversation.where}: {error}; correct the conversation") from None


def _as_text(conversation: Conversation, *, has_end: bool) -> list[TextPart]:
    """Without a template. If no token ends an answer, the next line's label does, so it is trained
    on."""
    if conversation.is_completion:
        (_, prompt), (_, completion) = conversation.messages
        return [
            TextPart(prompt, False),
            TextPart(completion if has_end else completion + "\n", True),
        ]
    parts = []
    for role, text in conversation.messages:
        label = f"{SPEAKER_OF[role]}:"
        if role == ASSISTANT:
            parts += [TextPart(f"{label} ", False), TextPart(f"{text}\n", True)]
        else:
            parts += [
                TextPart(label, role == "user" and not has_end),
                TextPart(f" {text}\n", False),
            ]
    return parts
