"""JSON against its schema: the part of JSON Schema that the bodies here are written in.

What is published in the OpenAPI description is what is checked.
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


def find_violation(x: Any, schema: Schema, place: str = "the body") -> str | None:
    """Why x is not as the schema says, as a sentence that names the place; None where it is.

    >>> top = {"type": "integer", "minimum": 1, "maximum": 1000}
    >>> find_violation({"top": 0}, {"type": "object", "properties": {"top": top}})
    'top must be at least 1, not 0'
    >>> find_violation(5, top)
    """
    if "anyOf" in schema:
        faults = [find_violation(x, option, place) for option in schema["anyOf"]]
        if None in faults:
            return None
        told = " or ".join(_describe_type(option) for option in schema["anyOf"])
        return next((f for f in faults if f and " must be " not in f), f"{place} must be {told}")
    if "enum" in schema and x not in schema["enum"]:
        return str(unknown_name_error(place, x, schema["enum"]))
    kinds = schema.get("type")
    if kinds is not None:
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not any(_has_type(x, kind) for kind in kinds):
            return (
                f"{place} must be {' or '.join(map(_with_article, kinds))}, not {_shorten_repr(x)}"
            )
    if isinstance(x, str):
        return _find_text_violation(x, schema, place)
    if isinstance(x, int | float) and not isinstance(x, bool):
        return _find_number_violation(x, schema, place)
    if isinstance(x, list):
        return _find_list_violation(x, schema, place)
    if isinstance(x, dict):
        return _find_object_violation(x, schema, place)
    return None


DIGITS_TO_NINES, LONG_NUMBER = bytes.maketrans(b"012345678", b"9" * 9), b"9" * 19
ESCAPED_COLON_PREFIX = b"\\u003"


def parse_json(raw: bytes | bytearray, schema: Schema, place: str = "the body") -> dict[str, Any]:
    """The object that JSON tells of and that fits the schema; a ValueError says why it does not.

    >>> parse_json(b'{"top": 5.0}', {"type": "object", "properties": {"top": {"type": "integer"}}})
    {'top': 5}
    """
    try:
        body = _load_json(raw)
    except RecursionError:
        raise ValueError(f"{place} is nested too deeply") from None
    except DuplicateNameError as error:
        raise ValueError(f"{place} {error}") from None
    except ValueError as error:
        raise ValueError(f"{place} is not JSON: {error}") from None
    opened = raw.count(b"[") + raw.count(b"{")  # seldom as many as would do, however they lie
    if opened > limits.MAX_JSON_DEPTH and is_deeper_than(body, limits.MAX_JSON_DEPTH):
        raise ValueError(f"{place} is nested too deeply")
    if found := find_violation(body, schema, place):
        raise ValueError(found)
    return normalize_integers(body, schema)


def _load_json(raw: bytes | bytearray) -> Any:
    """JSON by orjson, but what it refuses and we do not, or would round, integers that are long, or
    drop: the first of two cells of one name."""
    if LONG_NUMBER not in raw.translate(DIGITS_TO_NINES):
        with contextlib.suppress(ValueError, TypeError):  # the second where it is too deep to write
            found, colons = orjson.loads(raw), raw.count(b":")
            if isinstance(found, dict) and len(found) == colons:  # one for each name, and no other
                return found
            # Each name has its colon, and no other comes or goes but one written by its number.
            if ESCAPED_COLON_PREFIX not in raw and orjson.dumps(found).count(b":") == colons:
                return found
    how: Any = {"parse_constant": _reject_constant, "parse_float": _parse_float}
    return json.loads(raw, object_pairs_hook=_reject_duplicates, **how)


class DuplicateNameError(ValueError):
    """An object has a name twice."""


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise DuplicateNameError(f"has {twice!r} twice in one object: leave one out")
    return found


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")


def _parse_float(text: str) -> float:
    if math.isinf(found := float(text)):
        raise ValueError(f"{text[:40]} is more than a float holds")
    return found


def is_deeper_than(x: Any, most: int) -> bool:
    """Whether lists and objects lie within each other more than so many times.

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
    """An object that fits, with 5 for a 5.0 where the schema wants an integer.

    >>> normalize_integers({"top": 5.0}, {"properties": {"top": {"type": "integer"}}})
    {'top': 5}
    """
    known = schema.get("properties", {})
    counts = {name for name in x if known.get(name, {}).get("type") == "integer"}
    return {name: int(item) if name in counts else item for name, item in x.items()}


def parse_parameter(text: str, schema: Schema) -> Any:
    """A parameter's text as what its schema wants; as it is where it is no such thing.

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
    if isinstance(x, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(x, float):
        return x.is_integer()
    return isinstance(x, PYTHON_TYPES[kind])


def _find_text_violation(x: str, schema: Schema, place: str) -> str | None:
    most, pattern = schema.get("maxLength"), schema.get("pattern")
    if most is not None and len(x) > most:
        return f"{place} must have at most {most:,} characters, not {len(x):,}"
    if pattern is not None and not re.search(pattern, x):
        return f"{place} must be of the form {pattern}, not {_shorten_repr(x)}"
    return None


def _find_number_violation(x: float, schema: Schema, place: str) -> str | None:
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is not None and x < least:
        return f"{place} must be at least {least:,}, not {x}"
    if most is not None and x > most:
        return f"{place} must be at most {most:,}, not {x}"
    return None


def _find_list_violation(x: list[Any], schema: Schema, place: str) -> str | None:
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    if len(x) < least:
        return f"{place} must hold at least {least}"
    if most is not None and len(x) > most:
        return f"{place} may hold at most {most:,}, not {len(x):,}: send the rest by themselves"
    items = schema.get("items")
    if not items:
        return None
    found = (find_violation(item, items, f"{place}[{i}]") for i, item in enumerate(x))
    return next((one for one in found if one), None)


def _find_object_violation(x: dict[str, Any], schema: Schema, place: str) -> str | None:
    within = "" if place == "the body" else f"{place}."
    known = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in x:
            return f"{place} must have {name!r}"
    rest = schema.get("additionalProperties", True)
    for name, item in x.items():
        if name not in known and rest is False:
            return str(unknown_name_error(f"name in {place}", name, known))
        wish = known.get(name, rest if isinstance(rest, dict) else {})
        if found := find_violation(item, wish, f"{within}{name}"):
            return found
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
