"""Validation of JSON bodies and parameters against the schemas of the OpenAPI description.

The error messages are part of the API: they name the field, the value, the limit and the nearest
valid name. No library gives such messages: jsonschema and jsonschema-rs have fixed ones, and
pydantic and msgspec need classes instead of the published schemas.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import orjson

from qkv.errors import unknown_name_error
from qkv.serve import limits

Schema = Mapping[str, Any]

PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int, float),
    "number": (int, float),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
}


def find_violation(x: Any, schema: Schema, location: str = "the body") -> str | None:
    """Return a sentence on where and how `x` violates the schema; None if `x` is valid.

    `location` names `x` in the sentence.

    >>> top = {"type": "integer", "minimum": 1, "maximum": 1000}
    >>> find_violation({"top": 0}, {"type": "object", "properties": {"top": top}})
    'top must be at least 1, not 0'
    >>> find_violation(5, top)
    """
    if "anyOf" in schema:
        faults = [find_violation(x, option, location) for option in schema["anyOf"]]
        if None in faults:
            return None
        types = " or ".join(_describe_type(option) for option in schema["anyOf"])
        return next(
            (f for f in faults if f and " must be " not in f), f"{location} must be {types}"
        )
    if "enum" in schema and x not in schema["enum"]:
        return str(unknown_name_error(location, x, schema["enum"]))
    kinds = schema.get("type")
    if kinds is not None:
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not any(_has_type(x, kind) for kind in kinds):
            expected = " or ".join(map(_with_article, kinds))
            return f"{location} must be {expected}, not {_shorten_repr(x)}"
    if isinstance(x, str):
        return _find_text_violation(x, schema, location)
    if isinstance(x, int | float) and not isinstance(x, bool):
        return _find_number_violation(x, schema, location)
    if isinstance(x, list):
        return _find_list_violation(x, schema, location)
    if isinstance(x, dict):
        return _find_object_violation(x, schema, location)
    return None


DIGITS_TO_NINES, LONG_NUMBER = bytes.maketrans(b"012345678", b"9" * 9), b"9" * 19
ESCAPED_COLON_PREFIX = b"\\u003"


def parse_validated_json(
    raw: bytes | bytearray, schema: Schema, location: str = "the body"
) -> dict[str, Any]:
    """Parse a JSON object and check it against the schema; raise `ValueError` if it is invalid.

    >>> parse_validated_json(
    ...     b'{"top": 5.0}', {"type": "object", "properties": {"top": {"type": "integer"}}}
    ... )
    {'top': 5}
    """
    try:
        body = _load_json(raw)
    except RecursionError:
        raise ValueError(f"{location} is nested too deeply") from None
    except DuplicateNameError as error:
        raise ValueError(f"{location} {error}") from None
    except ValueError as error:
        raise ValueError(f"{location} is not JSON: {error}") from None
    # This number is an upper bound on the depth, and fast to compute.
    opened = raw.count(b"[") + raw.count(b"{")
    if opened > limits.MAX_JSON_DEPTH and is_deeper_than(body, limits.MAX_JSON_DEPTH):
        raise ValueError(f"{location} is nested too deeply")
    if violation := find_violation(body, schema, location):
        raise ValueError(violation)
    return normalize_integers(body, schema)


def _load_json(raw: bytes | bytearray) -> Any:
    """Parse JSON with orjson, or with the module json if orjson would lose data.

    orjson rounds integers of more than 64 bits, and keeps only the last of two equal names.
    """
    if LONG_NUMBER not in raw.translate(DIGITS_TO_NINES):
        # orjson.dumps raises TypeError for a body that is nested too deeply.
        with contextlib.suppress(ValueError, TypeError):
            body, colons = orjson.loads(raw), raw.count(b":")
            # If text and parsed body have the same number of colons, orjson dropped no name.
            if isinstance(body, dict) and len(body) == colons:
                return body
            if ESCAPED_COLON_PREFIX not in raw and orjson.dumps(body).count(b":") == colons:
                return body
    options: Any = {"parse_constant": _reject_constant, "parse_float": _parse_float}
    return json.loads(raw, object_pairs_hook=_reject_duplicates, **options)


class DuplicateNameError(ValueError):
    """A JSON object has the same name twice."""


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise DuplicateNameError(f"has the name {twice!r} twice in one object: leave one out")
    return unique


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def _parse_float(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text[:40]} is too large for a float")
    return number


def is_deeper_than(x: Any, most: int) -> bool:
    """Return whether more than `most` lists and objects are inside each other.

    >>> is_deeper_than([[{"a": 1}]], 3), is_deeper_than([[{"a": 1}]], 2)
    (False, True)
    """
    level = [x]
    for _ in range(most + 1):
        inside = [y for y in level if isinstance(y, list | dict)]
        if not inside:
            return False
        level = [z for y in inside for z in (y.values() if isinstance(y, dict) else y)]
    return True


def normalize_integers(x: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    """Convert numbers such as 5.0 to int if their schema has the type integer.

    >>> normalize_integers({"top": 5.0}, {"properties": {"top": {"type": "integer"}}})
    {'top': 5}
    """
    properties = schema.get("properties", {})
    counts = {name for name in x if properties.get(name, {}).get("type") == "integer"}
    return {name: int(item) if name in counts else item for name, item in x.items()}


def parse_parameter(text: str, schema: Schema) -> Any:
    """Convert the text of a query parameter to the type of its schema.

    Text of another form is returned unchanged.

    >>> (
    ...     parse_parameter("5", {"type": "integer"}),
    ...     parse_parameter("true", {"type": "boolean"}),
    ...     parse_parameter("x", {"type": "integer"}),
    ... )
    (5, True, 'x')
    """
    match schema.get("type"):
        case "integer" if re.fullmatch(r"-?(0|[1-9][0-9]{0,17})", text):
            return int(text)
        case "boolean" if text in ("true", "false"):
            return text == "true"
    return text


def _has_type(x: Any, kind: str) -> bool:
    """Return whether a value has this JSON type. 5.0 counts as an integer."""
    if isinstance(x, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(x, float):
        return x.is_integer()
    return isinstance(x, PYTHON_TYPES[kind])


def _find_text_violation(x: str, schema: Schema, location: str) -> str | None:
    most, pattern = schema.get("maxLength"), schema.get("pattern")
    if most is not None and len(x) > most:
        return f"{location} must have at most {most:,} characters, not {len(x):,}"
    if pattern is not None and not re.search(pattern, x):
        return f"{location} must match {pattern}, not {_shorten_repr(x)}"
    return None


def _find_number_violation(x: float, schema: Schema, location: str) -> str | None:
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is not None and x < least:
        return f"{location} must be at least {least:,}, not {x}"
    if most is not None and x > most:
        return f"{location} must be at most {most:,}, not {x}"
    return None


def _find_list_violation(x: list[Any], schema: Schema, location: str) -> str | None:
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    if len(x) < least:
        return f"{location} must have at least {least} {'item' if least == 1 else 'items'}"
    if most is not None and len(x) > most:
        return f"{location} may have at most {most:,} items, not {len(x):,}: send several requests"
    items = schema.get("items")
    if not items:
        return None
    violations = (find_violation(item, items, f"{location}[{i}]") for i, item in enumerate(x))
    return next((violation for violation in violations if violation), None)


def _find_object_violation(x: dict[str, Any], schema: Schema, location: str) -> str | None:
    prefix = "" if location == "the body" else f"{location}."
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in x:
            return f"{location} must have {name!r}"
    additional = schema.get("additionalProperties", True)
    for name, item in x.items():
        if name not in properties and additional is False:
            return str(unknown_name_error(f"name in {location}", name, properties))
        expected = properties.get(name, additional if isinstance(additional, dict) else {})
        if violation := find_violation(item, expected, f"{prefix}{name}"):
            return violation
    return None


def _with_article(kind: str) -> str:
    if kind == "null":
        return kind
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _describe_type(schema: Schema) -> str:
    kind = schema.get("type", "anything")
    return _with_article(kind) if isinstance(kind, str) else " or ".join(map(_with_article, kind))


def _shorten_repr(x: Any) -> str:
    text = repr(x)
    return text if len(text) <= 60 else f"{text[:59]}…"
