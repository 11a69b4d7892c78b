"""The OpenAPI document of a coordinator, from its actions and the protocol's messages."""

import re
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import models_json_schema

from blocktrain.coordinator.action import IN_PATH, Action
from blocktrain.protocol.messages import PROTOCOL, Message, Refusal

BYTES = "application/octet-stream"
SECURITY: dict[str, list[dict[str, list[str]]]] = {
    "anyone": [],
    "reader": [{"bearer": []}, {"invite": []}],
    "worker": [{"bearer": []}],
}
SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "invite": {"type": "apiKey", "in": "header", "name": "Authorization"},
}


def describe(actions: Sequence[Action]) -> dict[str, Any]:
    kinds = {kind for action in actions for kind in (action.takes, action.gives)}
    messages: list[type[Message]] = [Refusal]
    messages += [kind for kind in kinds if isinstance(kind, type)]
    _, schemas = models_json_schema(
        [(message, "validation") for message in sorted(messages, key=lambda kind: kind.__name__)],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, Any] = {}
    for action in actions:
        paths.setdefault(action.path, {})[action.method.lower()] = _operation(action)
    return {
        "openapi": "3.1.0",
        "info": {"title": "blocktrain coordinator", "version": str(PROTOCOL)},
        "paths": paths,
        "components": {"schemas": schemas["$defs"], "securitySchemes": SCHEMES},
    }


def _operation(action: Action) -> dict[str, Any]:
    in_path = re.findall(r"{(\w+)}", action.path)
    operation: dict[str, Any] = {
        "operationId": action.do.__name__,
        "security": SECURITY[action.by],
        "parameters": [
            *(_parameter("path", name, IN_PATH[name], True) for name in in_path),
            *(_parameter("query", *parameter) for parameter in action.parameters),
        ],
        "responses": {
            "204" if action.gives is None else "200": _answer(action.gives),
            "default": {"description": "A refusal", **_content(Refusal)},
        },
    }
    if action.takes:
        taken = BYTES if action.takes == "bytes" else action.takes
        operation["requestBody"] = {"required": True, **_content(taken)}
    return operation


def _answer(gives: type[Message] | str | None) -> dict[str, Any]:
    if gives is None:
        return {"description": "Done"}
    return {"description": "The answer", **_content(gives)}


def _content(kind: type[Message] | str) -> dict[str, Any]:
    if isinstance(kind, str):
        return {"content": {kind: {"schema": {"type": "string"}}}}
    reference = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"content": {"application/json": {"schema": reference}}}


def _parameter(place: str, name: str, kind: Any, required: bool) -> dict[str, Any]:
    schema = TypeAdapter(kind).json_schema()
    return {"name": name, "in": place, "required": required, "schema": schema}
