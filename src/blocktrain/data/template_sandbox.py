"""Renders chat templates in a process of its own, because a template is untrusted code of the
model's publisher.

Reads lines of JSON: first {"template", "names", "cpu_seconds"}, then one conversation per line.
Answers each with {"text"}, {"refused"} (the template rejects this conversation) or {"broken"}. Its
memory and CPU time are limited, and it cannot open files. Imports nothing of blocktrain.
"""

import contextlib
import json
import math
import resource
import sys
import time
from datetime import datetime
from typing import Any

import jinja2
import jinja2.debug
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MEMORY_BYTES = 512 << 20
MAX_CHARACTERS = 1 << 20
WARM_UP = "{{ 'a' | pprint }}"  # imports what templates need, while files can still be opened


class RefusedByTemplateError(Exception):
    """Raised by a template that rejects the messages."""


class Generation(jinja2.ext.Extension):
    """The tag {% generation %}, which marks text to train on. Here it only yields its content."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment(names: dict[str, str]) -> jinja2.Environment:
    """The names and filters that templates of the hub expect, and no more."""
    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    del sandbox.globals["lipsum"]
    sandbox.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        **names,
    }
    sandbox.filters["tojson"] = to_json
    return sandbox


def raise_exception(message: str) -> None:
    raise RefusedByTemplateError(message)


def to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def render(template: jinja2.Template, values: dict[str, Any]) -> dict[str, str]:
    pieces, characters = [], 0
    try:
        for piece in template.generate(values):
            pieces.append(piece)
            characters += len(piece)
            if characters > MAX_CHARACTERS:
                return {"broken": f"it writes more than {MAX_CHARACTERS} characters"}
    except RefusedByTemplateError as error:
        return {"refused": str(error)}
    except MemoryError:
        return {"broken": f"it needs more than {MEMORY_BYTES >> 20} MiB of memory"}
    except Exception as error:  # untrusted code may raise anything
        return {"broken": f"{type(error).__name__}: {error}"}
    return {"text": "".join(pieces)}


def limit(kind: int, value: int) -> None:
    with contextlib.suppress(ValueError, OSError):  # not every system supports every limit
        resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))


def limit_cpu(seconds: int) -> None:
    """Limit the CPU time that this process may still use; beyond that the system ends it."""
    limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + seconds)


def main() -> None:
    first = json.loads(sys.stdin.readline())
    environment({}).from_string(WARM_UP).render()
    limit(resource.RLIMIT_AS, MEMORY_BYTES)
    limit(resource.RLIMIT_NOFILE, 0)
    limit_cpu(first["cpu_seconds"])
    template, answer = None, {}
    try:
        template = environment(first["names"]).from_string(first["template"])
    except Exception as error:  # even compiling an untrusted template may fail
        answer = {"broken": f"{type(error).__name__}: {error}"}
    for line in sys.stdin:
        limit_cpu(first["cpu_seconds"])
        if template:
            answer = render(template, json.loads(line))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
