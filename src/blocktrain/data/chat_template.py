"""Chat templates: conversations as text, rendered in a sandboxed process (template_sandbox.py)."""

import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blocktrain.errors import DataError, RequestError

SPEAKER_OF = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}
SANDBOX = Path(__file__).with_name("template_sandbox.py")
LONGEST_SECONDS = 20.0  # wall time; the sandbox's limit of CPU time is shorter
MAX_SHOWN = 300  # characters of a template's error


class ChatTemplate:
    """A chat template, rendered in a sandboxed process. Thread-safe: it renders one conversation at
    a time."""

    def __init__(
        self, source: str, names: Mapping[str, str] | None = None, cpu_seconds: int = 2
    ) -> None:
        """`names`: special tokens by name, such as bos_token. `cpu_seconds`: per conversation."""
        self.source = source
        names = dict(names or {})
        self._setup = {"template": source, "names": names, "cpu_seconds": cpu_seconds}
        self._lock = threading.Lock()
        self.process: subprocess.Popen[str] | None = None

    @classmethod
    def of_tokenizer(cls, files: Mapping[str, bytes]) -> "ChatTemplate | None":
        """The template in a tokenizer's files, if there is one."""
        config: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            config |= json.loads(files.get(name, b"{}"))
        source = config.get("chat_template")
        if isinstance(source, list):  # several templates by name
            named = {each["name"]: each["template"] for each in source}
            source = named.get("default")
        if "chat_template.jinja" in files:
            source = files["chat_template.jinja"].decode()
        return cls(source, _special_names(config)) if isinstance(source, str) else None

    def render(self, turns: Sequence[tuple[str, str]], options: Mapping[str, Any]) -> str:
        """The prompt for the assistant's next turn. `options` are specific to the template."""
        roles = {"developer": "system"}  # OpenAI's new name, unknown to templates
        messages = [{"role": roles.get(role, role), "content": text} for role, text in turns]
        values = {"tools": None, "documents": None, "add_generation_prompt": True, **options}
        with self._lock:
            answer = self._ask({**values, "messages": messages})
        if "refused" in answer:
            excerpt = answer["refused"][:MAX_SHOWN]
            raise RequestError(f"the chat template refuses these messages: {excerpt}", "messages")
        if "broken" in answer:
            raise DataError(
                f"the model's chat template is broken: {answer['broken'][:MAX_SHOWN]}; use"
                " /v1/completions, or correct the template"
            )
        return answer["text"]

    def close(self) -> None:
        if self.process:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def _ask(self, values: Mapping[str, Any]) -> dict[str, str]:
        if self.process is None:
            # Isolated, and without the server's environment, which contains its keys.
            self.process = subprocess.Popen(
                [sys.executable, "-I", str(SANDBOX)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={},
            )  # fmt: skip
            self._send(self._setup)
        watchdog = threading.Timer(LONGEST_SECONDS, self.process.kill)
        watchdog.start()
        try:
            self._send(values)
            assert self.process.stdout
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            watchdog.cancel()
        if not line:
            self.close()
            return {"broken": "it takes too long or too much memory"}
        answer: dict[str, str] = json.loads(line)
        return answer

    def _send(self, values: Mapping[str, Any]) -> None:
        assert self.process and self.process.stdin
        self.process.stdin.write(json.dumps(values) + "\n")
        self.process.stdin.flush()


def _special_names(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens of a tokenizer_config.json, given as a text or an object with a text."""
    texts = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in config.items()
        if key.endswith("_token")
    }
    return {key: text for key, text in texts.items() if isinstance(text, str)}
