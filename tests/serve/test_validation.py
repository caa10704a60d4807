"""The checker of bodies against the jsonschema package, on the schemas that are served."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.serve import api, inference, page, validation
from qkv.serve.validation import find_violation

BODIES = {
    route.path: route.body
    for route in (*api.ROUTES, *page.ROUTES, *inference.ROUTES)
    if route.body is not None
}
NAMES = sorted({name for body in BODIES.values() for name in body.get("properties", {})})
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 2000)
    | st.sampled_from([0.0, 1.0, 2.5, -1.0, 1e300])
    | st.sampled_from(["", "x", "softmax", "a" * 65, "a.b", "../b"])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("path", BODIES)
@given(data=st.data())
def test_it_says_what_jsonschema_says(path: str, data: st.DataObject) -> None:
    schema = BODIES[path]
    known = schema.get("properties", {})
    body = data.draw(
        st.fixed_dictionaries(
            dict.fromkeys(schema.get("required", ()), JSON),
            optional={name: JSON for name in known if name not in schema.get("required", ())},
        )
        | JSON
    )
    valid = jsonschema.Draft202012Validator(schema).is_valid(body)
    assert (find_violation(body, schema) is None) == valid, find_violation(body, schema)


@pytest.mark.parametrize(
    ("x", "schema", "message"),
    [
        (3, {"type": "string"}, "x must be a string, not 3"),
        (True, {"type": "integer"}, "x must be an integer, not True"),
        (True, {"type": "number", "minimum": 0}, "x must be a number, not True"),
        ("z", {"enum": ["abc", "xyz"]}, "unknown x 'z'"),
        ([1, "a"], {"type": "array", "items": {"type": "integer"}}, "x[1] must be an integer"),
        ({"a": {"b": 1}}, {"properties": {"a": {"properties": {"b": {"minimum": 2}}}}}, "x.a.b"),
        ({"b": 1}, {"properties": {"a": {}}, "additionalProperties": False}, "Known: a"),
        ({}, {"required": ["a"]}, "x must have 'a'"),
        (1, {"anyOf": [{"type": "string"}, {"type": "null"}]}, "x must be a string or null"),
        ("a/b", {"pattern": "^[a-z]+$"}, "must match"),
    ],
)
def test_it_names_the_place(x: Any, schema: validation.Schema, message: str) -> None:
    result = find_violation(x, schema, "x")
    assert result is not None and message in result


@pytest.mark.parametrize(
    "raw",
    [
        b'{"query": "a", "query": "b"}',
        b'{"rows": [{"name": "a:b"}, {"name": 1, "n\\u0061me": 2}]}',
        b'{"rows": [{"name": "\\u003a", "name": "x"}]}',
        b'{"top": 12345678901234567890123, "top": 3}',
    ],
)
def test_a_name_that_comes_twice_in_an_object_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"^the body has the name '\w+' twice"):
        validation.parse_validated_json(raw, {"type": "object"})


def test_the_same_name_in_several_objects_is_none_that_comes_twice() -> None:
    body = {"rows": [{"a": "x: y"}, {"a": ":", "b": {"a": [1.5, {"a": None}]}}], "a": "\\u003a"}
    assert validation.parse_validated_json(json.dumps(body).encode(), {"type": "object"}) == body
    with pytest.raises(ValueError, match="the body is nested too deeply"):
        validation.parse_validated_json(b'{"a":' * 300 + b"1" + b"}" * 300, {"type": "object"})


def test_a_parameter_is_read_as_its_type() -> None:
    integer = {"type": "integer"}
    for text in ("", "1.0", "+1", "01", "1_0", " 1", "٣", "9" * 30):
        assert validation.parse_parameter(text, integer) == text
    assert validation.parse_parameter("-7", integer) == -7
    assert validation.parse_parameter("True", {"type": "boolean"}) == "True"
