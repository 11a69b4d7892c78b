"""The document says of every action what the action is."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from pydantic import TypeAdapter
from schemathesis.specs.openapi.definitions import OPENAPI_31_VALIDATOR

from blocktrain.coordinator.api import ENDPOINTS
from blocktrain.coordinator.endpoints import IN_PATH, SCHEMES, Endpoint, describe
from blocktrain.protocol.messages import BlockIndex, Count, Identifier, Message

DOCUMENT = describe(ENDPOINTS)
each_action = pytest.mark.parametrize(
    "action", ENDPOINTS, ids=lambda action: f"{action.method} {action.path}"
)


def operation(action: Endpoint) -> dict[str, Any]:
    found: dict[str, Any] = DOCUMENT["paths"][action.path][action.method.lower()]
    return found


def parameters(action: Endpoint) -> dict[tuple[str, str], dict[str, Any]]:
    return {(each["in"], each["name"]): each for each in operation(action)["parameters"]}


def references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        part = list(part.values())
    if isinstance(part, list):
        for each in part:
            yield from references(each)


def resolved(reference: str) -> Any:
    assert reference.startswith("#/")
    found: Any = DOCUMENT
    for step in reference.removeprefix("#/").split("/"):
        found = found[step]
    return found


def test_it_is_a_valid_openapi_document():
    assert DOCUMENT["openapi"] == "3.1.0"
    OPENAPI_31_VALIDATOR.validate(DOCUMENT)
    with pytest.raises(jsonschema_rs.ValidationError):  # so this can be told
        OPENAPI_31_VALIDATOR.validate({**DOCUMENT, "paths": {"/x": {"get": {"responses": []}}}})


def test_every_schema_in_it_is_a_valid_json_schema():
    schemas = list(DOCUMENT["components"]["schemas"].values())
    schemas += [each["schema"] for action in ENDPOINTS for each in operation(action)["parameters"]]
    assert len(schemas) > 25
    for schema in schemas:
        jsonschema_rs.meta.validate(
            {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
        )


def test_it_is_json():
    assert json.loads(json.dumps(DOCUMENT)) == DOCUMENT


def test_it_names_every_action_and_nothing_else():
    described = {
        (path, method) for path, methods in DOCUMENT["paths"].items() for method in methods
    }
    assert described == {(action.path, action.method.lower()) for action in ENDPOINTS}
    assert len(described) == len(ENDPOINTS) > 15


def test_a_reader_of_openapi_finds_every_action():
    schema = schemathesis.openapi.from_dict(DOCUMENT)
    found = {each.ok().label for each in schema.get_all_operations()}
    assert found == {f"{action.method} {action.path}" for action in ENDPOINTS}


def test_every_operation_has_a_name_of_its_own():
    names = [operation(action)["operationId"] for action in ENDPOINTS]
    assert len(set(names)) == len(names)


def test_every_reference_resolves_and_every_schema_is_referred_to():
    found = set(references(DOCUMENT))
    assert {f"#/components/schemas/{name}" for name in DOCUMENT["components"]["schemas"]} == found
    for reference in found:
        assert isinstance(resolved(reference), dict)


@each_action
def test_every_part_of_a_path_is_described(action: Endpoint):
    for name in re.findall(r"{(\w+)}", action.path):
        told = parameters(action)["path", name]
        assert told["required"] is True
        assert told["schema"] == TypeAdapter(IN_PATH[name]).json_schema()
    assert {name for place, name in parameters(action) if place == "path"} == set(
        re.findall(r"{(\w+)}", action.path)
    )


def test_what_follows_the_question_mark_is_described():
    told = {
        (action.path, name): (each["required"], each["schema"])
        for action in ENDPOINTS
        for (place, name), each in parameters(action).items()
        if place == "query"
    }
    assert told == {
        ("/v1/chunks/{name}", "lease"): (True, TypeAdapter(Identifier).json_schema()),
        ("/v1/differences", "block"): (True, TypeAdapter(BlockIndex).json_schema()),
        ("/v1/differences", "after"): (True, TypeAdapter(Count).json_schema()),
        ("/v1/differences", "to"): (True, TypeAdapter(Count).json_schema()),
        ("/v1/events", "after"): (False, TypeAdapter(Count).json_schema()),
    }


@each_action
def test_what_is_taken_and_given_is_described(action: Endpoint):
    told = operation(action)
    assert ("requestBody" in told) == (action.takes is not None)
    if isinstance(action.takes, type):
        assert message_in(told["requestBody"]) == action.takes.__name__
    elif action.takes:
        assert list(told["requestBody"]["content"]) == ["application/octet-stream"]
    if action.gives is None:
        assert "content" not in told["responses"]["204"]
    elif isinstance(action.gives, str):
        assert list(told["responses"]["200"]["content"]) == [action.gives]
    else:
        assert message_in(told["responses"]["200"]) == action.gives.__name__
    assert message_in(told["responses"]["default"]) == "Refusal"


@each_action
def test_what_is_taken_and_given_has_the_fields_of_its_message(action: Endpoint):
    for kind in (action.takes, action.gives):
        if isinstance(kind, type) and issubclass(kind, Message):
            schema = DOCUMENT["components"]["schemas"][kind.__name__]
            assert schema["properties"].keys() == {
                field.serialization_alias or name for name, field in kind.model_fields.items()
            }


@each_action
def test_who_may_ask_is_described(action: Endpoint):
    told = [name for each in operation(action)["security"] for name in each]
    assert told == {"anyone": [], "reader": ["bearer", "invite"], "worker": ["bearer"]}[action.by]
    assert set(told) <= set(SCHEMES) == set(DOCUMENT["components"]["securitySchemes"])


def message_in(part: dict[str, Any]) -> str:
    """The name of the message that a body or an answer is."""
    reference: str = part["content"]["application/json"]["schema"]["$ref"]
    return reference.removeprefix("#/components/schemas/")
