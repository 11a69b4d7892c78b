"""The document says of every endpoint what the endpoint is."""

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
from blocktrain.coordinator.endpoints import SCHEMES, Endpoint, describe
from blocktrain.protocol.messages import BlockIndex, Count, Identifier, Message, Reason

DOCUMENT = describe(ENDPOINTS)
each_action = pytest.mark.parametrize(
    "endpoint", ENDPOINTS, ids=lambda endpoint: f"{endpoint.method} {endpoint.path}"
)


def operation(endpoint: Endpoint) -> dict[str, Any]:
    found: dict[str, Any] = DOCUMENT["paths"][endpoint.path][endpoint.method.lower()]
    return found


def parameters(endpoint: Endpoint) -> dict[tuple[str, str], dict[str, Any]]:
    return {(each["in"], each["name"]): each for each in operation(endpoint)["parameters"]}


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
    schemas += [
        each["schema"] for endpoint in ENDPOINTS for each in operation(endpoint)["parameters"]
    ]
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
    assert described == {(endpoint.path, endpoint.method.lower()) for endpoint in ENDPOINTS}
    assert len(described) == len(ENDPOINTS) > 15


def test_a_reader_of_openapi_finds_every_action():
    schema = schemathesis.openapi.from_dict(DOCUMENT)
    found = {each.ok().label for each in schema.get_all_operations()}
    assert found == {f"{endpoint.method} {endpoint.path}" for endpoint in ENDPOINTS}


def test_every_operation_has_a_name_of_its_own():
    names = [operation(endpoint)["operationId"] for endpoint in ENDPOINTS]
    assert len(set(names)) == len(names)


def test_every_reference_resolves_and_every_schema_is_referred_to():
    found = set(references(DOCUMENT))
    assert {f"#/components/schemas/{name}" for name in DOCUMENT["components"]["schemas"]} == found
    for reference in found:
        assert isinstance(resolved(reference), dict)


@each_action
def test_every_part_of_a_path_is_described(endpoint: Endpoint):
    for name in re.findall(r"{(\w+)}", endpoint.path):
        told = parameters(endpoint)["path", name]
        assert told["required"] is True
        assert told["schema"] == TypeAdapter(endpoint.parameters[name]).json_schema()
    assert {name for place, name in parameters(endpoint) if place == "path"} == set(
        re.findall(r"{(\w+)}", endpoint.path)
    )


def test_what_follows_the_question_mark_is_described():
    told = {
        (endpoint.path, name): (each["required"], each["schema"])
        for endpoint in ENDPOINTS
        for (place, name), each in parameters(endpoint).items()
        if place == "query"
    }
    assert told == {
        ("/v1/chunks/{name}", "lease"): (True, TypeAdapter(Identifier).json_schema()),
        ("/v1/differences", "block"): (True, TypeAdapter(BlockIndex).json_schema()),
        ("/v1/differences", "after"): (True, TypeAdapter(Count).json_schema()),
        ("/v1/differences", "to"): (True, TypeAdapter(Count).json_schema()),
        ("/v1/events", "after"): (False, TypeAdapter(Count).json_schema()),
        ("/v1/page/live", "after"): (False, TypeAdapter(Count).json_schema()),
        ("/v1/page/events", "before"): (False, TypeAdapter(Count).json_schema()),
        ("/v1/page/events", "kinds"): (False, TypeAdapter(Reason).json_schema()),
        ("/v1/page/events", "worker"): (False, TypeAdapter(Count).json_schema()),
        ("/v1/page/events", "block"): (False, TypeAdapter(BlockIndex).json_schema()),
    }


@each_action
def test_what_is_taken_and_given_is_described(endpoint: Endpoint):
    told = operation(endpoint)
    assert ("requestBody" in told) == (endpoint.takes is not None)
    if isinstance(endpoint.takes, type):
        assert message_in(told["requestBody"]) == endpoint.takes.__name__
    elif endpoint.takes:
        assert list(told["requestBody"]["content"]) == ["application/octet-stream"]
    if endpoint.gives is None:
        assert "content" not in told["responses"]["204"]
    elif isinstance(endpoint.gives, str):
        assert list(told["responses"]["200"]["content"]) == [endpoint.gives]
    else:
        assert message_in(told["responses"]["200"]) == endpoint.gives.__name__
    assert message_in(told["responses"]["default"]) == "Refusal"


@each_action
def test_what_is_taken_and_given_has_the_fields_of_its_message(endpoint: Endpoint):
    for kind in (endpoint.takes, endpoint.gives):
        if isinstance(kind, type) and issubclass(kind, Message):
            schema = DOCUMENT["components"]["schemas"][kind.__name__]
            assert schema["properties"].keys() == {
                field.serialization_alias or name for name, field in kind.model_fields.items()
            }


@each_action
def test_who_may_ask_is_described(endpoint: Endpoint):
    told = [name for each in operation(endpoint)["security"] for name in each]
    readers = ["bearer", "invite", "operator"]
    expected = {"anyone": [], "viewer": readers, "reader": readers, "worker": ["bearer"]}
    assert told == expected.get(endpoint.callers, [endpoint.callers])
    assert set(told) <= set(SCHEMES) == set(DOCUMENT["components"]["securitySchemes"])


def message_in(part: dict[str, Any]) -> str:
    """The name of the message that a body or an answer is."""
    reference: str = part["content"]["application/json"]["schema"]["$ref"]
    return reference.removeprefix("#/components/schemas/")
