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

from qkv.errors import unknown
from qkv.serve import limits

Schema = Mapping[str, Any]

KINDS: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int, float),
    "number": (int, float),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
}


def fault(x: Any, schema: Schema, place: str = "the body") -> str | None:
    """Why x is not as the schema says, as a sentence that names the place; None where it is.

    >>> top = {"type": "integer", "minimum": 1, "maximum": 1000}
    >>> fault({"top": 0}, {"type": "object", "properties": {"top": top}})
    'top must be at least 1, not 0'
    >>> fault(5, top)
    """
    if "anyOf" in schema:
        faults = [fault(x, option, place) for option in schema["anyOf"]]
        if None in faults:
            return None
        told = " or ".join(_named(option) for option in schema["anyOf"])
        return next((f for f in faults if f and " must be " not in f), f"{place} must be {told}")
    if "enum" in schema and x not in schema["enum"]:
        return str(unknown(place, x, schema["enum"]))
    kinds = schema.get("type")
    if kinds is not None:
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not any(_is(x, kind) for kind in kinds):
            return f"{place} must be {' or '.join(map(_a, kinds))}, not {_shown(x)}"
    if isinstance(x, str):
        return _text(x, schema, place)
    if isinstance(x, int | float) and not isinstance(x, bool):
        return _number(x, schema, place)
    if isinstance(x, list):
        return _list(x, schema, place)
    if isinstance(x, dict):
        return _object(x, schema, place)
    return None


NINES, LONG = bytes.maketrans(b"012345678", b"9" * 9), b"9" * 19
COLON = b"\\u003"


def parsed(raw: bytes | bytearray, schema: Schema, place: str = "the body") -> dict[str, Any]:
    """The object that JSON tells of and that fits the schema; a ValueError says why it does not.

    >>> parsed(b'{"top": 5.0}', {"type": "object", "properties": {"top": {"type": "integer"}}})
    {'top': 5}
    """
    try:
        body = _loaded(raw)
    except RecursionError:
        raise ValueError(f"{place} is nested too deeply") from None
    except Twice as error:
        raise ValueError(f"{place} {error}") from None
    except ValueError as error:
        raise ValueError(f"{place} is not JSON: {error}") from None
    opened = raw.count(b"[") + raw.count(b"{")  # seldom as many as would do, however they lie
    if opened > limits.DEPTH and deep(body, limits.DEPTH):
        raise ValueError(f"{place} is nested too deeply")
    if found := fault(body, schema, place):
        raise ValueError(found)
    return whole(body, schema)


def _loaded(raw: bytes | bytearray) -> Any:
    """JSON by orjson, but what it refuses and we do not, or would round, integers that are long, or
    drop: the first of two cells of one name."""
    if LONG not in raw.translate(NINES):
        with contextlib.suppress(ValueError, TypeError):  # the second where it is too deep to write
            found, colons = orjson.loads(raw), raw.count(b":")
            if isinstance(found, dict) and len(found) == colons:  # one for each name, and no other
                return found
            # Each name has its colon, and no other comes or goes but one written by its number.
            if COLON not in raw and orjson.dumps(found).count(b":") == colons:
                return found
    how: Any = {"parse_constant": _no_number, "parse_float": _float}
    return json.loads(raw, object_pairs_hook=_once, **how)


class Twice(ValueError):
    """An object has a name twice."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise Twice(f"has {twice!r} twice in one object: leave one out")
    return found


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")


def _float(text: str) -> float:
    if math.isinf(found := float(text)):
        raise ValueError(f"{text[:40]} is more than a float holds")
    return found


def deep(x: Any, most: int) -> bool:
    """Whether lists and objects lie within each other more than so many times.

    >>> deep([[{"a": 1}]], 3), deep([[{"a": 1}]], 2)
    (False, True)
    """
    level = [x]
    for _ in range(most + 1):
        inside = [y for y in level if isinstance(y, list | dict)]
        if not inside:
            return False
        level = [z for y in inside for z in (y.values() if isinstance(y, dict) else y)]
    return True


def whole(x: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    """An object that fits, with 5 for a 5.0 where the schema wants an integer.

    >>> whole({"top": 5.0}, {"properties": {"top": {"type": "integer"}}})
    {'top': 5}
    """
    known = schema.get("properties", {})
    counts = {name for name in x if known.get(name, {}).get("type") == "integer"}
    return {name: int(item) if name in counts else item for name, item in x.items()}


def read(text: str, schema: Schema) -> Any:
    """A parameter's text as what its schema wants; as it is where it is no such thing.

    >>> (
    ...     read("5", {"type": "integer"}),
    ...     read("true", {"type": "boolean"}),
    ...     read("x", {"type": "integer"}),
    ... )
    (5, True, 'x')
    """
    match schema.get("type"):
        case "integer" if re.fullmatch(r"-?(0|[1-9][0-9]{0,17})", text):
            return int(text)
        case "boolean" if text in ("true", "false"):
            return text == "true"
    return text


def _is(x: Any, kind: str) -> bool:
    if isinstance(x, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(x, float):
        return x.is_integer()
    return isinstance(x, KINDS[kind])


def _text(x: str, schema: Schema, place: str) -> str | None:
    most, pattern = schema.get("maxLength"), schema.get("pattern")
    if most is not None and len(x) > most:
        return f"{place} must have at most {most:,} characters, not {len(x):,}"
    if pattern is not None and not re.search(pattern, x):
        return f"{place} must be of the form {pattern}, not {_shown(x)}"
    return None


def _number(x: float, schema: Schema, place: str) -> str | None:
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is not None and x < least:
        return f"{place} must be at least {least:,}, not {x}"
    if most is not None and x > most:
        return f"{place} must be at most {most:,}, not {x}"
    return None


def _list(x: list[Any], schema: Schema, place: str) -> str | None:
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    if len(x) < least:
        return f"{place} must hold at least {least}"
    if most is not None and len(x) > most:
        return f"{place} may hold at most {most:,}, not {len(x):,}: send the rest by themselves"
    items = schema.get("items")
    if not items:
        return None
    found = (fault(item, items, f"{place}[{i}]") for i, item in enumerate(x))
    return next((one for one in found if one), None)


def _object(x: dict[str, Any], schema: Schema, place: str) -> str | None:
    within = "" if place == "the body" else f"{place}."
    known = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in x:
            return f"{place} must have {name!r}"
    rest = schema.get("additionalProperties", True)
    for name, item in x.items():
        if name not in known and rest is False:
            return str(unknown(f"name in {place}", name, known))
        wish = known.get(name, rest if isinstance(rest, dict) else {})
        if found := fault(item, wish, f"{within}{name}"):
            return found
    return None


def _a(kind: str) -> str:
    if kind == "null":
        return kind
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _named(schema: Schema) -> str:
    kind = schema.get("type", "anything")
    return _a(kind) if isinstance(kind, str) else " or ".join(map(_a, kind))


def _shown(x: Any) -> str:
    text = repr(x)
    return text if len(text) <= 60 else f"{text[:59]}…"
